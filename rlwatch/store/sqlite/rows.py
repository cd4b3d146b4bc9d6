"""Encode records as database rows: JSON that distinguishes NaN and infinities, packed metric values, compressed
columns.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlwatch import codec
from rlwatch.error_boundary import call_or, described, shown
from rlwatch.errors import StoreError, UnstorableError
from rlwatch.ports import Storable
from rlwatch.records import (
    APART,
    JSON,
    RESPONSES,
    CompletionBatch,
    Event,
    Finding,
    ForecastRecord,
    PackedMetrics,
    SpikeBatch,
    StepRecord,
)
from rlwatch.store.fields import EVENT, FINDING, FORECAST, RECORD, dumps, loads, plain, whole  # noqa: F401
from rlwatch.store.sqlite.schema import put_extra

if TYPE_CHECKING:
    import numpy as np


# A batch's columns (spikes, completions) as one compressed blob, and its worst rows. No pickle anywhere.
#
# Blob: zlib(level 1) of  u32 length of head | head | column bytes one after the other.  Head: JSON list of
# ``[name, dtype, bytes]``; dtype is numpy's little-endian code, ``"text"`` for a JSON list of strings, or ``"fields"``
# for a JSON object: the fields of the batch that have no column of the table.

Columns = Mapping[str, "np.ndarray | Sequence[str]"]
_NUMBERS = "biuf"
_MOST = 1 << 31  # bytes a blob may unfold to: a damaged or hostile file must not eat the memory


_BATCH_HELD = frozenset(("step", "columns", "reason", "ts", "attempt", "rank"))
_FIELDS = "fields"


def pack_batch(batch: SpikeBatch | CompletionBatch, level: int = 1) -> tuple[int, bytes]:
    """Return the number of rows of a batch of tokens or completions, and the compressed blob that holds it.

    The blob has the batch's columns and those of its fields that have no column of the table. ``level``: zlib's, 0 to
    9. Raises ``ValueError`` for columns that cannot be stored.
    """
    return pack_columns(batch.columns, level, codec.beyond(batch, _BATCH_HELD))


def pack_columns(columns: Columns, level: int = 1, rest: Mapping[str, JSON] | None = None) -> tuple[int, bytes]:
    """Return the number of rows and a blob of ``columns``, compressed at ``level`` of zlib.

    ``columns``: name -> 1-d array of numbers or list of strings, all of one length. ``rest``: further fields to store,
    as JSON values. Raises ``ValueError`` for anything else as a column.
    """
    rows: int | None = None
    head: list[tuple[str, str, int]] = []
    parts: list[bytes] = []
    for name, column in columns.items():
        kind, length, raw = _encode(name, column)
        if rows not in (None, length):
            raise ValueError(f"column {name!r} has {length} rows where the others have {rows}")
        rows = length
        head.append((name, kind, len(raw)))
        parts.append(raw)
    if rest:
        parts.append(dumps(rest).encode())
        head.append(("", _FIELDS, len(parts[-1])))
    top = json.dumps(head).encode()
    return rows or 0, zlib.compress(b"".join((len(top).to_bytes(4, "little"), top, *parts)), level)


def unpack_columns(blob: bytes) -> dict[str, np.ndarray | Sequence[str]]:
    """Return the columns that :func:`pack_columns` stored in ``blob``. Raises ``ValueError`` if the blob is damaged."""
    return unpack_batch(blob)[0]


def unpack_batch(blob: bytes) -> tuple[dict[str, np.ndarray | Sequence[str]], Mapping[str, JSON]]:
    """Return the columns that a blob holds, and the further fields that were packed with them.

    Raises ``ValueError`` if the blob is damaged.
    """
    try:
        unfolding = zlib.decompressobj()
        data = unfolding.decompress(blob, _MOST)
    except zlib.error as error:
        raise ValueError(f"batch: {error}") from error
    if not unfolding.eof:
        raise ValueError("batch is cut short or too large")
    at = 4 + int.from_bytes(data[:4], "little")
    columns: dict[str, np.ndarray | Sequence[str]] = {}
    rest: Mapping[str, JSON] = {}
    for name, kind, size in json.loads(data[4:at]):
        if kind == _FIELDS:
            rest = json.loads(data[at : at + size])
        else:
            columns[name] = _decode(kind, data[at : at + size])
        at += size
    return columns, rest


def worst_rows(columns: Columns, most: int) -> list[tuple[float, dict[str, JSON]]]:
    """Return the up to ``most`` worst rows of a batch of tokens, worst first, as (score, row by column name).

    The score is the size of the token's gradient contribution, or where that is not known of its screening value or its
    log-ratio (nats). NaN scores count as infinite.
    """
    import numpy as np

    scores = _scores(columns)
    order = np.argsort(-scores, kind="stable")[:most]
    return [(float(scores[i]), {name: _cell(column, i) for name, column in columns.items()}) for i in order]


def _scores(columns: Columns) -> np.ndarray:
    """Return the score of each row: size of its gradient contribution, else its screen, else its log-ratio (nats)."""
    import numpy as np

    for name, other in (
        ("contribution", ""),
        ("screen", ""),
        ("ratio", ""),
        ("logp", "old_logp"),
        ("logp", "rollout_logp"),
    ):
        if name not in columns or (other and other not in columns):
            continue
        values = np.asarray(columns[name], dtype=np.float64)
        with np.errstate(all="ignore"):
            if name == "ratio":
                values = np.log(values)
            elif other:
                values = values - np.asarray(columns[other], dtype=np.float64)
        return np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf)
    return np.zeros(len(next(iter(columns.values()), ())))


def _cell(column: np.ndarray | Sequence[str], row: int) -> JSON:
    import numpy as np

    value = column[row]
    return value.item() if isinstance(value, np.generic) else value


def _encode(name: str, column: np.ndarray | Sequence[str]) -> tuple[str, int, bytes]:
    import numpy as np

    values = np.asarray(column)
    if values.dtype.kind in "UO" and all(isinstance(text, str) for text in column):
        texts = [str(text) for text in column]  # numpy's own text type would lose trailing NUL characters
        return "text", len(texts), json.dumps(texts).encode()
    if values.ndim != 1 or values.dtype.kind not in _NUMBERS:
        raise ValueError(
            f"column {name!r} must be a 1-d array of numbers or a list of str; "
            f"got dtype {values.dtype}, shape {values.shape}"
        )
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return little.dtype.str, len(little), little.tobytes()


def _decode(kind: str, raw: bytes) -> np.ndarray | Sequence[str]:
    import numpy as np

    if kind == "text":
        texts: list[str] = json.loads(raw)
        return texts
    dtype = np.dtype(kind)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"column of dtype {kind!r}")
    return np.frombuffer(raw, dtype=dtype).copy()


# A batch of items as rows: everything that can go wrong with an item goes wrong here, before any write.

TOP_ROWS = 50
"""Number of worst rows of a token batch that can be searched without decompressing the batch."""

MetricSets = dict[tuple[str, ...], tuple[int, struct.Struct]]
"""Metric names of a row, in order -> id of this list of names in the file, and how its values are packed."""
_Row = tuple[Any, ...]


def packing(names: Iterable[str]) -> struct.Struct:
    """Return the packing of values of the metrics ``names``: little-endian float64, one per name."""
    return struct.Struct(f"<{len(tuple(names))}d")


class Batch:
    """Rows that are ready to be inserted into ``run.db``, made from items of a run.

    ``last_seq``: highest sequence number so far. ``new_sets``: lists of metric names that the file does not have yet.
    ``rows``: number of rows by table and list of names. The three describe the file only once :meth:`insert` has
    committed. ``forecast_seqs``: lowest sequence number of a forecast by list of names. ``sets``: the lists of metric
    names that the file has.
    """

    def __init__(self, last_seq: int, sets: MetricSets) -> None:
        self.last_seq = last_seq
        self.new_sets: MetricSets = {}
        self.rows: Counter[tuple[str, int]] = Counter()
        self.forecast_seqs: dict[int, int] = {}
        self.extra: list[tuple[str, int, str]] = []
        """Table, ``seq``, and JSON of the fields of a record that have no column."""
        self._sets = sets
        self._records: list[_Row] = []
        self._events: list[_Row] = []
        self._findings: list[_Row] = []
        self._forecasts: list[_Row] = []
        self._spikes: list[tuple[_Row, list[_Row]]] = []
        self._completions: list[_Row] = []

    def add(self, item: Storable) -> None:
        """Encode one item as rows to insert. Raises ``UnstorableError``, which names the item and its value that cannot
        be stored.
        """

        def unstorable(error: Exception) -> None:
            explains = isinstance(error, TypeError | ValueError | OverflowError | StoreError)  # have a clear message
            why = described(error).partition(": ")[2] if explains else described(error)
            refused = UnstorableError(f"cannot store {_label(item)}: {why}")
            refused.item = item
            raise refused from error

        # columns and bodies may hold arbitrary objects, whose methods raise anything
        call_or(lambda: self._add(item), unstorable)

    def add_all(self, items: Iterable[Storable]) -> None:
        """Encode items as rows to insert. Raises ``UnstorableError``, which names an item that cannot be stored.

        Rows that a journal packed are taken without checks: the journal packs values as the database does.
        """
        names: tuple[str, ...] | None = None
        number, packed = 0, Counter[int]()
        for item in items:
            if not isinstance(item, StepRecord) or type(item) is not StepRecord or not RECORD.whole:
                self.add(item)
                continue
            metrics = item.metrics
            if not isinstance(metrics, PackedMetrics) or item.seq <= self.last_seq:
                self.add(item)
                continue
            if metrics.names is not names:
                names, number = metrics.names, self._set_of(metrics.names)[0]
            packed[number] += 1
            self.last_seq = item.seq
            self._records.append((item.seq, item.attempt, item.rank, item.step, item.ts, number, metrics.packed))
        for number, rows in packed.items():
            self.rows["record", number] += rows

    def _add(self, item: Storable) -> None:
        if isinstance(item, StepRecord):
            self._add_record(item)
        elif isinstance(item, Event):
            self._add_event(item)
        elif isinstance(item, Finding):
            self._add_finding(item)
        elif isinstance(item, ForecastRecord):
            self._add_forecast(item)
        elif isinstance(item, CompletionBatch):
            self._add_completions(item)
        else:
            self._add_spikes(item)

    def insert(self, db: sqlite3.Connection) -> None:
        """Insert all rows into ``db``; the caller holds the transaction."""
        if self.new_sets:
            rows = [(number, dumps(list(names))) for names, (number, _) in self.new_sets.items()]
            db.executemany("INSERT INTO metric_set (id, names) VALUES (?, ?)", rows)
        if self._records:
            db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?)", self._records)
        if self._events:
            db.executemany("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?)", self._events)
        if self._findings:
            db.executemany("INSERT INTO finding VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", self._findings)
        if self._forecasts:  # a resumed run relives, and makes again, what it forecast
            db.executemany("INSERT OR IGNORE INTO forecast VALUES (?, ?, ?, ?, ?, ?, ?)", self._forecasts)
        put_extra(db, self.extra)
        for row, tops in self._spikes:
            batch = db.execute("INSERT INTO spike_batch VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid
            db.executemany("INSERT INTO spike_top VALUES (NULL, ?, ?, ?, ?, ?, ?)", [(batch, *top) for top in tops])
        if self._completions:
            db.executemany("INSERT INTO completion_batch VALUES (NULL, ?, ?, ?, ?, ?, ?)", self._completions)

    def _add_record(self, record: StepRecord) -> None:
        number, values = self._packed(record.metrics)
        step, ts = whole(record.step), float(record.ts)
        self.rows["record", number] += 1
        seq = self._next(record)
        self._records.append((seq, whole(record.attempt), whole(record.rank), step, ts, number, values))
        if rest := RECORD.rest(record):
            self.extra.append((RECORD.name, seq, dumps(rest)))

    def _packed(self, metrics: Mapping[str, float]) -> tuple[int, bytes]:
        """Return the id of the list of metric names, and the packed values."""
        number, packed = self._set_of(tuple(metrics))
        try:
            return number, packed.pack(*metrics.values())
        except (struct.error, TypeError, OverflowError):
            raise TypeError(_not_a_number(metrics)) from None

    def _add_forecast(self, forecast: ForecastRecord) -> None:
        """Add a forecast under the ``seq`` of its record."""
        number, values = self._packed(forecast.metrics)
        *where, body = FORECAST.row(forecast)
        self.rows["forecast", number] += 1
        self.forecast_seqs[number] = min(where[0], self.forecast_seqs.get(number, where[0]))
        self._forecasts.append((*where, number, values, body))
        if rest := FORECAST.rest(forecast):
            self.extra.append((FORECAST.name, where[0], dumps(rest)))

    def _add_event(self, event: Event) -> None:
        row = EVENT.row(event)
        row[0] = self._next(event)
        self._events.append(tuple(row))
        if rest := EVENT.rest(event):
            self.extra.append((EVENT.name, row[0], dumps(rest)))

    def _add_finding(self, finding: Finding) -> None:
        self._findings.append((*FINDING.row(finding), dumps(FINDING.body(finding))))

    def _add_spikes(self, spikes: SpikeBatch) -> None:
        step, attempt, rank = whole(spikes.step), whole(spikes.attempt), whole(spikes.rank)
        rows, blob = pack_batch(spikes)
        most = 0 if spikes.reason in (RESPONSES, *APART) else TOP_ROWS
        tops: list[_Row] = [(score, step, attempt, rank, dumps(row)) for score, row in worst_rows(spikes.columns, most)]
        self._spikes.append(((step, attempt, rank, float(spikes.ts), plain(spikes.reason), rows, blob), tops))

    def _add_completions(self, batch: CompletionBatch) -> None:
        step, attempt, rank = whole(batch.step), whole(batch.attempt), whole(batch.rank)
        self._completions.append((step, attempt, rank, float(batch.ts), *pack_batch(batch)))

    def _set_of(self, names: tuple[str, ...]) -> tuple[int, struct.Struct]:
        known = self._sets.get(names) or self.new_sets.get(names)
        if known is None:
            known = (len(self._sets) + len(self.new_sets) + 1, packing(names))
            self.new_sets[names] = known
        return known

    def _next(self, item: StepRecord | Event) -> int:
        seq = whole(item.seq) or self.last_seq + 1
        if seq <= self.last_seq:
            raise ValueError(f"seq {seq} is not above {self.last_seq}, the last one taken")
        self.last_seq = seq
        return seq


def _label(item: Storable) -> str:
    return f"{type(item).__name__} of step {shown(item.step)}"


def _not_a_number(metrics: Mapping[str, float]) -> str:
    for name, value in metrics.items():
        try:
            struct.pack("<d", value)
        except (struct.error, TypeError, OverflowError):
            return f"metric {name!r} must be a number, got {value!r} ({type(value).__name__})"
    return "its metrics are not numbers"
