"""Store the fields of records that have no column, in a table ``extra`` that is created when the first of them is
written.

A record may thus get a new field without a new format of the file: an older rlwatch reads and writes the file as
before, and leaves the unknown fields in place. Rows are keyed by table and key of the record; ``body`` is a JSON
object.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from rlwatch.store.fields import FieldTable

Key = int | str
Extra = Mapping[Key, str]
"""Key of a record -> JSON text of its fields that have no column."""
_T = TypeVar("_T")
_MADE = """CREATE TABLE IF NOT EXISTS extra (
    kind TEXT NOT NULL, key NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"""


def make_extra(db: sqlite3.Connection) -> None:
    """Create the table ``extra`` if it is missing, in the caller's transaction."""
    db.execute(_MADE)


def keeps_extra(db: sqlite3.Connection) -> bool:
    """Return True if the file has the table ``extra``, that is, if a field without a column was ever stored."""
    try:
        db.execute("SELECT 1 FROM extra LIMIT 0")
    except sqlite3.OperationalError as error:  # cheaper than to look through the schema, which every list of runs would
        if str(error) != "no such table: extra":
            raise
        return False
    return True


def put_extra(db: sqlite3.Connection, rows: Iterable[tuple[str, Key, str]]) -> None:
    """Store fields that have no column, in the caller's transaction; without rows the table ``extra`` is not created.

    ``rows``: name of the record's table, key of the record, and JSON text of the fields. An earlier entry of the same
    table and key is replaced.
    """
    kept = list(rows)
    if kept:
        make_extra(db)
        db.executemany("INSERT OR REPLACE INTO extra VALUES (?, ?, ?)", kept)


def merge_extra(db: sqlite3.Connection, table: FieldTable[_T], records: Mapping[Key, _T]) -> None:
    """Store the fields of ``records`` that have no column, in the caller's transaction.

    ``records``: key -> record of ``table``. Fields that this version of rlwatch does not know stay as stored under
    their keys.
    """
    if not keeps_extra(db):
        put_extra(db, ((table.name, key, rest) for key, one in records.items() if (rest := table.rest_text(one))))
        return
    for key, record in records.items():
        row = db.execute("SELECT body FROM extra WHERE kind = ? AND key = ?", (table.name, key)).fetchone()
        rest = table.merged(row[0] if row else "", record)
        if row and not rest:
            db.execute("DELETE FROM extra WHERE kind = ? AND key = ?", (table.name, key))
        put_extra(db, [(table.name, key, rest)] if rest else [])


def read_table(
    db: sqlite3.Connection,
    table: FieldTable[_T],
    which: str = "",
    values: Sequence[object] = (),
    *,
    key: Callable[[Sequence[Any]], Key] = itemgetter(0),
    **known: Any,
) -> list[_T]:
    """Return the records of a table, with the fields that have no column.

    ``which``: SQL clauses after FROM (WHERE, ORDER BY), with parameters ``values``. ``key`` returns the record's key in
    the table ``extra``, given a row; by default its first column. ``known``: values of fields that are stored
    elsewhere, such as the run's id.
    """
    rows = db.execute(table.select(which), values).fetchall()
    extra = extra_of(db, table) if rows else {}
    if not extra:
        return [table.record(row, **known) for row in rows]
    return [table.record(row, extra.get(key(row)), **known) for row in rows]


def extra_of(db: sqlite3.Connection, table: FieldTable[Any], after: int | None = None) -> Extra:
    """Return all stored fields of the table's records that have no column, by key of the record.

    ``after``: only keys above this number. Nearly every file has none.
    """
    if not keeps_extra(db):
        return {}
    return dict(
        db.execute("SELECT key, body FROM extra WHERE kind = ?1 AND (?2 IS NULL OR key > ?2)", (table.name, after))
    )
