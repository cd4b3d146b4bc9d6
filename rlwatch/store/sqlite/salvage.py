"""Rebuild a ``run.db`` that is missing or damaged, from its readable rows and from the run's journal.

The damaged file is kept under another name, with its log; nothing is removed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path

from rlwatch.errors import StoreCorruptError, StoreError
from rlwatch.records import Event, RunInfo, StepRecord
from rlwatch.store.sqlite import runrow
from rlwatch.store.sqlite.blocks import forget_incomplete
from rlwatch.store.sqlite.connection import connected, explained, open_reader
from rlwatch.store.sqlite.layout import RunFiles, files_in, is_there, size_of
from rlwatch.store.sqlite.reading import read_events, read_records
from rlwatch.store.sqlite.schema import make_extra, transaction
from rlwatch.store.sqlite.series import metric_sets

_log = logging.getLogger("rlwatch")
_SIDE = ("", "-wal", "-shm", "-journal")
_HEADER = struct.Struct(">16s H 6x I I")
"""Header of a SQLite file: its mark, the size of a page, the change counter, and the number of pages."""


def unusable(files: RunFiles) -> str:
    """Return the reason why the run's ``run.db`` cannot be used; empty if it can be, or if that cannot be determined
    now.
    """
    if not is_there(files.run):
        return "it is gone"
    if _cut_short(files):
        return "it was cut short"
    try:
        with open_reader(files) as db:
            runrow.load(db, files.directory.name)
            runrow.last_seq(db)
            metric_sets(db)
    except StoreCorruptError as error:
        return str(error)
    except StoreError:
        return ""
    return ""


def _cut_short(files: RunFiles) -> bool:
    """Return True for a file with fewer pages than its header gives, if no log holds the others.

    Also True for a file without even a header, which makes SQLite remove its log.
    """
    with suppress(OSError):
        if not files.run.is_file():
            return False
        with files.run.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return True
        mark, page, _, pages = _HEADER.unpack(head)
        whole = size_of(files.run) >= pages * (page if page > 1 else 1 << 16)
        return bool(mark == b"SQLite format 3\0" and not whole and not size_of(files.wal))
    return False


def set_aside(files: RunFiles) -> None:
    """Rename ``run.db`` and the files that SQLite keeps for it to ``run.db.damaged-N``, with the first free number
    N.
    """
    number = 1
    while is_there(aside := files.directory / f"run.db.damaged-{number}") or is_there(Path(f"{aside}-wal")):
        number += 1
    for suffix in _SIDE:
        with suppress(FileNotFoundError):
            os.rename(f"{files.run}{suffix}", f"{aside}{suffix}")  # noqa: PTH104


def described_by_files(files: RunFiles) -> RunInfo:
    """Return what is known of a run whose own row is lost: its id, and as creation time the time of its oldest journal
    file.
    """
    times = [path.stat().st_mtime for path in files_in(files.directory)]
    return RunInfo(files.directory.name, created_at=min(times, default=0.0))


def poured(damaged: Path, db: sqlite3.Connection) -> None:
    """Copy the readable rows of the damaged database file ``damaged`` into the empty tables of ``db``.

    Raises ``StoreError`` if the rows that were read do not make up a run.
    """
    most = size_of(damaged) + size_of(Path(f"{damaged}-wal"))  # rows; a damaged file may seem to have any number
    with ExitStack() as stack, explained(str(damaged)):
        source = stack.enter_context(closing(connected(damaged, "ro", 1.0, cut_short=True)))
        with transaction(db):
            if _has_extra(source):
                make_extra(db)
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                columns = [column[1] for column in db.execute(f"PRAGMA table_info({table})")]
                put = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(columns))})"  # noqa: S608  (our tables)
                rows = _rows(source, f"SELECT {', '.join(columns)} FROM {table}")  # noqa: S608
                db.executemany(put, islice(rows, most))
            db.execute(
                "DELETE FROM progress WHERE name = 'journal'"
            )  # rows it counts as stored may be among those lost
            for table in ("record", "forecast"):
                db.execute(f"DELETE FROM {table} WHERE mset NOT IN (SELECT id FROM metric_set)")  # noqa: S608
            forget_incomplete(db, {number: len(names) for number, names in metric_sets(db).items()})
        runrow.load(db, "")
        last = runrow.last_seq(db)
        db.execute("UPDATE progress SET value = min(value, ?) WHERE name = 'judged'", (last,))


def _rows(source: sqlite3.Connection, query: str) -> Iterator[tuple[object, ...]]:
    """Iterate over the rows before the first that cannot be read."""
    with suppress(sqlite3.Error):
        yield from source.execute(query)


def _has_extra(source: sqlite3.Connection) -> bool:
    """Return True if the damaged file has fields that have no column."""
    return next(_rows(source, "SELECT 1 FROM extra LIMIT 1"), None) is not None


def moments_of(db: sqlite3.Connection) -> set[tuple[int | None, float]]:
    """Return (step, Unix time) of every record and event in ``db``, to recognise rows that the journal holds as
    well.
    """
    rows: list[StepRecord | Event] = [*read_records(db, 0, None), *read_events(db, 0)]
    return {(row.step, row.ts) for row in rows}
