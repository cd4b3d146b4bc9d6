"""Edits of runs by people as rows, what they come to, and the half of a store that answers with them."""

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
from rlwatch.store.sqlite.extra import extra_of, merge_extra
from rlwatch.store.sqlite.schema import transaction

_COLUMNS = frozenset(("run_id", "by", "at"))


def curated(run: RunInfo, edits: Sequence[RunEdit]) -> RunInfo:
    """The run as its trainer wrote it, as it is to be shown after the ``edits``, oldest first.

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
    """Add the edit."""
    with transaction(db):
        db.execute("INSERT INTO edit VALUES (NULL, ?, ?, ?)", (plain(edit.by), edit.at, edit_body(edit)))


def edit_body(edit: RunEdit) -> str:
    """Return the edited fields as JSON."""
    return dumps({name: _text(value) for name, value in codec.beyond(edit, _COLUMNS).items()})


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    return [_text(each) for each in value] if isinstance(value, tuple | list) else value


def is_deleted(db: sqlite3.Connection, run_id: str) -> bool:
    """Return True if the newest edit of ``deleted`` set it."""
    deletions = [edit.deleted for edit in read_edits(db, run_id) if edit.deleted is not None]
    return bool(deletions and deletions[-1])


def read_edits(db: sqlite3.Connection, run_id: str) -> list[RunEdit]:
    """Edits in the order they came in; none in a file from before there were any."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'edit'").fetchone():
        return []
    return [edit_of(run_id, *row) for row in db.execute("SELECT edited_by, at, body FROM edit ORDER BY id")]


def edit_of(run_id: str, by: str, at: float, body: str) -> RunEdit:
    """The edit again."""
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
"""For each kind what counts batches from before ?2, and what removes them."""


def remove_bulk(db: sqlite3.Connection, bulk: Bulk, before: float, *, undated: float, dry_run: bool) -> tuple[int, int]:
    """Remove batches of a run from before then, and give their room back to the disk; how many, and their bytes."""
    counting, *removing = _OLD_BULK[bulk]
    n, size = db.execute(counting, (undated, before)).fetchone()
    if n and not dry_run:
        with transaction(db):
            for statement in removing:
                db.execute(statement, (undated, before))
        db.execute("VACUUM")
    return int(n), int(size)


def purge_of(run: RunInfo, by: str, now: float) -> Purge:
    """The note that the run was purged. Raises ``StoreError`` unless it is deleted."""
    deleted_at = run.curation.deleted_at
    if deleted_at is None:
        raise StoreError(f"run {run.run_id!r} is not deleted: delete it first, so that it can be undone for a while")
    return Purge(run.run_id, run.project, run.name, plain(by), now, run.curation.deleted_by, deleted_at)


def keep_purge(db: sqlite3.Connection, purge: Purge) -> None:
    """Add the note."""
    with transaction(db):
        number = db.execute(PURGE.insert("?"), PURGE.row(purge)).lastrowid
        merge_extra(db, PURGE, {number or 0: purge})


def read_purges(db: sqlite3.Connection) -> list[Purge]:
    """All notes, oldest first."""
    rows = db.execute(PURGE.select("ORDER BY id", "id")).fetchall()
    extra = extra_of(db, PURGE) if rows else {}
    return [PURGE.record(row, extra.get(number)) for number, *row in rows]


# Edits of all runs, over the hooks of the other halves of a store.


class CurationTables(ABC):
    """Editing and purging (``CurationStore``)."""

    @abstractmethod
    def run(self, run_id: str) -> RunInfo:
        """One run, as people edited it."""

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
        """Keep the edit; returns the run as it is shown from now on."""
        with self._made_control(edit.run_id) as db:
            keep_edit(db, edit)
        return self.run(edit.run_id)

    def edits(self, run_id: str) -> list[RunEdit]:
        """All edits of the run, oldest first."""
        with self._control(run_id) as db:
            return [] if db is None else read_edits(db, run_id)

    def purges(self) -> list[Purge]:
        """Runs that were purged, oldest first."""
        with self._store_wide() as db:
            return [] if db is None else read_purges(db)


class NoCuration:
    """Refuse edits, with the reason, in a store that cannot keep them."""

    _no_commands_because: str

    def edit(self, edit: RunEdit) -> RunInfo:  # noqa: ARG002
        """Not here."""
        self._refuse_edits()

    def edits(self, run_id: str) -> list[RunEdit]:  # noqa: ARG002
        """Return no edits: this store accepts none."""
        return []

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:  # noqa: ARG002
        """Not here."""
        self._refuse_edits()

    def purges(self) -> list[Purge]:
        """Return none: this store purges nothing."""
        return []

    def _refuse_edits(self) -> NoReturn:
        raise ControlUnavailableError(
            f"names, tags, notes, archiving and deleting are not available {self._no_commands_because}"
        )
