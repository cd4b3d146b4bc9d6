"""The writing half of a run over an open connection: what the file and the memory backend share."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from rlwatch.errors import StoreError
from rlwatch.ports import Journal as JournalPort
from rlwatch.ports import Progress, Storable
from rlwatch.records import RunInfo, RunState
from rlwatch.store.sqlite import progress as progress_rows
from rlwatch.store.sqlite import runrow
from rlwatch.store.sqlite.batch import Batch, MetricSets, packing
from rlwatch.store.sqlite.migrations import transaction
from rlwatch.store.sqlite.problems import explained
from rlwatch.store.sqlite.reading import metric_sets


class Appender:
    """A ``RunWriter`` over a connection it alone writes through.

    Parameters
    ----------
    db
        Open connection to the run's tables, in autocommit mode.
    run
        The run as ``create`` or ``resume`` of :mod:`rlwatch.store.sqlite.runrow` returned it.
    where
        What to call the place in errors.
    guard
        Held during every use of the connection (memory backend: readers share it).
    """

    def __init__(
        self, db: sqlite3.Connection, run: RunInfo, where: str, guard: AbstractContextManager[object] | None = None
    ) -> None:
        self.run = run
        self.journal: JournalPort | None = None
        self._db: sqlite3.Connection | None = db
        self._where = where
        self._guard = guard or nullcontext()
        self._ended = ""
        with explained(where):
            self.last_seq = runrow.last_seq(db)
            self._sets: MetricSets = {names: (number, packing(names)) for number, names in metric_sets(db).items()}

    def write(self, items: Sequence[Storable], progress: Progress | None = None) -> None:
        """Store all of ``items`` or none. Raises ``StoreFullError``, ``UnstorableError``, ``StoreError``."""
        db = self._usable()
        batch = Batch(self.last_seq, self._sets)
        for item in items:
            batch.add(item)
        with self._guard, explained(self._where), transaction(db):
            batch.insert(db)
            if progress is not None:
                self._go_on(db, progress)
        self._sets.update(batch.new_sets)
        self.last_seq = batch.last_seq

    def _go_on(self, db: sqlite3.Connection, progress: Progress) -> None:
        """Note ``progress``, inside the transaction that makes it true."""
        if progress.judged is not None:
            progress_rows.judge(db, progress.judged)
        if progress.checkpoint is not None:
            progress_rows.keep(db, progress.checkpoint)

    def heartbeat(self, now: float) -> None:
        """Say that the writer lives."""
        with self._guard, explained(self._where):
            runrow.beat(self._usable(), now)

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Record how the run ended. Afterwards only ``close`` is left."""
        with self._guard, explained(self._where):
            runrow.end(self._usable(), state, reason, now)
        self.run = replace(self.run, state=state, state_reason=reason, heartbeat_at=now)
        self._ended = "finished"

    def close(self) -> None:
        """Let the run go; idempotent."""
        self._ended = self._ended or "closed"
        self._db = None

    def _usable(self) -> sqlite3.Connection:
        if self._db is None or self._ended:
            why = self._ended or "closed"
            raise StoreError(f"run {self.run.run_id!r} is {why}; open_run() begins its next attempt")
        return self._db
