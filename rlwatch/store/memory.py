"""Keep runs in the memory of this process only, for tests and trials: ``memory://name``. The tables are those of SQLite
files.

A name means one set of runs for the whole process, however often it is opened, until :func:`forget`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import RunLockedError, RunNotFoundError
from rlwatch.ports import RunWriter, Topic
from rlwatch.records import Event, Purge, RunEdit, RunInfo, StepRecord
from rlwatch.store import check_run_id
from rlwatch.store.sqlite import connection, runrow, schema
from rlwatch.store.sqlite.connection import explained
from rlwatch.store.sqlite.control import ControlTables
from rlwatch.store.sqlite.curating import CurationTables, keep_purge, purge_of, read_edits
from rlwatch.store.sqlite.reading import RunTables
from rlwatch.store.sqlite.schema import migrate
from rlwatch.store.sqlite.writer import Appender


def _tables() -> sqlite3.Connection:
    return connection.connect(":memory:", isolation_level=None, check_same_thread=False)


@dataclass
class _Run:
    tables: sqlite3.Connection = field(default_factory=_tables)
    control: sqlite3.Connection | None = None
    writer: Appender | None = None


@dataclass
class _Place:
    """All runs of one store name; ``lock`` is held during every use of a connection."""

    runs: dict[str, _Run] = field(default_factory=dict)
    lock: RLock = field(default_factory=RLock)
    store_wide: sqlite3.Connection | None = None


_places: dict[str, _Place] = {}
_places_lock = RLock()


def forget(name: str) -> None:
    """Drop all runs of ``memory://name``, so that the next store of this name is empty; open stores keep their runs."""
    with _places_lock:
        _places.pop(name, None)


class MemoryStore(RunTables, ControlTables, CurationTables):
    """The store ``memory://name``: runs in the memory of this process, shared by all stores of the same name.

    ``clock``: source of creation times; the machine's clock by default.
    """

    def __init__(self, name: str = "", *, clock: Clock | None = None) -> None:
        self.url = f"memory://{name}"
        self._clock = clock or SystemClock()
        with _places_lock:
            self._place = _places.setdefault(name, _Place())

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt if it exists, and return its writer.

        Raises ``RunLockedError`` if the run has an open writer in this process, and ``StoreError`` for an invalid run
        id.
        """
        check_run_id(run.run_id)
        with self._place.lock, explained(self.url):
            held = self._place.runs.get(run.run_id)
            if held is not None and held.writer is not None:
                raise RunLockedError(
                    f"run {run.run_id!r} of {self.url} already has a writer in this process; "
                    "close it first, or give this run another run_id"
                )
            if held is None:
                held = _Run()
                migrate(held.tables, schema.RUN_TABLES, self.url)
                begun = runrow.create(held.tables, run, self._clock.now())
                self._place.runs[run.run_id] = held
            else:
                begun = runrow.resume(held.tables, run, self._clock.now())
            return _MemoryWriter(held, begun, self._place.lock)

    def amend_run(self, run_id: str) -> RunWriter | None:  # noqa: ARG002  (no other process, none that died)
        """Return None: no dead process can have left a run unfinished, as the runs end with this process."""
        return None

    def branch(
        self, run_id: str, attempt: int, before_step: int, *, after_seq: int = 0
    ) -> Iterator[StepRecord | Event]:
        """Iterate over the earlier records and events that ``attempt`` continues from ``before_step`` on.

        All of them are read at the first call, because the lock is not held between two items.
        """
        return iter(list(super().branch(run_id, attempt, before_step, after_seq=after_seq)))

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:
        """Remove the deleted run for good and return a note of who did it and when (``now``, Unix seconds).

        Raises ``StoreError`` unless the run is deleted, and ``RunLockedError`` while it has a writer.
        """
        with self._place.lock, explained(self.url):
            if self._existing(run_id).writer is not None:
                raise RunLockedError(f"run {run_id!r} of {self.url} has a writer in this process: close it first")
            purged = purge_of(self.run(run_id), by, now)
            with self._made_store_wide() as db:
                keep_purge(db, purged)
            del self._place.runs[run_id]
        return purged

    def _edits(self, run_id: str) -> Sequence[RunEdit]:
        with self._control(run_id) as db:
            return () if db is None else read_edits(db, run_id)

    def news(self, topic: Topic, run_id: str | None = None) -> None:
        """Return None, as there is nothing to wait for: no other process writes this store."""

    def close(self) -> None:
        """Do nothing: the runs stay, and another ``open_store`` of this name finds them."""

    def _run_ids(self) -> list[str]:
        with self._place.lock:
            return sorted(self._place.runs)

    @contextmanager
    def snapshot(self, run_id: str) -> Iterator[sqlite3.Connection]:
        """Give a connection to the run's tables, which stay locked until the block is left.

        Raises ``RunNotFoundError``.
        """
        with self._place.lock, explained(self.url):
            yield self._existing(run_id).tables

    def _controlled(self) -> list[str]:
        with self._place.lock:
            return [run_id for run_id, run in self._place.runs.items() if run.control is not None]

    @contextmanager
    def _control(self, run_id: str) -> Iterator[sqlite3.Connection | None]:
        with self._place.lock, explained(self.url):
            yield self._existing(run_id).control

    @contextmanager
    def _made_control(self, run_id: str) -> Iterator[sqlite3.Connection]:
        with self._place.lock, explained(self.url):
            run = self._existing(run_id)
            if run.control is None:
                run.control = _tables()
                migrate(run.control, schema.CONTROL_TABLES, self.url)
            yield run.control

    @contextmanager
    def _store_wide(self) -> Iterator[sqlite3.Connection | None]:
        with self._place.lock, explained(self.url):
            yield self._place.store_wide

    @contextmanager
    def _made_store_wide(self) -> Iterator[sqlite3.Connection]:
        with self._place.lock, explained(self.url):
            if self._place.store_wide is None:
                self._place.store_wide = _tables()
                migrate(self._place.store_wide, schema.STORE_WIDE, self.url)
            yield self._place.store_wide

    def _existing(self, run_id: str) -> _Run:
        if run_id not in self._place.runs:
            raise RunNotFoundError(f"no run {run_id!r} in {self.url}")
        return self._place.runs[run_id]


class _MemoryWriter(Appender):
    def __init__(self, held: _Run, run: RunInfo, lock: RLock) -> None:
        super().__init__(held.tables, run, f"run {run.run_id!r} in memory", guard=lock)
        self._held = held
        held.writer = self

    def close(self) -> None:
        """Release the run, so that its next attempt can be opened; idempotent."""
        super().close()
        if self._held.writer is self:
            self._held.writer = None
