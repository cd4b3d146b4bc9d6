"""Write rows into PostgreSQL tables: batches by binary COPY, or by INSERT under row-level security; and single
records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rlwatch import codec
from rlwatch.store.fields import FieldTable
from rlwatch.store.fields import plain as _utf8
from rlwatch.store.postgres.connection import Connection, Row

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
