"""A batch of items as rows that are copied in, binary, with numbers given by the run's one writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlwatch.ports import Storable
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.sqlite.rows import Batch, dumps
from rlwatch.store.sqlite.rows import plain as _utf8

_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "metric_set": ("run_id, id, names", ("text", "int4", "text")),
    "record": (
        "run_id, seq, attempt, rank, step, ts, mset, v",
        ("text", "int8", "int8", "int8", "int8", "float8", "int4", "bytea"),
    ),
    "event": (
        "run_id, seq, attempt, step, ts, kind, body",
        ("text", "int8", "int8", "int8", "float8", "text", "text"),
    ),
    "finding": (
        "run_id, id, seq, attempt, step, onset_step, detector, kind, severity, body",
        ("text", "int8", "int8", "int8", "int8", "int8", "text", "text", "text", "text"),
    ),
    "forecast": (
        "run_id, seq, attempt, step, ts, mset, v, body",
        ("text", "int8", "int8", "int8", "float8", "int4", "bytea", "text"),
    ),
    "spike_batch": (
        "run_id, id, step, attempt, rank, ts, reason, n, v",
        ("text", "int8", "int8", "int8", "int8", "float8", "text", "int8", "bytea"),
    ),
    "spike_top": (
        "run_id, id, batch, score, step, attempt, rank, body",
        ("text", "int8", "int8", "float8", "int8", "int8", "int8", "text"),
    ),
    "completion_batch": (
        "run_id, id, step, attempt, rank, ts, n, v",
        ("text", "int8", "int8", "int8", "int8", "float8", "int8", "bytea"),
    ),
}
_NUMBERED = ("finding", "spike_batch", "spike_top", "completion_batch")


def plain(text: str) -> str:
    r"""``text`` as the server can hold it: UTF-8 without NUL.

    >>> plain(chr(0) + "ok")
    '\\x00ok'
    """
    return _utf8(text).replace("\x00", "\\x00")


@dataclass(frozen=True, slots=True)
class Numbers:
    """The last number given in each table whose rows have no ``seq`` of their own."""

    finding: int = 0
    spike_batch: int = 0
    spike_top: int = 0
    completion_batch: int = 0


def last_numbers(db: Connection, run_id: str) -> Numbers:
    """Those of the run as it is stored."""
    parts = ", ".join(f"(SELECT coalesce(max(id), 0) FROM {table} WHERE run_id = %(run)s)" for table in _NUMBERED)
    row = db.execute(f"SELECT {parts}", {"run": run_id}).fetchone()
    return Numbers(*(row or ()))


class CopiedBatch(Batch):
    """Rows ready to copy. ``numbers`` become true, like ``last_seq`` and ``new_sets``, once that has committed."""

    numbers = Numbers()
    place: Callable[[Storable], Storable] | None = None
    """Puts an item under other numbers before it is taken."""

    def _add(self, item: Storable) -> None:
        super()._add(item if self.place is None else self.place(item))

    def copy(self, db: Connection, run_id: str, numbers: Numbers) -> None:
        """Copy the rows in; the caller holds the transaction."""
        sets = [(number, dumps(list(names))) for names, (number, _) in self.new_sets.items()]
        findings = list(enumerate(self._findings, start=numbers.finding + 1))
        spikes = list(enumerate(self._spikes, start=numbers.spike_batch + 1))
        tops = [(batch, *top) for batch, (_, of_it) in spikes for top in of_it]
        completions = list(enumerate(self._completions, start=numbers.completion_batch + 1))
        _copy(db, run_id, "metric_set", sets)
        _copy(db, run_id, "record", self._records)
        _copy(db, run_id, "event", self._events)
        _copy(db, run_id, "finding", [(number, *row) for number, row in findings])
        _copy(db, run_id, "forecast", self._new_forecasts(db, run_id))
        _copy(db, run_id, "spike_batch", [(number, *row) for number, (row, _) in spikes])
        _copy(db, run_id, "spike_top", [(n, *top) for n, top in enumerate(tops, start=numbers.spike_top + 1)])
        _copy(db, run_id, "completion_batch", [(number, *row) for number, row in completions])
        self.numbers = replace(
            numbers,
            finding=numbers.finding + len(findings),
            spike_batch=numbers.spike_batch + len(spikes),
            spike_top=numbers.spike_top + len(tops),
            completion_batch=numbers.completion_batch + len(completions),
        )

    @property
    def newest(self) -> Row | None:
        """Step, moment and attempt of the last record of the batch."""
        if not self._records:
            return None
        _, attempt, _, step, ts, *_ = self._records[-1]
        return step, ts, attempt

    def _new_forecasts(self, db: Connection, run_id: str) -> list[Row]:
        """A resumed run relives, and makes again, what it forecast: the first of a ``seq`` stays."""
        first: dict[object, Row] = {}
        for row in self._forecasts:
            first.setdefault(row[0], row)
        if not first:
            return []
        known = "SELECT seq FROM forecast WHERE run_id = %s AND seq = ANY(%s)"
        held = {seq for (seq,) in db.execute(known, (run_id, list(first)))}
        return [row for seq, row in first.items() if seq not in held]


def _copy(db: Connection, run_id: str, table: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    columns, types = _TABLES[table]
    if db.by_policy:  # COPY is refused where row-level security looks at each row
        marks = ", ".join("%s" for _ in types)
        cells = [(run_id, *(plain(cell) if isinstance(cell, str) else cell for cell in row)) for row in rows]
        with db.cursor() as cursor:
            cursor.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", cells)
        return
    with db.cursor() as cursor, cursor.copy(f"COPY {table} ({columns}) FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row((run_id, *(plain(cell) if isinstance(cell, str) else cell for cell in row)))
