"""Write a run: append rows, hold the run's lock, survive forks, and leave the files readable anywhere."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import is_
from pathlib import Path
from typing import TypeVar

from rlwatch.errors import RunLockedError, StoreCorruptError, StoreError, StoreFullError, UnstorableError
from rlwatch.ports import Item, Progress, Storable
from rlwatch.ports import Journal as JournalPort
from rlwatch.records import RunInfo, RunState
from rlwatch.store.sqlite import connection, runrow, schema
from rlwatch.store.sqlite.blocks import Blocks
from rlwatch.store.sqlite.connection import explained, open_writer
from rlwatch.store.sqlite.journal import (
    RESERVE_FILE,
    JournalPosition,
    SQLiteJournal,
    all_in,
    ending_in,
    holds_end,
    journals_in,
)
from rlwatch.store.sqlite.layout import (
    RunFiles,
    RunLock,
    belongs_here,
    has_journal,
    is_there,
    keep_forever,
    make_private,
    touch_private,
    writing_to,
)
from rlwatch.store.sqlite.rows import Batch, MetricSets, packing
from rlwatch.store.sqlite.salvage import described_by_files, moments_of, poured, set_aside, unusable
from rlwatch.store.sqlite.schema import migrate, transaction
from rlwatch.store.sqlite.series import metric_sets


class Appender:
    """Writer of a run over a connection that no other writer uses; implements ``RunWriter``.

    Parameters
    ----------
    db
        Open connection to the run's tables, in autocommit mode.
    run
        The run as ``create`` or ``resume`` of :mod:`rlwatch.store.sqlite.runrow` returned it.
    where
        Name of the file or run in error messages.
    guard
        Lock that is held during every use of the connection (in memory, readers share the connection).
    """

    def __init__(
        self, db: sqlite3.Connection, run: RunInfo, where: str, guard: AbstractContextManager[object] | None = None
    ) -> None:
        self.run = run
        self.journal: JournalPort | None = None
        self.db: sqlite3.Connection | None = db
        self._where = where
        self._guard = guard or nullcontext()
        self._ended = ""
        with explained(where):
            self._read(db)

    def _read(self, db: sqlite3.Connection) -> None:
        """Read what the file holds, all of it or nothing.

        ``_unsure``: items of which it is not known whether they are stored; ``_stale``: what is known has to be read
        again.
        """
        last_seq, blocks = runrow.last_seq(db), Blocks(db)
        sets: MetricSets = {names: (number, packing(names)) for number, names in metric_sets(db).items()}
        self.last_seq, self._sets, self._blocks = last_seq, sets, blocks
        self._unsure: tuple[Storable, ...] = ()
        self._stale = False

    def write(self, items: Sequence[Storable], progress: Progress | None = None) -> None:
        """Store all of ``items`` and the ``progress`` of the analysis, or nothing.

        Raises ``StoreFullError`` on a full disk, ``UnstorableError`` for an item that cannot be stored, else
        ``StoreError``. A call that runs out of memory may fail after all was stored. If the same items are passed
        again, they are not stored twice.
        """
        db = self._usable()
        if self._stale:
            items = self._not_stored(db, items)
        batch = Batch(self.last_seq, self._sets)
        batch.add_all(items)
        given = tuple(items)  # the caller's list may grow until it is given again
        with self._guard, explained(self._where):
            self._unsure, self._stale = given, True
            with transaction(db):
                batch.insert(db)
                self._blocks.forget_late(db, batch.forecast_seqs)
                if progress is not None:
                    self._go_on(db, progress)
        self._unsure, self.last_seq = (), batch.last_seq
        with suppress(MemoryError):  # what is known of the file is then read again
            self._sets.update(batch.new_sets)
            self._blocks.add(batch.rows)
            self._tidy(db)
            self._stale = False

    def _not_stored(self, db: sqlite3.Connection, items: Sequence[Storable]) -> Sequence[Storable]:
        """Return ``items`` without those of the last write, if that failed only after they had been stored."""
        before, unsure = self.last_seq, self._unsure
        with self._guard, explained(self._where):
            if db.in_transaction:
                db.execute("ROLLBACK")
            self._read(db)
        same = len(unsure) <= len(items) and all(map(is_, unsure, items))
        return items[len(unsure) :] if self.last_seq > before and same else items

    def _tidy(self, db: sqlite3.Connection) -> None:
        """Make blocks of rows that are due. A failure for lack of space does not concern what was written."""
        if not self._blocks.due():
            return
        try:
            with self._guard, transaction(db):
                self._blocks.work(db)
        except (sqlite3.Error, MemoryError) as error:
            _log.debug("%s: rows stay rows for now (%s)", self._where, error)
            self._blocks = Blocks(db)
            self._blocks.later()

    def _go_on(self, db: sqlite3.Connection, progress: Progress) -> None:
        """Store ``progress`` inside the transaction that makes it true."""
        if progress.judged is not None:
            runrow.note_judged(db, progress.judged)
        if progress.checkpoint is not None:
            runrow.keep_checkpoint(db, progress.checkpoint)

    def heartbeat(self, now: float, stage: str = "", since: float | None = None) -> None:
        """Store the heartbeat time ``now`` (Unix seconds), and the ``stage`` of the writer's process ``since`` when."""
        with self._guard, explained(self._where):
            self.run = runrow.beat(self._usable(), self.run, now, stage, since)

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Store how the run ended: ``state``, ``reason`` in words, and time (Unix seconds). Afterwards only ``close``
        works.
        """
        with self._guard, explained(self._where):
            runrow.end(self._usable(), state, reason, now)
        self.run = replace(self.run, state=state, state_reason=reason, heartbeat_at=now)
        self._ended = "finished"

    def close(self) -> None:
        """Close the writer without an end of the run; idempotent. Later writes raise ``StoreError``."""
        self._ended = self._ended or "closed"
        self.db = None

    def _usable(self) -> sqlite3.Connection:
        if self.db is None or self._ended:
            why = self._ended or "closed"
            raise StoreError(f"run {self.run.run_id!r} is {why}; open_run() begins its next attempt")
        return self.db


# The writer of a run kept in files: the lock, the fork guard, and leaving the files fit to be read anywhere.

_log = logging.getLogger("rlwatch")
READERS_LEAVE_S = 2.0
"""Seconds that ``finish`` waits for readers that hold a snapshot."""
REPLAYED_ROWS = 2000
"""Rows and events of a run that are judged anew, in half a second, rather than kept as a checkpoint of 120 kB."""
_AMENDED_S = 30.0  # how long a new attempt waits for a process that judges what the last one left
_AT_ONCE = 1000  # items of a journal


class FileWriter(Appender):
    """Writer of a run in files; it owns the run's lock and the only writing connection, and becomes inert in forked
    children.

    ``files``: paths of the run's files. ``lock``: the run's lock, already taken. ``db``: connection from
    :func:`open_writer`. ``run``: the run as it begins this attempt.
    """

    def __init__(self, files: RunFiles, lock: RunLock, db: sqlite3.Connection, run: RunInfo) -> None:
        super().__init__(db, run, str(files.run))
        self._files = files
        self._journal: SQLiteJournal | None = None
        self.lock = lock
        self.readers_leave_s = READERS_LEAVE_S
        self._pid = os.getpid()
        file = files.run.stat()
        self._identity = (file.st_dev, file.st_ino)
        belongs_here(self)

    def keep_journal(self) -> None:
        """Begin the journal of this attempt. Raises ``StoreError`` if it cannot be written."""
        with writing_to(self._files.directory):
            self._journal = SQLiteJournal(self._files.directory)
        self.journal = self._journal

    def write(self, items: Sequence[Storable], progress: Progress | None = None) -> None:
        """Store all of ``items`` and the ``progress`` of the analysis, or nothing.

        Raises ``StoreError`` in a forked child and if the run's file was removed or replaced, ``StoreFullError`` on a
        full disk, and ``UnstorableError`` for an item that cannot be stored.
        """
        if not self._mine():
            raise StoreError(f"run {self.run.run_id!r} is written by process {self._pid}, which forked this one")
        if not self._in_place():
            raise StoreError(f"{self._where} was removed or replaced while the run goes on: nothing more can be stored")
        if progress is None or not progress.journaled or self._journal is None:
            return super().write(items, progress)
        mark = self._journal.mark.after(progress.journaled)
        super().write(items, progress)
        self._journal.mark = mark
        with suppress(MemoryError):  # it is stored: the files can be tidied another time
            self._journal.tend()
        return None

    def heartbeat(self, now: float, stage: str = "", since: float | None = None) -> None:
        """Store the heartbeat time ``now`` (Unix seconds), and the ``stage`` of the writer's process ``since`` when.

        Does nothing in a forked child. Raises ``StoreError`` if the run's file was removed or replaced.
        """
        if self._mine():
            if not self._in_place():
                raise StoreError(f"{self._where} was removed or replaced: what is recorded from here on is lost")
            super().heartbeat(now, stage, since)

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Store how the run ended, and leave one plain file that opens read-only anywhere. Does nothing in a forked
        child.

        ``state``, ``reason`` in words, ``now``: Unix seconds. Entries of the journal that were not stored stay there,
        for the next process that opens the run.
        """
        if self._mine():
            db = self._usable()
            try:
                super().finish(state, reason, now)
            except StoreFullError:
                if self._journal is None:
                    raise
                self._journal.make_room()
                super().finish(state, reason, now)
            self._end_journal(end_stored=True)
            self._shrink(db)
            with explained(self._where):
                _leave_wal(db, self._where, self.readers_leave_s)

    def _shrink(self, db: sqlite3.Connection) -> None:
        """Remove what a finished run does not need: a short run's checkpoints, and unused pages of the file.

        An error, for example of a full disk, leaves the file as it is.
        """
        with suppress(sqlite3.Error, MemoryError), self._guard:
            if self.last_seq <= REPLAYED_ROWS:
                db.execute("DELETE FROM checkpoint")
            db.executescript("PRAGMA incremental_vacuum")  # `execute` would end after the first page

    def close(self) -> None:
        """Close the connection, then release the run's lock; idempotent.

        A run that had ended, and was amended, is one plain file again.
        """
        if self._mine() and self.db is not None:
            self._end_journal(end_stored=not holds_end(self._files.directory))
            if self.run.state is not RunState.RUNNING:
                with suppress(sqlite3.Error):
                    _leave_wal(self.db, self._where, self.readers_leave_s)
            self.db.close()
        self.lock.release()
        super().close()

    def _go_on(self, db: sqlite3.Connection, progress: Progress) -> None:
        super()._go_on(db, progress)
        if progress.journaled and self._journal is not None:
            runrow.note_journal(db, self._journal.mark.after(progress.journaled))

    def _end_journal(self, *, end_stored: bool) -> None:
        """Close the journal. ``end_stored``: True if the database has the end of the run, or the run has none."""
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close(remove=end_stored and not journal.missing() and not journal.lost)

    def disown(self) -> None:
        """Forget the parent's connection without closing it. Called in a forked child."""
        if self.db is not None:
            keep_forever(self.db)
        self.db = None

    def _in_place(self) -> bool:
        """Return True if the file we write still has its name: SQLite would go on writing to a removed one."""
        try:
            stat = self._files.run.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True  # out of our sight, perhaps for a while
        return (stat.st_dev, stat.st_ino) == self._identity

    def _mine(self) -> bool:
        return self._pid == os.getpid()


_WriterType = TypeVar("_WriterType", bound=FileWriter)
_T = TypeVar("_T")


def open_files(
    files: RunFiles, run: RunInfo, now: float, *, made: type[_WriterType], before: Callable[[], None] | None = None
) -> _WriterType:
    """Open a run for writing: take its lock, call ``before``, then create the run or begin its next attempt.

    Rows that an earlier process left in a journal are stored first. ``made``: class of the writer to return. ``now``:
    Unix seconds. Raises ``RunLockedError`` if the lock is taken.
    """
    make_private(files.directory)
    with ExitStack() as undo:
        lock = _patiently_locked(files)
        undo.callback(lock.release)
        if before is not None:
            before()
        mend(files)
        begun = None if files.run.exists() else _create(files, lambda db: runrow.create(db, run, now))
        db = undo.enter_context(closing(open_writer(files.run)))
        with explained(str(files.run)):
            drain(db, files)
            writer = made(files, lock, db, begun or runrow.resume(db, run, now))
        writer.keep_journal()
        undo.pop_all()
        return writer


def amend_files(files: RunFiles) -> FileWriter | None:
    """Return a writer for a run that has none, without a new attempt.

    None if a process writes the run, or if this user may not write it.
    """
    with ExitStack() as undo:
        try:
            lock = RunLock(files.lock, amending=True)
            undo.callback(lock.release)
            mend(files)
            db = undo.enter_context(closing(open_writer(files.run)))
            with explained(str(files.run)):
                drain(db, files)
                writer = FileWriter(files, lock, db, runrow.load(db, files.directory.name))
        except StoreError as error:
            _log.debug("run %s is left as it is: %s", files.directory.name, error)
            return None
        undo.pop_all()
        return writer


@contextmanager
def for_good(files: RunFiles) -> Iterator[sqlite3.Connection]:
    """Give a connection to change a run that has no writer; the caller holds the run's lock.

    Journal entries are stored first. After the block, a finished run is one plain file again.
    """
    with closing(open_writer(files.run)) as db, explained(str(files.run)):
        drain(db, files)
        yield db
        if runrow.load(db, files.directory.name).state is not RunState.RUNNING:
            _leave_wal(db, str(files.run), READERS_LEAVE_S)


def recover(files: RunFiles) -> None:
    """Store in the database what a dead process left in the run's journal.

    Nothing happens if a live process writes the run, or if this user may not write it.
    """
    if has_journal(files.directory) or holds_end(files.directory):
        writer = amend_files(files)
        if writer is not None:
            writer.close()


def mend(files: RunFiles) -> None:
    """Rebuild ``run.db`` from the run's journal if the file is gone or damaged; the caller holds the run's lock."""
    why = unusable(files) if has_journal(files.directory) else ""
    if not why:
        return
    aside = partial(set_aside, files)  # when all that is left is in the new file, which a full disk may not take
    try:
        _create(files, partial(_salvaged, files, is_there(files.run)), before=aside)
    except StoreCorruptError as error:
        _log.debug("nothing of %s can be used: %s", files.run, error)
        _create(files, partial(_salvaged, files, False), before=aside)
    _log.warning("%s is made anew of its journal, what there was is kept beside it: %s", files.run, why)


def _salvaged(files: RunFiles, salvages: bool, db: sqlite3.Connection) -> None:
    """Store in ``db`` the run as read from its damaged file, and all of its journal that the file lacks."""
    if salvages:
        poured(files.run, db)
    else:
        run = described_by_files(files)
        runrow.create(db, run, run.created_at)
    stored = moments_of(db)
    for nonce, journaled in journals_in(files.directory).items():
        known = JournalPosition(nonce)
        while some := list(islice(journaled, _AT_ONCE)):
            new = [item for _, item in some if (item.step, item.ts) not in stored]
            known = known.after(number for number, _ in some)
            attempt = runrow.load(db, files.directory.name).attempt
            _append(db, [replace(item, attempt=attempt) for item in new], known)


def drain(db: sqlite3.Connection, files: RunFiles) -> None:
    """Store in ``db`` what only the run's journal holds, also how the run ended, then remove the journal.

    The caller holds the run's lock.
    """
    paths = all_in(files.directory)
    for nonce, journaled in journals_in(files.directory).items():
        mark = known = runrow.journal_mark(db, nonce)
        left = (numbered for numbered in journaled if not known.holds(numbered[0]))
        attempt = runrow.load(db, files.directory.name).attempt
        while some := list(islice(left, _AT_ONCE)):
            mark = mark.after(number for number, _ in some)
            _append(db, [replace(item, attempt=attempt) for _, item in some], mark)
    end = ending_in(files.directory)
    if end is not None and runrow.load(db, files.directory.name).state is RunState.RUNNING:
        runrow.end(db, *end)
    for path in (*paths, files.directory / RESERVE_FILE):
        path.unlink(missing_ok=True)


def _append(db: sqlite3.Connection, items: Sequence[Item], mark: JournalPosition) -> None:
    """Store the items of a journal; items that no store can hold are skipped."""
    sets: MetricSets = {names: (number, packing(names)) for number, names in metric_sets(db).items()}
    batch = Batch(runrow.last_seq(db), sets)
    for item in items:
        with suppress(UnstorableError):
            batch.add(item)
    with transaction(db):
        batch.insert(db)
        runrow.note_journal(db, mark)


def _patiently_locked(files: RunFiles) -> RunLock:
    """Wait for the lock: a process that only completes what a dead one left releases it in a moment."""
    end = time.monotonic() + _AMENDED_S
    while True:
        try:
            return RunLock(files.lock)
        except RunLockedError as error:
            if not error.amending or time.monotonic() > end:
                raise
            time.sleep(0.02)


def _create(
    files: RunFiles, fill: Callable[[sqlite3.Connection], _T], before: Callable[[], object] = lambda: None
) -> _T:
    """Make ``run.db`` under another name, call ``before``, then rename it, so that no reader ever sees half a run.

    Returns what ``fill`` returned.
    """
    with writing_to(files.unborn):
        for leftover in (files.unborn, Path(f"{files.unborn}-journal")):
            leftover.unlink(missing_ok=True)
    touch_private(files.unborn)
    with explained(str(files.unborn)), closing(connection.connect(files.unborn, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # so that the end of the run can give back unused pages
        migrate(db, schema.RUN_TABLES, str(files.unborn))
        begun = fill(db)
    with writing_to(files.run):
        before()
        files.unborn.rename(files.run)
    return begun


def _leave_wal(db: sqlite3.Connection, where: str, patience_s: float) -> None:
    """Move the write-ahead log into the file and switch the log off, which takes a moment without readers."""
    deadline = time.monotonic() + patience_s
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
