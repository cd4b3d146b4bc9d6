"""Store people's edits of runs as rows, apply them to what trainers wrote, and remove runs that were deleted."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

from rlwatch import codec
from rlwatch.errors import ControlUnavailableError, StoreError
from rlwatch.ports import Bulk
from rlwatch.records import Curation, Purge, RunEdit, RunInfo
from rlwatch.store.fields import PURGE, dumps, loads, plain
from rlwatch.store.sqlite.schema import extra_of, merge_extra, transaction

_COLUMNS = frozenset(("run_id", "by", "at"))


def curated(run: RunInfo, edits: Sequence[RunEdit]) -> RunInfo:
    """Return the run as it is shown to people: as its trainer wrote it, with the ``edits`` (oldest first) applied.

    A deletion that is older than the writer's last heartbeat does not count: the run went on afterwards.

    >>> shown = curated(RunInfo("r", name="s3", tags=("a",)), [RunEdit("r", "ann", 5.0, name="best", untagged=("a",))])
    >>> shown.name, shown.tags, shown.curation.logged_name, shown.curation.edited_by
    ('best', (), 's3', 'ann')
    """
    if not edits:
        return run
    name, tags = run.name, dict.fromkeys(run.tags)
    known = Curation(edited_at=edits[-1].at, edited_by=edits[-1].by, logged_name=run.name, logged_tags=run.tags)
    for edit in edits:
        name = name if edit.name is None else edit.name or run.name
        tags = {tag: None for tag in (*tags, *edit.tagged) if tag not in edit.untagged}
        known = _after(known, edit)
    if known.deleted_at is not None and known.deleted_at < (run.heartbeat_at or 0.0):
        known = replace(known, deleted_at=None, deleted_by="")
    return replace(run, name=name, tags=tuple(tags), curation=known)


def _after(known: Curation, edit: RunEdit) -> Curation:
    if edit.deleted is not None and edit.deleted is not known.deleted:  # deleted twice: the first who did it
        known = replace(known, deleted_at=edit.at if edit.deleted else None, deleted_by=edit.by if edit.deleted else "")
    return replace(
        known,
        notes=known.notes if edit.notes is None else edit.notes,
        archived=known.archived if edit.archived is None else edit.archived,
    )


def keep_edit(db: sqlite3.Connection, edit: RunEdit) -> None:
    """Add a user's edit of a run to its ``control.db``."""
    with transaction(db):
        db.execute("INSERT INTO edit VALUES (NULL, ?, ?, ?)", (plain(edit.by), edit.at, edit_body(edit)))


def edit_body(edit: RunEdit) -> str:
    """Return the fields that the edit sets, as JSON text; who made it and when have columns of their own."""
    return dumps({name: _text(value) for name, value in codec.beyond(edit, _COLUMNS).items()})


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    return [_text(each) for each in value] if isinstance(value, tuple | list) else value


def is_deleted(db: sqlite3.Connection, run_id: str) -> bool:
    """Return True if the run's edits in ``control.db`` leave it deleted."""
    deletions = [edit.deleted for edit in read_edits(db, run_id) if edit.deleted is not None]
    return bool(deletions and deletions[-1])


def read_edits(db: sqlite3.Connection, run_id: str) -> list[RunEdit]:
    """Return a run's edits in the order of their arrival; none in a file from before edits existed."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'edit'").fetchone():
        return []
    return [edit_of(run_id, *row) for row in db.execute("SELECT edited_by, at, body FROM edit ORDER BY id")]


def edit_of(run_id: str, by: str, at: float, body: str) -> RunEdit:
    """Return the edit of a run's description that is stored as one row of the database.

    ``by``: the user. ``at``: Unix seconds. ``body``: JSON text made by :func:`edit_body`.
    """
    return codec.enriched(RunEdit(run_id=run_id, by=by, at=at), loads(body))


_OLD_BULK = {
    Bulk.TOKENS: (
        "SELECT count(*), coalesce(sum(length(v)), 0) FROM spike_batch WHERE coalesce(nullif(ts, 0), ?1) < ?2",
        "DELETE FROM spike_top WHERE batch IN (SELECT id FROM spike_batch WHERE coalesce(nullif(ts, 0), ?1) < ?2)",
        "DELETE FROM spike_batch WHERE coalesce(nullif(ts, 0), ?1) < ?2",
    ),
    Bulk.COMPLETIONS: (
        "SELECT count(*), coalesce(sum(length(v)), 0) FROM completion_batch WHERE coalesce(nullif(ts, 0), ?1) < ?2",
        "DELETE FROM completion_batch WHERE coalesce(nullif(ts, 0), ?1) < ?2",
    ),
}
"""For each kind of bulk data: the SQL that counts batches older than ?2, then the SQL statements that remove them."""


def remove_bulk(db: sqlite3.Connection, bulk: Bulk, before: float, *, undated: float, dry_run: bool) -> tuple[int, int]:
    """Remove a run's batches of one kind that are older than ``before`` and return their disk space to the system.

    ``before``: Unix seconds. ``undated``: time (Unix seconds) that batches without one are taken to have. ``dry_run``:
    only count. Returns the number of batches and their bytes.
    """
    counting, *removing = _OLD_BULK[bulk]
    n, size = db.execute(counting, (undated, before)).fetchone()
    if n and not dry_run:
        with transaction(db):
            for statement in removing:
                db.execute(statement, (undated, before))
        db.execute("VACUUM")
    return int(n), int(size)


def purge_of(run: RunInfo, by: str, now: float) -> Purge:
    """Return the note that ``run`` was removed for good, by the user ``by`` at ``now`` (Unix seconds).

    Raises ``StoreError`` unless the run is deleted.
    """
    deleted_at = run.curation.deleted_at
    if deleted_at is None:
        raise StoreError(f"run {run.run_id!r} is not deleted: delete it first, so that it can be undone for a while")
    return Purge(run.run_id, run.project, run.name, plain(by), now, run.curation.deleted_by, deleted_at)


def keep_purge(db: sqlite3.Connection, purge: Purge) -> None:
    """Add the note of a removed run to the store's ``alerts.db``."""
    with transaction(db):
        number = db.execute(PURGE.insert("?"), PURGE.row(purge)).lastrowid
        merge_extra(db, PURGE, {number or 0: purge})


def read_purges(db: sqlite3.Connection) -> list[Purge]:
    """Return the notes of all runs that were removed for good, oldest first."""
    rows = db.execute(PURGE.select("ORDER BY id", "id")).fetchall()
    extra = extra_of(db, PURGE) if rows else {}
    return [PURGE.record(row, extra.get(number)) for number, *row in rows]


# Edits of all runs, over the hooks of the other halves of a store.


class CurationTables(ABC):
    """Part of a store that holds people's edits of runs and notes of removed runs; implements ``CurationStore``."""

    @abstractmethod
    def run(self, run_id: str) -> RunInfo:
        """Return one run, with people's edits applied. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection | None]:
        """Open the run's control tables; None if nothing has been written there yet."""

    @abstractmethod
    def _made_control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """Open the run's control tables, created if need be."""

    @abstractmethod
    def _store_wide(self) -> AbstractContextManager[sqlite3.Connection | None]:
        """Open the tables of the whole store; None if nothing has been written there yet."""

    def edit(self, edit: RunEdit) -> RunInfo:
        """Store a user's edit of a run, also while the run is written; return the run as it is shown from now on."""
        with self._made_control(edit.run_id) as db:
            keep_edit(db, edit)
        return self.run(edit.run_id)

    def edits(self, run_id: str) -> list[RunEdit]:
        """Return all edits of the run, oldest first."""
        with self._control(run_id) as db:
            return [] if db is None else read_edits(db, run_id)

    def purges(self) -> list[Purge]:
        """Return the notes of all runs that were removed for good, oldest first."""
        with self._store_wide() as db:
            return [] if db is None else read_purges(db)


class NoCuration:
    """Part of a store that cannot hold people's edits of runs, nor remove runs: each call raises an error with the
    reason.
    """

    _no_commands_because: str

    def edit(self, edit: RunEdit) -> RunInfo:  # noqa: ARG002
        """Raise ``ControlUnavailableError``: this store cannot hold edits."""
        self._refuse_edits()

    def edits(self, run_id: str) -> list[RunEdit]:  # noqa: ARG002
        """Return no edits: this store accepts none."""
        return []

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:  # noqa: ARG002
        """Raise ``ControlUnavailableError``: this store cannot remove runs."""
        self._refuse_edits()

    def purges(self) -> list[Purge]:
        """Return no notes: this store removes no runs."""
        return []

    def _refuse_edits(self) -> NoReturn:
        raise ControlUnavailableError(
            f"names, tags, notes, archiving and deleting are not available {self._no_commands_because}"
        )
