"""Create and upgrade the tables of SQLite files by numbered migrations.

A file's version is its ``PRAGMA user_version``: the number of migrations that were applied to it.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from rlwatch.errors import StoreCorruptError, StoreVersionError
from rlwatch.store.fields import FieldTable


@dataclass(frozen=True, slots=True)
class Migration:
    """One change of a file's tables from a version to the next.

    ``name``: what changes, for people. ``apply``: makes the change, in the caller's transaction.
    """

    name: str
    apply: Callable[[sqlite3.Connection], None]


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one transaction: commit all of it or nothing, holding the write lock from the start.

    Transactions never nest. If one is open, an interrupt (Ctrl-C) stopped its code right after BEGIN; it is rolled
    back.
    """
    if db.in_transaction:
        db.execute("ROLLBACK")
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # not committed; after a full disk SQLite may have rolled back by itself
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")


def version_of(db: sqlite3.Connection) -> int:
    """Return the number of migrations that were applied to the file; 0 for a new file."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection, steps: Sequence[Migration], where: str) -> None:
    """Bring the file ``where`` to the newest version: apply each missing migration in a transaction of its own.

    Raises ``StoreVersionError`` if the file is newer than this program.
    """
    refuse_newer(version_of(db), len(steps), where)
    for number, step in enumerate(steps, start=1):
        if version_of(db) >= number:
            continue
        with transaction(db):
            if version_of(db) < number:  # no other process did it while we waited for the lock
                step.apply(db)
                db.execute(f"PRAGMA user_version = {number}")


def check_readable(db: sqlite3.Connection, newest: int, where: str) -> None:
    """Raise an error unless readers know the file's version: ``newest`` or one of the three before.

    Older versions are read because the writer of a live run may be an older program. Raises ``StoreVersionError`` for
    any other version and ``StoreCorruptError`` for a file without tables.
    """
    version = version_of(db)
    refuse_newer(version, newest, where)
    if version == 0:
        raise StoreCorruptError(f"{where} holds no run: it is empty, or not a file of rlwatch")
    if version < newest - 3:
        raise StoreVersionError(
            f"{where} has format {version}; this rlwatch reads {newest - 3} to {newest}: "
            "resume the run once with this version to bring it up to date, or read it with an older rlwatch"
        )


def refuse_foreign(db: sqlite3.Connection, where: str) -> None:
    """Raise ``StoreCorruptError`` for a file that holds anything but plain tables and indexes.

    Run directories are copied between people: a view in place of a table may have endless rows, and a trigger may do
    anything upon a write.
    """
    found = db.execute("SELECT type, name, sql FROM sqlite_master LIMIT 1000")
    for kind, name, sql in chain.from_iterable(iter(lambda: found.fetchmany(32), [])):
        plain = kind == "index" or (kind == "table" and not _is_computed(sql or ""))
        if not plain:
            raise StoreCorruptError(f"{where} is not of rlwatch: {kind} {str(name)[:80]!r} in it is none of its tables")


def _is_computed(sql: str) -> bool:
    """Return whether the SQL of a table computes anything; remembered for short ones, which all runs share."""
    return _short_is_computed(sql) if len(sql) <= _SHORT else bool(_COMPUTED.search(sql))


@lru_cache(maxsize=128)
def _short_is_computed(sql: str) -> bool:
    return bool(_COMPUTED.search(sql))


_SHORT = 2000
"""Most characters of an SQL text that is remembered."""
_COMPUTED = re.compile(r"\A\s*CREATE\s+VIRTUAL|\b(AS|GENERATED)\b|/\*|--", re.IGNORECASE)
"""In the SQL of a table: a virtual table, or a column that is computed when it is read."""


def refuse_newer(version: int, newest: int, where: str) -> None:
    """Raise ``StoreVersionError`` if the file's ``version`` is above ``newest``, the highest that this program
    knows.
    """
    if version > newest:
        raise StoreVersionError(
            f"{where} has format {version}, but this rlwatch knows only up to {newest}: install a newer rlwatch"
        )


# The tables, one function per migration. Comments here are the data dictionary.
#
# Nothing newer than SQLite 3.24 is used: cluster Pythons often carry the distribution's old library. Fields of records
# that have no column lie in a table that is made where there are some (at the end of this file).

_RUN_1 = (
    # The run itself: always exactly one row. The run id is the name of the directory.
    """CREATE TABLE run (
        id INTEGER PRIMARY KEY CHECK (id = 1), project TEXT NOT NULL, name TEXT NOT NULL, source TEXT NOT NULL,
        created_at REAL, config TEXT NOT NULL, tags TEXT NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
        state_reason TEXT NOT NULL, heartbeat_at REAL, host TEXT NOT NULL, pid INTEGER)""",
    # One row per process start; first_seq is the first number it may have written.
    """CREATE TABLE attempt (
        attempt INTEGER PRIMARY KEY, started_at REAL, first_seq INTEGER NOT NULL, host TEXT NOT NULL, pid INTEGER,
        config TEXT NOT NULL)""",
    # Metrics of a record: a JSON list of names, in the order of the packed values.
    "CREATE TABLE metric_set (id INTEGER PRIMARY KEY, names TEXT NOT NULL)",
    # v: little-endian float64 values, one for each name of the metric set.
    """CREATE TABLE record (
        seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, step INTEGER NOT NULL, ts REAL,
        mset INTEGER NOT NULL, v BLOB NOT NULL)""",
    "CREATE INDEX record_by_set ON record (mset)",
    # seq is of the same space as record.seq.
    """CREATE TABLE event (
        seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER, ts REAL, kind TEXT NOT NULL,
        body TEXT NOT NULL)""",
    # body: JSON of the fields that have no column (message, evidence, metric, family, score, baseline, stage...).
    """CREATE TABLE finding (
        id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
        onset_step INTEGER NOT NULL, detector TEXT NOT NULL, kind TEXT NOT NULL, severity TEXT NOT NULL,
        body TEXT NOT NULL)""",
    # v: all N rows of the batch, by column (rlwatch/store/sqlite/rows.py).
    """CREATE TABLE spike_batch (
        id INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, ts REAL,
        reason TEXT NOT NULL, n INTEGER NOT NULL, v BLOB NOT NULL)""",
    # The worst rows of each batch, for searching without opening the blobs; body: JSON of the row.
    """CREATE TABLE spike_top (
        id INTEGER PRIMARY KEY, batch INTEGER NOT NULL, score REAL NOT NULL, step INTEGER NOT NULL,
        attempt INTEGER NOT NULL, rank INTEGER NOT NULL, body TEXT NOT NULL)""",
    "CREATE INDEX spike_top_by_score ON spike_top (score)",
)

# v: all N rows of the batch, by column, as in spike_batch.
_RUN_2 = """CREATE TABLE completion_batch (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, ts REAL,
    n INTEGER NOT NULL, v BLOB NOT NULL)"""

# Forecasts made at the step of the record ``seq``: packed as in record; body: JSON of the fields that are not numbers.
_RUN_3 = (
    """CREATE TABLE forecast (
        seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL, ts REAL, mset INTEGER NOT NULL,
        v BLOB NOT NULL, body TEXT NOT NULL)""",
    "CREATE INDEX forecast_by_set ON forecast (mset)",
)

# Progress. journal: value and body give the part of the journal (named by its nonce) that is stored here.
# judged: findings, forecasts and alerts of all records and events up to the seq ``value`` are written.
_RUN_4 = (
    "CREATE TABLE progress (name TEXT PRIMARY KEY, value INTEGER NOT NULL, body TEXT NOT NULL)",
    # State of the judge after the record or event seq; step: the highest it had seen of this attempt.
    """CREATE TABLE checkpoint (
        seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL, made_by TEXT NOT NULL,
        body BLOB NOT NULL)""",
)

# Rows as columns (rlwatch/store/sqlite/blocks.py). kept_in: the table that kept the n rows of the metric set. seqs,
# steps, attempts, ranks: little-endian int64, or first and stride alone; ts: little-endian float64.
_RUN_5 = (
    """CREATE TABLE block (
        id INTEGER PRIMARY KEY, kept_in TEXT NOT NULL, mset INTEGER NOT NULL, n INTEGER NOT NULL,
        first_seq INTEGER NOT NULL, last_seq INTEGER NOT NULL, low_step INTEGER NOT NULL, high_step INTEGER NOT NULL,
        low_attempt INTEGER NOT NULL, high_attempt INTEGER NOT NULL, seqs BLOB NOT NULL, steps BLOB NOT NULL,
        attempts BLOB NOT NULL, ranks BLOB NOT NULL, ts BLOB NOT NULL)""",
    "CREATE INDEX block_by_set ON block (kept_in, mset, last_seq)",
    # id: that of the block, times 2**20, plus the place of the metric in its set. v: n float64.
    "CREATE TABLE chunk (id INTEGER PRIMARY KEY, v BLOB NOT NULL)",
    # id: that of the block, times 4, plus 0 to 3 for cells of 64, 256, 1024 and 4096 rows. v: cells, metric by metric.
    "CREATE TABLE level (id INTEGER PRIMARY KEY, v BLOB NOT NULL)",
)

_CONTROL_1 = (
    """CREATE TABLE command (
        id INTEGER PRIMARY KEY, command_id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, args TEXT NOT NULL,
        force INTEGER NOT NULL, status TEXT NOT NULL, requested_by TEXT NOT NULL, why TEXT NOT NULL,
        idempotency_key TEXT NOT NULL, created_at REAL, expires_at REAL, claimed_at REAL, finished_at REAL,
        finished_step INTEGER, result TEXT NOT NULL)""",
    "CREATE UNIQUE INDEX command_once ON command (idempotency_key) WHERE idempotency_key <> ''",
    # seen_at: when the alert was first stored.
    """CREATE TABLE alert (
        id INTEGER PRIMARY KEY, alert_id TEXT NOT NULL UNIQUE, seen_at REAL NOT NULL, rule TEXT NOT NULL,
        kind TEXT NOT NULL, severity TEXT NOT NULL, state TEXT NOT NULL, onset_step INTEGER NOT NULL,
        step INTEGER NOT NULL, message TEXT NOT NULL, reason TEXT NOT NULL, detector TEXT NOT NULL,
        evidence TEXT NOT NULL, fired_at REAL, resolved_step INTEGER, resolved_at REAL)""",
    """CREATE TABLE outbox (
        id INTEGER PRIMARY KEY, message_id TEXT NOT NULL UNIQUE, alert_id TEXT NOT NULL, channel TEXT NOT NULL,
        payload TEXT NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL, next_attempt_at REAL NOT NULL,
        lease_until REAL NOT NULL, last_error TEXT NOT NULL, created_at REAL, sent_at REAL)""",
    "CREATE INDEX outbox_pending ON outbox (next_attempt_at) WHERE status = 'pending'",
)


_CONTROL_2 = """CREATE TABLE acknowledgement (
    alert_id TEXT PRIMARY KEY, acknowledged_by TEXT NOT NULL, why TEXT NOT NULL, at REAL NOT NULL,
    severity TEXT NOT NULL)"""

# leased_by: the process that holds the message (rlwatch/store/sqlite/layout.py). touched_at: when it was last leased
# or written back; a time to come means that the clock was set back since, and that the other times mean nothing.
_CONTROL_3 = (
    "ALTER TABLE outbox ADD COLUMN leased_by TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE outbox ADD COLUMN touched_at REAL NOT NULL DEFAULT 0",
)

# People's edits of the run, oldest first; body: JSON of the fields of a RunEdit that were given.
_CONTROL_4 = """CREATE TABLE edit (
    id INTEGER PRIMARY KEY, edited_by TEXT NOT NULL, at REAL NOT NULL, body TEXT NOT NULL)"""

# People's answers to forecasts: one an attempt and step. right: 1 or 0.
_CONTROL_5 = """CREATE TABLE forecast_answer (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, right INTEGER NOT NULL, answered_by TEXT NOT NULL,
    why TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (attempt, step))"""

# Tables of the whole store, in the file alerts.db of its root. labels: JSON, text to text.
_STORE_WIDE_1 = """CREATE TABLE silence (
    id INTEGER PRIMARY KEY, silence_id TEXT NOT NULL UNIQUE, silenced_by TEXT NOT NULL, why TEXT NOT NULL,
    created_at REAL NOT NULL, until REAL NOT NULL, run TEXT NOT NULL, project TEXT NOT NULL, kind TEXT NOT NULL,
    rule TEXT NOT NULL, labels TEXT NOT NULL)"""

# Runs that were removed for good.
_STORE_WIDE_2 = """CREATE TABLE purge (
    id INTEGER PRIMARY KEY, run_id TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL, purged_by TEXT NOT NULL,
    at REAL NOT NULL, deleted_by TEXT NOT NULL, deleted_at REAL NOT NULL)"""

_STORE_WIDE_3 = (
    # alerts: JSON list of ids, [] for all. up_to: a severity, '' for all.
    "ALTER TABLE silence ADD COLUMN alerts TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE silence ADD COLUMN up_to TEXT NOT NULL DEFAULT ''",
    # Actions and annotations of people; rows are only added.
    """CREATE TABLE audit (
        id INTEGER PRIMARY KEY, entry_id TEXT NOT NULL UNIQUE, at REAL NOT NULL, done_by TEXT NOT NULL,
        act TEXT NOT NULL, text TEXT NOT NULL, run TEXT NOT NULL, alert TEXT NOT NULL)""",
)


def _run_tables(db: sqlite3.Connection) -> None:
    for statement in _RUN_1:
        db.execute(statement)


def _completion_table(db: sqlite3.Connection) -> None:
    db.execute(_RUN_2)


def _forecast_table(db: sqlite3.Connection) -> None:
    for statement in _RUN_3:
        db.execute(statement)


def _progress_tables(db: sqlite3.Connection) -> None:
    """Create the progress tables; an older run counts as judged, because its rows are history."""
    for statement in _RUN_4:
        db.execute(statement)
    last = max(seq or 0 for (seq,) in db.execute("SELECT max(seq) FROM record UNION ALL SELECT max(seq) FROM event"))
    db.execute("INSERT INTO progress VALUES ('judged', ?, '')", (last,))


def _block_tables(db: sqlite3.Connection) -> None:
    """Create the block tables; older rows become blocks while the run is written."""
    for statement in _RUN_5:
        db.execute(statement)


def _control_tables(db: sqlite3.Connection) -> None:
    for statement in _CONTROL_1:
        db.execute(statement)


def _acknowledgement_table(db: sqlite3.Connection) -> None:
    db.execute(_CONTROL_2)


def _lease_columns(db: sqlite3.Connection) -> None:
    for statement in _CONTROL_3:
        db.execute(statement)


def _edit_table(db: sqlite3.Connection) -> None:
    db.execute(_CONTROL_4)


def _silence_table(db: sqlite3.Connection) -> None:
    db.execute(_STORE_WIDE_1)


def _purge_table(db: sqlite3.Connection) -> None:
    db.execute(_STORE_WIDE_2)


def _answer_table(db: sqlite3.Connection) -> None:
    db.execute(_CONTROL_5)


def _audit_table(db: sqlite3.Connection) -> None:
    for statement in _STORE_WIDE_3:
        db.execute(statement)


RUN_TABLES = (
    Migration("run tables", _run_tables),
    Migration("completions", _completion_table),
    Migration("forecasts", _forecast_table),
    Migration("progress", _progress_tables),
    Migration("blocks", _block_tables),
)
CONTROL_TABLES = (
    Migration("control tables", _control_tables),
    Migration("acknowledgements", _acknowledgement_table),
    Migration("leases", _lease_columns),
    Migration("edits", _edit_table),
    Migration("forecast answers", _answer_table),
)
STORE_WIDE = (
    Migration("silences", _silence_table),
    Migration("purges", _purge_table),
    Migration("audit", _audit_table),
)


# Store the fields of records that have no column, in a table ``extra`` that is created when the first of them is
# written.
#
# A record may thus get a new field without a new format of the file: an older rlwatch reads and writes the file as
# before, and leaves the unknown fields in place. Rows are keyed by table and key of the record; ``body`` is a JSON
# object.

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
