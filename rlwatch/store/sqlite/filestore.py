"""Store runs in a directory on a local file system, with one sub-directory of SQLite files per run: the default
store.
"""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import local
from typing import Any, TypeVar
from urllib.parse import quote

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import StoreError
from rlwatch.ports import Bulk, RunWriter, Topic
from rlwatch.records import OutboxMessage, Purge, RunEdit, RunInfo
from rlwatch.store.sqlite import connection, layout, runrow, schema
from rlwatch.store.sqlite import control as alert_rows
from rlwatch.store.sqlite.control import ControlTables
from rlwatch.store.sqlite.curating import CurationTables, curated, keep_purge, purge_of, read_edits, remove_bulk
from rlwatch.store.sqlite.filenews import FileNews
from rlwatch.store.sqlite.layout import RunLock
from rlwatch.store.sqlite.reading import RunTables
from rlwatch.store.sqlite.run_index import RunsAtRest, Unchanged, copied, stamp_of
from rlwatch.store.sqlite.writer import FileWriter, amend_files, for_good, open_files, recover

_R = TypeVar("_R")


class FileStore(RunTables, ControlTables, CurationTables):
    """A store of runs in the directory ``root`` on a local file system, with one sub-directory per run.

    Parameters
    ----------
    root
        The directory; created (mode 0700) with the first run.
    control_timeout_s
        Seconds that calls about commands, alerts and outgoing messages wait for another process before they raise
        ``StoreBusyError``. A trainer passes 0 and asks again at its next poll.
    clock
        Source of creation times; the machine's clock by default.
    """

    def __init__(self, root: Path, *, control_timeout_s: float = 2.0, clock: Clock | None = None) -> None:
        self.root = root.absolute()
        self.url = f"sqlite://{quote(str(self.root))}"
        self._control_timeout_s = control_timeout_s
        self._clock = clock or SystemClock()
        self._infos = Unchanged[RunInfo]()  # the run table and the outboxes of hundreds of runs are polled
        self._quiet = Unchanged[bool]()
        self._edited = Unchanged[tuple[RunEdit, ...]]()
        self._rows_read = Unchanged[tuple[list[Any], bool]]()
        self._resting = RunsAtRest(self.root)
        self._held = local()  # of each thread: run id -> the snapshot it asks all of

    def run(self, run_id: str) -> RunInfo:
        """Return one run, with people's edits applied; its files are read again only when they have changed.

        Raises ``RunNotFoundError``, or another ``StoreError`` if the run cannot be read.
        """
        files = layout.existing_files(self.root, run_id)
        recover(files)
        stamp = stamp_of(files.run, files.wal)
        run = self._infos.recall(run_id, stamp)
        if run is None:
            with connection.open_reader(files) as db, connection.bounded(db):
                run = runrow.load(db, run_id)
            self._infos.keep(run_id, stamp, run)
        return curated(replace(run, config=copied(run.config)), self._edits(run_id))

    def _edits(self, run_id: str) -> Sequence[RunEdit]:
        """Return a run's edits, cached until their file changes. Upgrades no file: it may belong to another user."""
        control = self.root / run_id / "control.db"
        stamp = stamp_of(control)
        if stamp == (None,):
            return ()
        kept = self._edited.recall(run_id, stamp)
        if kept is None:
            try:
                with connection.open_as_it_is(control, self._control_timeout_s) as db:
                    kept = tuple(read_edits(db, run_id))
            except StoreError:  # busy or damaged: the run's own file can be read all the same
                return ()
            self._edited.keep(run_id, stamp, kept)
        return kept

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:
        """Remove the deleted run's directory, and return a note of who did it (``by``) and when (``now``, Unix
        seconds).

        Raises ``StoreError`` unless the run is deleted, and ``RunLockedError`` while it has a writer.
        """
        files = layout.existing_files(self.root, run_id)
        lock = RunLock(files.lock, amending=True)
        try:
            run = self.run(run_id)
            purged = purge_of(run, by, now)
            with self._made_store_wide() as db:
                keep_purge(db, purged)
            grave = self.root / f".purged-{run_id}-{uuid.uuid4().hex[:8]}"
            with layout.writing_to(files.directory):
                files.directory.rename(grave)  # at once: no reader finds half a run
                shutil.rmtree(grave)
        finally:
            lock.release()
        return purged

    def prune(self, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool) -> tuple[int, int]:
        """Remove old batches of tokens or completions from a run that is not being written; return their number and
        bytes.

        ``before``: Unix seconds; older batches go. ``undated``: time that batches without one are taken to have.
        ``dry_run``: only count. Raises ``RunLockedError`` while the run has a writer.
        """
        files = layout.existing_files(self.root, run_id)
        lock = RunLock(files.lock, amending=True)
        try:
            with for_good(files) as db:
                return remove_bulk(db, bulk, before, undated=undated, dry_run=dry_run)
        finally:
            lock.release()

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt if it exists, and return its writer.

        Raises ``RunLockedError`` while another process writes it.
        """
        files = layout.files_of(self.root, run.run_id)
        layout.make_private(self.root)
        return open_files(files, run, self._clock.now(), made=FileWriter)

    def amend_run(self, run_id: str) -> RunWriter | None:
        """Return a writer for a run whose process is gone, without a new attempt.

        None if a process writes the run, or if it cannot be written from here.
        """
        return amend_files(layout.existing_files(self.root, run_id))

    def damage(self, run_id: str) -> list[str]:
        """Return the damage that SQLite finds in the files of a run, one line each, in SQLite's words; empty if there
        is none.
        """
        files = layout.existing_files(self.root, run_id)
        found = []
        for path, opened in (
            (files.run, connection.open_reader(files)),
            (files.control, connection.open_as_it_is(files.control, self._control_timeout_s)),
        ):
            if not layout.is_there(path):
                continue
            with opened as db:
                reported = [str(row[0]) for row in db.execute("PRAGMA quick_check(10)")]
            found += [f"{path.name}: {line}" for line in reported if line != "ok"]
        return found

    def usage(self) -> dict[str, dict[str, int]]:
        """Return run id -> disk space in bytes that the run's files take, by their contents (``measurements``,
        ``journal``...).
        """
        return {run_id: layout.usage_of(layout.files_of(self.root, run_id)) for run_id in layout.run_ids(self.root)}

    def news(self, topic: Topic, run_id: str | None = None) -> FileNews | None:
        """Return notifications of changes for pages that show runs; None for other topics, which are polled.

        ``run_id``: the run to watch; None for all.
        """
        return FileNews(self.root, run_id, self.snapshot) if topic == "pages" else None

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _lease(
        self, run_id: str, now: float, until: float, *, limit: int, channels: Sequence[str] | None
    ) -> list[OutboxMessage]:
        """Lease messages of one run; an outbox found without pending ones is not opened again before its file
        changes.
        """
        stamp = stamp_of(self.root / run_id / "control.db")
        if self._quiet.recall(run_id, stamp):
            return []
        with self._control(run_id) as db:
            if db is None:
                return []
            leased = alert_rows.lease_messages(db, run_id, now, until=until, limit=limit, channels=channels)
            if not leased and not alert_rows.has_pending(db):  # what is leased must reach the caller: ask no more
                self._quiet.keep(run_id, stamp, value=True)
            return leased

    def _rows(self, run_id: str, rows: Callable[[sqlite3.Connection, str], list[_R]]) -> tuple[list[_R], bool]:
        """Return rows of a run's control tables, cached until the file changes."""
        layout.existing_files(self.root, run_id)
        name, stamp = f"{rows.__name__} {run_id}", stamp_of(self.root / run_id / "control.db")
        kept = self._rows_read.recall(name, stamp)
        if kept is None:
            kept = super()._rows(run_id, rows)
            self._rows_read.keep(name, stamp, kept)
        return list(kept[0]), kept[1]

    def _run_ids(self) -> list[str]:
        return layout.run_ids(self.root)

    def _listed(self) -> tuple[list[RunInfo], dict[str, str]]:
        """List the runs; files of a run at rest are not opened again, by any process."""
        runs: list[RunInfo] = []
        unreadable: dict[str, str] = {}
        for entry in layout.directories_in(self.root):
            run = self._resting.recall(entry)
            if run is None and layout.holds_run(Path(entry.path)):
                before = self._resting.look(entry)
                try:
                    run = self.run(entry.name)
                except StoreError as error:
                    unreadable[entry.name] = str(error)
                else:
                    if before is not None:
                        self._resting.keep(before, run)
            if run is not None:
                runs.append(run)
        self._resting.save({run.run_id for run in runs})
        return runs, unreadable

    def unreadable(self) -> Mapping[str, str]:
        """Return name of each run that cannot be read -> reason. Runs that are cached as readable are not opened."""
        why: dict[str, str] = {}
        for entry in layout.directories_in(self.root):
            if self._resting.knows(entry) or not layout.holds_run(Path(entry.path)):
                continue
            try:
                self.run(entry.name)
            except StoreError as error:
                why[entry.name] = str(error)
        return why

    @contextmanager
    def at_once(self, run_id: str) -> Iterator[None]:
        """Answer this thread's questions about the run from one snapshot until the block is left.

        The file is then opened only once, which costs as much as most questions do.
        """
        with self.snapshot(run_id) as db:
            before = getattr(self._held, "of", None)
            self._held.of = (run_id, db)
            try:
                yield
            finally:
                self._held.of = before

    def snapshot(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """Give a connection to the run's tables as they are now, also during writes.

        Rows that a dead writer left in its journal are stored first. Raises ``RunNotFoundError``.
        """
        held = getattr(self._held, "of", None)
        if held is not None and held[0] == run_id:
            return nullcontext(held[1])
        files = layout.existing_files(self.root, run_id)
        recover(files)
        return connection.open_reader(files)

    def _controlled(self) -> list[str]:
        return [run_id for run_id in self._run_ids() if layout.is_there(self.root / run_id / "control.db")]

    def _control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection | None]:
        return connection.open_control(layout.existing_files(self.root, run_id), self._control_timeout_s)

    def _made_control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        return connection.create_control(layout.existing_files(self.root, run_id), self._control_timeout_s)

    def _store_wide(self) -> AbstractContextManager[sqlite3.Connection | None]:
        return connection.open_tables(self.root / "alerts.db", schema.STORE_WIDE, self._control_timeout_s)

    def _made_store_wide(self) -> AbstractContextManager[sqlite3.Connection]:
        layout.make_private(self.root)
        return connection.create_tables(self.root / "alerts.db", schema.STORE_WIDE, self._control_timeout_s)
