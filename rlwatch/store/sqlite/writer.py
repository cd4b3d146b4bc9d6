"""The writer of a run kept in files: the lock, the fork guard, and leaving the files fit to be read anywhere."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

from rlwatch.errors import StoreError
from rlwatch.ports import Storable
from rlwatch.records import RunInfo, RunState
from rlwatch.store.sqlite import runrow, schema
from rlwatch.store.sqlite.appender import Appender
from rlwatch.store.sqlite.connect import open_writer
from rlwatch.store.sqlite.fork import belongs_here, keep_forever
from rlwatch.store.sqlite.layout import RunFiles, make_private, touch_private, writing_to
from rlwatch.store.sqlite.lock import RunLock
from rlwatch.store.sqlite.migrations import migrate
from rlwatch.store.sqlite.problems import explained

_log = logging.getLogger("rlwatch")
_READERS_LEAVE_S = 2.0  # how long finish() waits for readers in the middle of a snapshot


class FileWriter(Appender):
    """A ``RunWriter`` that owns the run's lock and its one writing connection."""

    def __init__(self, files: RunFiles, lock: RunLock, db: sqlite3.Connection, run: RunInfo) -> None:
        super().__init__(db, run, str(files.run))
        self._lock = lock
        self._pid = os.getpid()
        belongs_here(self)

    def write(self, items: Sequence[Storable]) -> None:
        """Store all of ``items`` or none; raises ``StoreError`` in a forked child."""
        if not self._mine():
            raise StoreError(f"run {self.run.run_id!r} is written by process {self._pid}, which forked this one")
        super().write(items)

    def heartbeat(self, now: float) -> None:
        """Say that the writer lives."""
        if self._mine():
            super().heartbeat(now)

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Record how the run ended; one plain file is left that opens read-only anywhere."""
        if self._mine():
            db = self._usable()
            super().finish(state, reason, now)
            with explained(self._where):
                _leave_wal(db, self._where)

    def close(self) -> None:
        """Close the connection, then release the lock; idempotent."""
        if self._mine() and self._db is not None:
            self._db.close()
        self._lock.release()
        super().close()

    def disown(self) -> None:
        """In a forked child: forget the parent's connection without closing it."""
        if self._db is not None:
            keep_forever(self._db)
        self._db = None

    def _mine(self) -> bool:
        return self._pid == os.getpid()


_Writer = TypeVar("_Writer", bound=FileWriter)


def open_files(
    files: RunFiles, run: RunInfo, now: float, *, made: type[_Writer], before: Callable[[], None] | None = None
) -> _Writer:
    """Take the lock, call ``before``, then create the run or begin its next attempt."""
    make_private(files.directory)
    with ExitStack() as undo:
        lock = RunLock(files.lock)
        undo.callback(lock.release)
        if before is not None:
            before()
        begun = None if files.run.exists() else _create(files, run, now)
        db = undo.enter_context(closing(open_writer(files.run)))
        with explained(str(files.run)):
            writer = made(files, lock, db, begun or runrow.resume(db, run, now))
        undo.pop_all()
        return writer


def _create(files: RunFiles, run: RunInfo, now: float) -> RunInfo:
    """Make ``run.db`` under another name and rename it: no reader ever sees half a run."""
    for leftover in (files.unborn, Path(f"{files.unborn}-journal")):
        leftover.unlink(missing_ok=True)
    touch_private(files.unborn)
    with explained(str(files.unborn)), closing(sqlite3.connect(files.unborn, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        migrate(db, schema.RUN, str(files.unborn))
        begun = runrow.create(db, run, now)
    with writing_to(files.run):
        files.unborn.rename(files.run)
    return begun


def _leave_wal(db: sqlite3.Connection, where: str) -> None:
    """Bring the log into the file and do without one from here on, which takes a moment without readers."""
    deadline = time.monotonic() + _READERS_LEAVE_S
    db.execute("PRAGMA busy_timeout = 0")
    while True:
        try:
            db.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            if time.monotonic() > deadline:
                _log.warning("%s is being read: its log file stays beside it; copy both together", where)
                return
            time.sleep(0.01)
        else:
            return
