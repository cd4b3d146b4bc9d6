"""Encode a batch of items as rows, and write rows by binary COPY, or by INSERT under row-level security."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlwatch import codec
from rlwatch.ports import Storable
from rlwatch.store.fields import FieldTable, dumps
from rlwatch.store.fields import plain as _utf8
from rlwatch.store.postgres.carrier import Load, Shipment
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.sqlite.rows import Batch

_NUMBERED = ("finding", "spike_batch", "spike_top", "completion_batch")


@dataclass(frozen=True, slots=True)
class Numbers:
    """The id last given in each database table whose rows have no sequence number of their own."""

    finding: int = 0
    spike_batch: int = 0
    spike_top: int = 0
    completion_batch: int = 0


def last_numbers(db: Connection, run_id: str) -> Numbers:
    """Return the highest id that the run's rows have in each table without sequence numbers; 0 for a table without
    rows.
    """
    parts = ", ".join(f"(SELECT coalesce(max(id), 0) FROM {table} WHERE run_id = %(run)s)" for table in _NUMBERED)
    row = db.execute(f"SELECT {parts}", {"run": run_id}).fetchone()
    return Numbers(*(row or ()))


class CopiedBatch(Batch):
    """Rows that are ready to be copied into PostgreSQL. ``numbers`` are valid once the transaction has committed."""

    numbers = Numbers()
    place: Callable[[Storable], Storable] | None = None
    """Function that shifts an item to other numbers before it is encoded; None to leave items as they are."""

    def _add(self, item: Storable) -> None:
        super()._add(item if self.place is None else self.place(item))

    def copy(self, db: Connection, run_id: str, numbers: Numbers, shipment: Shipment | None = None) -> None:
        """Copy the rows of the batch into PostgreSQL; the caller holds the transaction.

        ``numbers``: the last ones given so far. ``shipment``: if given, it has sent the bulk (records, tokens,
        completions) to another server, and only records here that they count.
        """
        sets = [(number, dumps(list(names))) for names, (number, _) in self.new_sets.items()]
        findings = list(enumerate(self._findings, start=numbers.finding + 1))
        copy_rows(db, run_id, "metric_set", sets)
        copy_rows(db, run_id, "event", self._with_extra("event", self._events))
        copy_rows(db, run_id, "finding", [(number, *row) for number, row in findings])
        copy_rows(db, run_id, "forecast", self._with_extra("forecast", self._new_forecasts(db, run_id)))
        self.numbers = replace(numbers, finding=numbers.finding + len(findings))
        if shipment is None:
            self._copy_bulk(db, run_id)
        else:
            shipment.note(db)

    def _copy_bulk(self, db: Connection, run_id: str) -> None:
        numbers = self.numbers
        spikes = list(enumerate(self._spikes, start=numbers.spike_batch + 1))
        tops = [(batch, *top) for batch, (_, of_it) in spikes for top in of_it]
        completions = list(enumerate(self._completions, start=numbers.completion_batch + 1))
        copy_rows(db, run_id, "record", self._with_extra("record", self._records))
        copy_rows(db, run_id, "spike_batch", [(number, *row) for number, (row, _) in spikes])
        copy_rows(db, run_id, "spike_top", [(n, *top) for n, top in enumerate(tops, start=numbers.spike_top + 1)])
        copy_rows(db, run_id, "completion_batch", [(number, *row) for number, row in completions])
        self.numbers = replace(
            numbers,
            spike_batch=numbers.spike_batch + len(spikes),
            spike_top=numbers.spike_top + len(tops),
            completion_batch=numbers.completion_batch + len(completions),
        )

    def _with_extra(self, table: str, rows: Sequence[Row]) -> list[Row]:
        """Return rows, which begin with their ``seq``, with their fields that have no column."""
        extra = {seq: body for of, seq, body in self.extra if of == table}
        return [(*row, extra.get(row[0], "")) for row in rows]

    @property
    def bulk(self) -> Load:
        """The batch's records, token batches and completions, as rows to send to a server other than PostgreSQL."""
        names = {number: of for of, (number, _) in (self._sets | self.new_sets).items()}
        extra = {seq: body for table, seq, body in self.extra if table == "record"}
        return Load(names, self._records, self._spikes, self._completions, extra)

    def widths(self) -> list[tuple[int, int]]:
        """Return for each record the id of its metric set and its number of metrics."""
        known = {number: len(names) for names, (number, _) in (self._sets | self.new_sets).items()}
        return [(mset, known[mset]) for *_, mset, _ in self._records if isinstance(mset, int)]

    @property
    def newest(self) -> Row | None:
        """Step, Unix time and attempt of the newest record of the batch; None if the batch has no records."""
        if not self._records:
            return None
        _, attempt, _, step, ts, *_ = self._records[-1]
        return step, ts, attempt

    def _new_forecasts(self, db: Connection, run_id: str) -> list[Row]:
        """Return forecasts that are not stored yet: a resumed run repeats some, and the first of a ``seq`` stays."""
        first: dict[object, Row] = {}
        for row in self._forecasts:
            first.setdefault(row[0], row)
        if not first:
            return []
        known = "SELECT seq FROM forecast WHERE run_id = %s AND seq = ANY(%s)"
        held = {seq for (seq,) in db.execute(known, (run_id, list(first)))}
        return [row for seq, row in first.items() if seq not in held]


# Write rows into PostgreSQL tables: batches by binary COPY, or by INSERT under row-level security; and single
# records.

_T = TypeVar("_T")
_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "metric_set": ("run_id, id, names", ("text", "int4", "text")),
    "record": (
        "run_id, seq, attempt, rank, step, ts, mset, v, extra",
        ("text", "int8", "int8", "int8", "int8", "float8", "int4", "bytea", "text"),
    ),
    "event": (
        "run_id, seq, attempt, step, ts, kind, body, extra",
        ("text", "int8", "int8", "int8", "float8", "text", "text", "text"),
    ),
    "finding": (
        "run_id, id, seq, attempt, step, onset_step, detector, kind, severity, body",
        ("text", "int8", "int8", "int8", "int8", "int8", "text", "text", "text", "text"),
    ),
    "forecast": (
        "run_id, seq, attempt, step, ts, mset, v, body, extra",
        ("text", "int8", "int8", "int8", "float8", "int4", "bytea", "text", "text"),
    ),
    "spike_batch": (
        "run_id, id, step, attempt, rank, ts, reason, n, v",
        ("text", "int8", "int8", "int8", "int8", "float8", "text", "int8", "bytea"),
    ),
    "spike_top": (
        "run_id, id, batch, score, step, attempt, rank, body",
        ("text", "int8", "int8", "float8", "int8", "int8", "int8", "text"),
    ),
    "chunk": ("run_id, mset, place, first_seq, v", ("text", "int4", "int4", "int8", "bytea")),
    "completion_batch": (
        "run_id, id, step, attempt, rank, ts, n, v",
        ("text", "int8", "int8", "int8", "int8", "float8", "int8", "bytea"),
    ),
}


def plain(text: str) -> str:
    r"""Return ``text`` as the server can hold it: UTF-8, with NUL characters escaped.

    >>> plain(chr(0) + "ok")
    '\\x00ok'
    """
    return _utf8(text).replace("\x00", "\\x00")


def copy_rows(db: Connection, run_id: str, table: str, rows: Sequence[Row]) -> None:
    """Copy ``rows`` of a run into ``table``; each row lacks the run's id and has the columns in the order of
    :data:`_TABLES`.
    """
    if not rows:
        return
    columns, types = _TABLES[table]
    whole = [(run_id, *(plain(cell) if isinstance(cell, str) else cell for cell in row)) for row in rows]
    with db.cursor() as cursor:
        if db.by_policy:  # COPY is refused there
            marks = ", ".join("%s" for _ in types)
            cursor.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", whole)
            return
        with cursor.copy(f"COPY {table} ({columns}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(types)
            for row in whole:
                copy.write_row(row)


# Records of tables that have the column ``extra``.


def add(db: Connection, table: FieldTable[_T], record: _T, /, **first: object) -> None:
    """Insert the record into its table, unless a row with the same key exists.

    ``first``: values of columns that are not fields of the record, such as the run's id.
    """
    put = table.insert("%s", *first, codec.EXTRA, upon="DO NOTHING")
    db.execute(put.encode(), (*first.values(), plain(table.rest_text(record)), *table.row(record, plain)))


def put(db: Connection, table: FieldTable[_T], record: _T, /, key: str, **first: object) -> None:
    """Insert the record into its table, or replace the row with the same ``key`` (columns separated by ``", "``).

    Fields of the stored row that this version of rlwatch does not know stay. ``first``: values of columns that are not
    fields of the record.
    """
    text, row = plain(table.rest_text(record)), table.row(record, plain)
    statement = f"{table.upsert('%s', *first, codec.EXTRA, key=key)} RETURNING extra"
    found = db.execute(statement.encode(), (*first.values(), text, *row)).fetchone()
    kept = "" if found is None else str(found[0])
    if kept == text:
        return
    values = first | dict(zip(table.columns, row, strict=True))
    where = " AND ".join(f"{column} = %s" for column in key.split(", "))
    changed = f"UPDATE {table.name} SET extra = %s WHERE {where}"
    db.execute(changed.encode(), (table.merged(kept, record), *(values[column] for column in key.split(", "))))


def found(
    db: Connection, table: FieldTable[_T], which: str, values: Sequence[object] | Mapping[str, object] = ()
) -> Iterable[_T]:
    """Return the records of a table that has the column ``run_id``.

    ``which``: SQL clauses after FROM (WHERE, ORDER BY), with parameters ``values``.
    """
    rows = db.execute(table.select(which, "run_id", codec.EXTRA).encode(), values)
    return (record_of(table, row) for row in rows.fetchall())


def record_of(table: FieldTable[_T], row: Sequence[Any]) -> _T:
    """Return the record that a ``row`` of the database table holds.

    ``row``: the run's id, the JSON of fields without a column, then the columns of ``table`` in order.
    """
    return table.record(row[2:], row[1], run_id=row[0])
