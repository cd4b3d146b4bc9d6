"""Hold rows, localised tokens and completions of runs in ClickHouse, as far as PostgreSQL has committed them."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlwatch.ports import Bulk
from rlwatch.records import APART
from rlwatch.store.clickhouse.engine import (
    ClickHouseClient,
    RowStream,
    floats,
    literal,
    string,
    strings,
    tables,
    varint,
)
from rlwatch.store.fields import plain
from rlwatch.store.postgres.carrier import Load, RowRange, SeriesPart
from rlwatch.store.postgres.connection import Connection, Row

_ROW = struct.Struct("<qqqqdi")
_BATCH = struct.Struct("<qqqd")
_NEWEST = struct.Struct("<Qqqd")
_PAGE, _NAMES = 5000, 500
BULK = ("record", "point", "latest", "extra", "spike", "completion")
"""Tables that hold data of runs."""


class _Epoch(NamedTuple):
    """One epoch of a writer, with the numbers up to which its rows and batches count."""

    epoch: int
    first_seq: int
    last_seq: int
    spikes: int
    completions: int
    extra: int


class ClickHouse:
    """Engine for the bulk of runs in ClickHouse; implements ``SeriesBackend``. ``name``: prefix of its tables'
    names.
    """

    def __init__(self, engine: ClickHouseClient, name: str) -> None:
        self._engine, self._name = engine, name

    def rows(
        self, db: Connection, run_id: str, after_seq: int, *, limit: int | None = None, newest: bool = False
    ) -> Iterable[Row]:
        """Return records with sequence numbers above ``after_seq`` in order of ``seq``, or the ``newest`` first.

        Each row is ``seq, attempt, rank, step, ts, mset, packed values, extra``. ``limit``: at most so many; None for
        all.
        """
        return self._rows(db, run_id, f"seq > {after_seq}", limit, "DESC" if newest else "ASC")

    def rows_before(self, db: Connection, run_id: str, after_seq: int, attempt: int) -> Iterator[Row]:
        """Iterate over the records above ``after_seq`` that attempts before ``attempt`` wrote, read page by page."""
        while page := self._rows(db, run_id, f"seq > {after_seq} AND attempt < {attempt}", _PAGE, "ASC"):
            yield from page
            after_seq = page[-1][0]

    def _rows(self, db: Connection, run_id: str, which: str, limit: int | None, order: str) -> list[Row]:
        most = "" if limit is None else f"LIMIT {limit}"
        counted, rest = _counted(db, run_id), f"AND {which} ORDER BY seq {order} {most}"
        answer = self._counting(counted, run_id, "seq, attempt, rank, step, ts, mset, v", "record", rest)
        found = []
        while answer:
            found.append((*answer.numbers(_ROW), answer.blob(8)))
        extra = self._extra(counted, run_id, [row[0] for row in found])
        return [(*row, extra.get(row[0], "")) for row in found]

    def _extra(self, counted: Sequence[_Epoch], run_id: str, seqs: Sequence[int]) -> dict[int, str]:
        """Return the fields without a column: ``seq`` -> JSON. Queried only if a row of the run has any."""
        if not seqs or not any(one.extra for one in counted):
            return {}
        answer = self._counting(counted, run_id, "seq, body", "extra", f"AND seq BETWEEN {min(seqs)} AND {max(seqs)}")
        extra, number = {}, struct.Struct("<q")
        while answer:
            seq = answer.numbers(number)[0]
            extra[seq] = answer.text()
        return extra

    def steps(self, db: Connection, run_id: str) -> Iterable[tuple[int, int]]:
        """Return each pair of attempt and step that has records, once, sorted."""
        answer, pair = self._read(db, run_id, "DISTINCT attempt, step", "record", "ORDER BY 1, 2"), struct.Struct("<qq")
        while answer:
            attempt, step = answer.numbers(pair)
            yield attempt, step

    def spans(self, db: Connection, run_id: str) -> dict[int, tuple[int, int]]:
        """Return attempt -> its lowest and its highest step."""
        answer = self._read(db, run_id, "attempt, min(step), max(step)", "record", "GROUP BY attempt ORDER BY attempt")
        found, three = {}, struct.Struct("<qqq")
        while answer:
            attempt, low, high = answer.numbers(three)
            found[attempt] = (low, high)
        return found

    def parts(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]], names: Iterable[str], asked: RowRange
    ) -> Iterator[tuple[str, SeriesPart]]:
        """Iterate over (metric name, rows of the metric in the range ``asked``), metric by metric, rows not in order.

        ``sets``: id of each metric set of the run -> its names. ``names``: the metrics to read.
        """
        known = _by_word(sets)
        asked_for = {plain(name) for name in names}
        wanted = [word for word in known if word in asked_for]
        which = f"AND seq > {asked.after} AND step BETWEEN {asked.low} AND {asked.high}"
        for some in (wanted[at : at + _NAMES] for at in range(0, len(wanted), _NAMES)):
            of = f"AND metric IN ({', '.join(map(literal, some))})"
            answer = self._read(db, run_id, f"metric, {_columns('value')}", "point", f"{of} {which} GROUP BY metric")
            while answer:
                yield known[answer.text()], _part(answer)

    def moments(self, db: Connection, run_id: str) -> SeriesPart:
        """Return the Unix times of the records, as values, in order of ``seq``."""
        import numpy as np

        answer = self._read(db, run_id, _columns("ts"), "record", "")
        if not answer:
            none = np.empty(0, dtype=np.int64)
            return SeriesPart(none, none, none, np.empty(0))
        found = _part(answer)
        order = np.argsort(found.seqs, kind="stable")
        return SeriesPart(*(column[order] for column in found))

    def last_values(
        self, db: Connection, run_id: str, sets: Mapping[int, tuple[str, ...]]
    ) -> Iterable[tuple[int, int, Mapping[str, float]]]:
        """Iterate over ``seq``, step and newest value of each metric.

        They come from the table of newest values. A value there that does not count (its write never committed) is
        replaced by the newest one that does.
        """
        counted = _counted(db, run_id)
        if not sets or not counted:
            return
        statement = "SELECT metric, argMaxMerge(last) FROM {}_latest WHERE run_id = {} GROUP BY metric"
        answer, known = self._engine.read(statement.format(self._name, literal(run_id))), _by_word(sets)
        doubtful = list[str]()
        while answer:
            metric, (epoch, seq, step, value) = answer.text(), answer.numbers(_NEWEST)
            if any(epoch == one.epoch and one.first_seq <= seq <= one.last_seq for one in counted):
                yield seq, step, {known[metric]: value}
            else:
                doubtful.append(metric)
        for some in (doubtful[at : at + _NAMES] for at in range(0, len(doubtful), _NAMES)):
            of = f"AND metric IN ({', '.join(map(literal, some))}) GROUP BY metric"
            answer = self._read(db, run_id, "metric, argMax((epoch, seq, step, value), seq)", "point", of)
            while answer:
                metric, (_, seq, step, value) = answer.text(), answer.numbers(_NEWEST)
                yield seq, step, {known[metric]: value}

    def spikes(
        self, db: Connection, run_id: str, *, last: int | None, reason: str | None, step: int | None
    ) -> Iterable[Row]:
        """Iterate over the run's token batches by step, each as ``step, columns, reason, ts, attempt, rank``.

        ``last``: only so many of the newest; ``reason``, ``step``: only of those; None for all.
        """
        which = _batches_of(db, run_id, "spikes")
        apart = ", ".join(map(literal, APART))
        which += f" AND reason NOT IN ({apart})" if reason is None else f" AND reason = {literal(reason)}"
        which += "" if step is None else f" AND step = {int(step)}"
        answer = self._batches("spike", "step, attempt, rank, ts, reason, v", which, last)
        while answer:
            at, attempt, rank, ts = answer.numbers(_BATCH)
            why, blob = answer.text(), answer.blob()
            yield at, blob, why, ts, attempt, rank

    def top_spikes(self, db: Connection, run_id: str, limit: int) -> Iterable[Row]:
        """Iterate over the ``limit`` worst tokens, worst first, each as ``step, attempt, rank, body, reason``."""
        answer, three = (
            self._engine.read(
                f"SELECT step, attempt, rank, body, reason FROM {self._name}_spike FINAL "
                "ARRAY JOIN scores AS score, bodies AS body, arrayEnumerate(scores) AS place "
                f"WHERE {_batches_of(db, run_id, 'spikes')} "
                f"ORDER BY score DESC, epoch, number, place LIMIT {limit}"
            ),
            struct.Struct("<qqq"),
        )
        while answer:
            yield (*answer.numbers(three), answer.text(), answer.text())

    def completions(self, db: Connection, run_id: str, last: int | None) -> Iterable[Row]:
        """Iterate over the run's batches of completions by step, each as ``step, columns, ts, attempt, rank``.

        ``last``: only so many of the newest; None for all.
        """
        which = _batches_of(db, run_id, "completions")
        answer = self._batches("completion", "step, attempt, rank, ts, v", which, last)
        while answer:
            step, attempt, rank, ts = answer.numbers(_BATCH)
            yield step, answer.blob(), ts, attempt, rank

    def shipment(self, run_id: str) -> ClickHouseShipment:
        """Return the object through which a new writer of the run sends its bulk."""
        return ClickHouseShipment(self._engine, self._name, run_id, time.time)

    def make(self) -> None:
        """Create missing tables; set for how many days ClickHouse keeps their rows, as the store's address says."""
        for statement in tables(self._name):
            self._engine.do(statement)
        for table in BULK:
            of = "record" if table == "extra" else table
            self._keep(f"{self._name}_{table}", self._engine.place.keep_days.get(of))

    def _keep(self, table: str, days: int | None) -> None:
        answer = self._engine.read(
            f"SELECT engine_full FROM system.tables WHERE database = currentDatabase() AND name = {literal(table)}"
        )
        engine_full = answer.text() if answer else ""
        if days is not None and f"toIntervalDay({days})" not in engine_full:
            self._engine.do(f"ALTER TABLE {table} MODIFY TTL at + toIntervalDay({days})")
        elif days is None and "toIntervalDay(" in engine_full:
            self._engine.do(f"ALTER TABLE {table} REMOVE TTL")

    def prune(
        self, db: Connection, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool
    ) -> tuple[int, int]:
        """Remove a run's batches older than ``before`` (Unix seconds); return their number and bytes.

        ``undated``: time that batches without one are taken to have. ``dry_run``: only count. Batches that never
        committed are invisible anyway and not counted.
        """
        table = {Bulk.TOKENS: "spike", Bulk.COMPLETIONS: "completion"}[bulk]
        old = f"{_batches_of(db, run_id, f'{table}s')} AND if(ts = 0, {undated!r}, ts) < {before!r}"
        answer = self._engine.read(
            f"SELECT count(), toUInt64(sum(length(v))) FROM {self._name}_{table} FINAL WHERE {old}"
        )
        count, size = answer.numbers(struct.Struct("<QQ"))
        if count and not dry_run:
            self._engine.do(f"DELETE FROM {self._name}_{table} WHERE {old}")
        return count, size

    def remove(self, run_id: str) -> None:
        """Remove all bulk data of the run."""
        for table in BULK:
            self._engine.do(f"DELETE FROM {self._name}_{table} WHERE run_id = {literal(run_id)}")

    def usage(self) -> dict[str, dict[str, int]]:
        """Return table -> its bytes on the ClickHouse server."""
        names = ", ".join(literal(f"{self._name}_{table}") for table in BULK)
        answer, size = (
            self._engine.read(
                "SELECT table, toUInt64(sum(bytes_on_disk)) FROM system.parts WHERE active "
                f"AND database = currentDatabase() AND table IN ({names}) GROUP BY table"
            ),
            struct.Struct("<Q"),
        )
        found: dict[str, dict[str, int]] = {}
        while answer:
            name = f"ClickHouse {answer.text()}"
            found[name] = {"rows": answer.numbers(size)[0]}
        return found

    def _read(self, db: Connection, run_id: str, what: str, table: str, rest: str) -> RowStream:
        """Return rows of the run that count; ``rest``: SQL of their condition and order."""
        return self._counting(_counted(db, run_id), run_id, what, table, rest)

    def _counting(self, counted: Sequence[_Epoch], run_id: str, what: str, table: str, rest: str) -> RowStream:
        counts = " OR ".join(
            f"epoch = {one.epoch} AND seq BETWEEN {one.first_seq} AND {one.last_seq}"
            for one in counted
            if one.last_seq >= one.first_seq
        )
        if not counts:
            return RowStream(b"")
        return self._engine.read(
            f"SELECT {what} FROM {self._name}_{table} FINAL WHERE run_id = {literal(run_id)} AND ({counts}) {rest}"
        )

    def _batches(self, table: str, what: str, which: str, last: int | None) -> RowStream:
        newest = "" if last is None else f"ORDER BY epoch DESC, number DESC LIMIT {last}"
        return self._engine.read(
            f"SELECT {what} FROM (SELECT * FROM {self._name}_{table} FINAL WHERE {which} {newest}) "
            "ORDER BY step, epoch, number"
        )


def _counted(db: Connection, run_id: str) -> list[_Epoch]:
    rows = db.execute(
        "SELECT epoch, first_seq, last_seq, spikes, completions, extra FROM series_epoch WHERE run_id = %s "
        "ORDER BY epoch",
        (run_id,),
    )
    return [_Epoch(*row) for row in rows]


def _by_word(sets: Mapping[int, tuple[str, ...]]) -> dict[str, str]:
    """Map metric names as the server stores them to our names."""
    return {plain(name): name for names in sets.values() for name in names}


def _batches_of(db: Connection, run_id: str, kind: str) -> str:
    """Return the SQL condition on batches of the run that count."""
    numbers = ((one.epoch, getattr(one, kind)) for one in _counted(db, run_id))
    counts = " OR ".join(f"epoch = {epoch} AND number <= {most}" for epoch, most in numbers if most)
    return f"run_id = {literal(run_id)} AND ({counts or 'false'})"


def _columns(values: str) -> str:
    return f"groupArray(seq), groupArray(step), groupArray(attempt), groupArray({values})"


def _part(answer: RowStream) -> SeriesPart:
    return SeriesPart(*(answer.array(kind) for kind in ("<i8", "<i8", "<i8", "<f8")))


# Send the bulk of a writer's batches to ClickHouse under an epoch, a number of the writer that PostgreSQL records.

MOST_BYTES = 16 << 20
"""Most bytes of one insert; a larger batch is sent in several."""
_SENT_ROW = struct.Struct("<qQqqqdi")
_SENT_BATCH = struct.Struct("<Qqqqqd")
_ROWS = "run_id, seq, epoch, attempt, rank, step, ts, mset, names, v"
_SPIKES = "run_id, epoch, number, step, attempt, rank, ts, reason, n, v, scores, bodies"
_EXTRA = "run_id, seq, epoch, body"
_SEQ = struct.Struct("<qQ")
_COMPLETIONS = "run_id, epoch, number, step, attempt, rank, ts, n, v"


class ClickHouseShipment:
    """Writes of one writer of a run to ClickHouse; implements ``Shipment``.

    ``name``: prefix of the store's tables. ``now`` returns the time in Unix seconds, from which epochs that were never
    given before are made.
    """

    def __init__(self, engine: ClickHouseClient, name: str, run_id: str, now: Callable[[], float]) -> None:
        self._engine, self._name, self._run_id, self._now = engine, name, run_id, now
        self._epoch = 0
        self._first, self._last, self._spikes, self._completions, self._extra = 1, 0, 0, 0, 0
        self._names: dict[int, bytes] = {}

    def send(self, db: Connection, bulk: Load) -> None:
        """Store rows, tokens and completions of a batch in ClickHouse; they count once the transaction of :meth:`note`
        commits.
        """
        if not (bulk.records or bulk.spikes or bulk.completions):
            return
        if not self._epoch:
            self._begin(db)
        run = string(self._run_id)
        blocks = (
            ("row", _ROWS, self._rows(bulk)),
            ("extra", _EXTRA, self._extras(bulk)),
            ("spike", _SPIKES, self._spiked(bulk)),
            ("completion", _COMPLETIONS, self._completed(bulk)),
        )
        for table, columns, rows in blocks:
            for block in _blocks(run + row for row in rows):
                self._engine.insert(f"{self._name}_{table}", columns, block)
        if bulk.records:
            seqs = [int(row[0]) for row in bulk.records]
            self._first, self._last = (self._first if self._last else seqs[0]), seqs[-1]
        self._extra += len(bulk.extra)
        self._spikes += len(bulk.spikes)
        self._completions += len(bulk.completions)

    def note(self, db: Connection) -> None:
        """Record in PostgreSQL how far the epoch counts, in the caller's transaction."""
        if self._epoch:
            db.execute(
                "UPDATE series_epoch SET first_seq = %s, last_seq = %s, spikes = %s, completions = %s, extra = %s "
                "WHERE run_id = %s AND epoch = %s",
                (self._first, self._last, self._spikes, self._completions, self._extra, self._run_id, self._epoch),
            )

    def forget(self) -> None:
        """Continue under a new epoch, so that what was sent and not recorded stays invisible."""
        self._epoch = 0

    def _begin(self, db: Connection) -> None:
        """Take an epoch above all others of the run; an empty one is replaced, so that failed attempts leave
        nothing.
        """
        row = db.execute(
            "SELECT coalesce(max(epoch), 0), coalesce(max(epoch) FILTER "
            "(WHERE last_seq < first_seq AND spikes = 0 AND completions = 0), 0) FROM series_epoch WHERE run_id = %s",
            (self._run_id,),
        ).fetchone()
        highest, empty = row or (0, 0)
        epoch = max(highest + 1, int(self._now() * 1e6))
        if empty:
            db.execute(
                "UPDATE series_epoch SET epoch = %s WHERE run_id = %s AND epoch = %s", (epoch, self._run_id, empty)
            )
        else:
            db.execute("INSERT INTO series_epoch VALUES (%s, %s, 1, 0, 0, 0)", (self._run_id, epoch))
        self._epoch = epoch
        self._first, self._last, self._spikes, self._completions, self._extra = 1, 0, 0, 0, 0

    def _rows(self, bulk: Load) -> Iterator[bytes]:
        for seq, attempt, rank, step, ts, mset, packed in bulk.records:
            names = self._names.get(mset)
            if names is None:
                names = self._names[mset] = strings(bulk.names[mset])
            yield _SENT_ROW.pack(seq, self._epoch, attempt, rank, step, ts, mset) + names + floats(packed)

    def _extras(self, bulk: Load) -> Iterator[bytes]:
        for seq, body in bulk.extra.items():
            yield _SEQ.pack(seq, self._epoch) + string(body)

    def _spiked(self, bulk: Load) -> Iterator[bytes]:
        for number, (row, tops) in enumerate(bulk.spikes, start=self._spikes + 1):
            step, attempt, rank, ts, reason, count, blob = row
            head = _SENT_BATCH.pack(self._epoch, number, step, attempt, rank, ts)
            scores = struct.pack(f"<{len(tops)}d", *(top[0] for top in tops))
            bodies = b"".join(string(top[-1]) for top in tops)
            yield b"".join(
                (
                    head,
                    string(reason),
                    struct.pack("<q", count),
                    string(blob),
                    floats(scores),
                    varint(len(tops)),
                    bodies,
                )
            )

    def _completed(self, bulk: Load) -> Iterator[bytes]:
        for number, row in enumerate(bulk.completions, start=self._completions + 1):
            step, attempt, rank, ts, count, blob = row
            head = _SENT_BATCH.pack(self._epoch, number, step, attempt, rank, ts)
            yield head + struct.pack("<q", count) + string(blob)


def _blocks(rows: Iterator[bytes]) -> Iterator[bytes]:
    """Join rows into blocks of up to :data:`MOST_BYTES`, or of one row."""
    block, size = list[bytes](), 0
    for row in rows:
        if block and size + len(row) > MOST_BYTES:
            yield b"".join(block)
            block, size = [], 0
        block.append(row)
        size += len(row)
    if block:
        yield b"".join(block)
