"""Copy rows into a table, binary; or insert them, where row-level security looks at each."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.store.postgres.connection import Connection, Row
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
    "chunk": ("run_id, mset, place, first_seq, v", ("text", "int4", "int4", "int8", "bytea")),
    "completion_batch": (
        "run_id, id, step, attempt, rank, ts, n, v",
        ("text", "int8", "int8", "int8", "int8", "float8", "int8", "bytea"),
    ),
}


def plain(text: str) -> str:
    r"""``text`` as the server can hold it: UTF-8 without NUL.

    >>> plain(chr(0) + "ok")
    '\\x00ok'
    """
    return _utf8(text).replace("\x00", "\\x00")


def copy_rows(db: Connection, run_id: str, table: str, rows: Sequence[Row]) -> None:
    """Copy ``rows`` of a run, each without the run's id, in the order of :data:`_TABLES`."""
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
