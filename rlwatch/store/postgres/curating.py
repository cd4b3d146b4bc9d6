"""Store people's edits of runs in PostgreSQL, and remove deleted runs; implements ``CurationStore``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rlwatch.errors import RunLockedError, RunNotFoundError
from rlwatch.ports import Bulk
from rlwatch.records import Purge, RunEdit, RunInfo
from rlwatch.store.fields import PURGE
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.ownership import lock_of, locked
from rlwatch.store.postgres.rows import add, plain
from rlwatch.store.postgres.server import Server
from rlwatch.store.sqlite.curating import curated, edit_body, edit_of, purge_of

OF_A_RUN = (
    "attempt",
    "metric_set",
    "record",
    "event",
    "finding",
    "forecast",
    "spike_batch",
    "spike_top",
    "completion_batch",
    "chunk",
    "chunk_axis",
    "series_epoch",
    "journal",
    "checkpoint",
    "command",
    "alert",
    "outbox",
    "acknowledgement",
    "alert_book",
    "forecast_answer",
    "edit",
    "run",
)
"""Tables with a column ``run_id``; that of the run itself comes last."""


def edits_of(db: Connection, run_id: str | None) -> dict[str, list[RunEdit]]:
    """Return run id -> its edits, oldest first; for one run, or (``run_id`` None) for all."""
    found: dict[str, list[RunEdit]] = {}
    rows = db.execute(
        "SELECT run_id, edited_by, at, body FROM edit WHERE %(run)s::text IS NULL OR run_id = %(run)s ORDER BY id",
        {"run": run_id},
    )
    for of, by, at, body in rows:
        found.setdefault(of, []).append(edit_of(of, by, at, body))
    return found


def as_edited(db: Connection, runs: Sequence[RunInfo], run_id: str | None = None) -> list[RunInfo]:
    """Return the runs with people's edits of names and tags applied. ``run_id``: if given, the one run in ``runs``."""
    edits = edits_of(db, run_id)
    return [curated(run, edits.get(run.run_id, ())) for run in runs]


class Curating(ABC):
    """Part of a store that holds people's edits of runs and notes of removed runs. Subclasses open the transactions."""

    server: Server
    url: str

    @abstractmethod
    def run(self, run_id: str) -> RunInfo:
        """Return one run, with people's edits applied. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection | None]:
        """Open the tables for reading; None if there are none yet."""

    @abstractmethod
    def snapshot(self, run_id: str) -> AbstractContextManager[Connection]:
        """Give a connection with a read-only snapshot, if the run exists. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _changing(self, run_id: str) -> AbstractContextManager[Connection]:
        """Open a transaction on a run that exists. Raises ``RunNotFoundError``."""

    def edit(self, edit: RunEdit) -> RunInfo:
        """Store a user's edit of a run, also while the run is written; return the run as it is shown from now on."""
        with self._changing(edit.run_id) as db:
            db.execute(
                "INSERT INTO edit (run_id, edited_by, at, body) VALUES (%s, %s, %s, %s)",
                (edit.run_id, plain(edit.by), edit.at, edit_body(edit)),
            )
        return self.run(edit.run_id)

    def edits(self, run_id: str) -> list[RunEdit]:
        """Return all edits of the run, oldest first. Raises ``RunNotFoundError``."""
        with self.snapshot(run_id) as db:
            return edits_of(db, run_id).get(run_id, [])

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:
        """Remove all data of a deleted run, and return a note of who did it (``by``) and when (``now``, Unix seconds).

        Raises ``StoreError`` unless the run is deleted, and ``RunLockedError`` while a process writes it.
        """
        purged = purge_of(self.run(run_id), by, now)
        with self.server.connection() as db:
            if not locked(db, lock_of(self.server.address, run_id)):
                raise RunLockedError(f"run {run_id!r} is being written; end it before it is purged")
            try:
                self.server.carrier.remove(run_id)
                with db.transaction():
                    self._remove(db, purged)
                    tell(db, self.server.address, "pages", run_id)
            finally:
                if not db.closed:
                    db.execute("SELECT pg_advisory_unlock_all()")
        return purged

    def prune(self, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool) -> tuple[int, int]:
        """Remove old batches of tokens or completions from a run, even while it is written; return their number and
        bytes.

        ``before``: Unix seconds; older batches go. ``undated``: time that batches without one are taken to have.
        ``dry_run``: only count.
        """
        with self._changing(run_id) as db:
            return self.server.carrier.prune(db, run_id, bulk, before, undated=undated, dry_run=dry_run)

    def _remove(self, db: Connection, purged: Purge) -> None:
        for table in OF_A_RUN:
            gone = db.execute(f"DELETE FROM {table} WHERE run_id = %s", (purged.run_id,)).rowcount
        if not gone:
            raise RunNotFoundError(f"run {purged.run_id!r} of {self.url} is gone already")
        add(db, PURGE, purged)

    def purges(self) -> list[Purge]:
        """Return the notes of all runs that were removed for good, oldest first."""
        with self._reading() as db:
            if db is None:
                return []
            rows = db.execute(PURGE.select("ORDER BY id", "extra").encode())
            return [PURGE.record(row, extra) for extra, *row in rows]
