"""Edit the description of runs, and remove runs that were deleted long enough ago."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.liveness import last_sign, reports
from rlwatch.errors import ConfigError, RunLockedError
from rlwatch.ports import Bulk, Pruning, Store
from rlwatch.records import AuditEntry, Purge, RunEdit, RunInfo
from rlwatch.wording import duration, one_line

GRACE_S = 7 * 86_400.0
"""Default for the seconds during which a deleted run cannot be removed for good."""
LONGEST_NAME, LONGEST_TAG, LONGEST_NOTES, MOST_TAGS = 200, 60, 20_000, 50


def edit_run(
    store: Store,
    run_id: str,
    *,
    by: str,
    name: str | None = None,
    notes: str | None = None,
    tag: Sequence[str] = (),
    untag: Sequence[str] = (),
    archived: bool | None = None,
    deleted: bool | None = None,
    clock: Clock | None = None,
) -> RunInfo:
    """Edit the description of a run; None leaves a field as it is.

    Parameters
    ----------
    store
        The store of the run.
    run_id
        The run.
    by
        Name of the user who edits.
    name
        New name; an empty one restores the trainer's.
    notes
        New notes.
    tag, untag
        Tags to add and to remove.
    archived, deleted
        New state of the run.
    clock
        Source of the time; the system's by default.

    Returns
    -------
    RunInfo
        The run after the edit.

    Raises
    ------
    ConfigError
        If ``by`` is empty, a text is too long, a tag is invalid, or a live run is to be deleted.
    StoreError
        If there is no such run, or the store cannot keep edits.
    """
    now = (clock or SystemClock()).now()
    if not by.strip():
        raise ConfigError(f"an edit needs a name, got {by!r}; give yours with --by")
    run = store.run(run_id)
    edit = _with_tags(RunEdit(run_id, by.strip(), now, archived=archived, deleted=deleted), run, tag, untag)
    if deleted:
        _require_not_live(run, now)
    edit = replace(edit, name=None if name is None else _name(name), notes=None if notes is None else _notes(notes))
    return store.edit(edit) if _changes(run, edit) else run


def _with_tags(edit: RunEdit, run: RunInfo, tag: Sequence[str], untag: Sequence[str]) -> RunEdit:
    """Return the edit with the tags to add and remove; raise ``ConfigError`` for an invalid tag, or too many."""
    more = [one for one in dict.fromkeys(map(_tag, tag)) if one not in run.tags]
    less = [one for one in dict.fromkeys(map(_tag, untag)) if one in run.tags]
    if len(set(run.tags) | set(more)) > MOST_TAGS:
        raise ConfigError(f"a run has at most {MOST_TAGS} tags; {run.run_id} would have {len(run.tags) + len(more)}")
    return replace(edit, tagged=tuple(more), untagged=tuple(less))


def _require_not_live(run: RunInfo, now: float) -> None:
    if reports(run, now):
        since_sign = duration(now - (last_sign(run) or now))
        raise ConfigError(
            f"run {run.run_id} is live (last sign {since_sign} ago) and cannot be deleted; stop it first, or archive it"
        )


def purge_run(store: Store, run_id: str, *, by: str, grace_s: float = GRACE_S, clock: Clock | None = None) -> Purge:
    """Remove the data of a run for good, if it was deleted at least ``grace_s`` seconds ago; return a note of it.

    ``by``: name of the user who removes it. ``clock``: source of the time; the system's by default.

    Raises
    ------
    ConfigError
        If ``by`` is empty, or the run was deleted less than ``grace_s`` seconds ago.
    StoreError
        If the run is not deleted, or in use.
    """
    now = (clock or SystemClock()).now()
    if not by.strip():
        raise ConfigError(f"a purge needs a name, got {by!r}; give yours with --by")
    since = store.run(run_id).curation.deleted_at
    if since is not None and now - since < grace_s:
        left = duration(grace_s - (now - since))
        raise ConfigError(f"run {run_id} was deleted {duration(now - since)} ago: it can be restored for {left} more")
    return store.purge(run_id, by=by.strip(), now=now)


def _changes(run: RunInfo, edit: RunEdit) -> bool:
    known = run.curation
    shown = run.name if edit.name is None else edit.name or (known.logged_name if known.edited_at else run.name)
    return bool(
        edit.tagged
        or edit.untagged
        or shown != run.name
        or edit.notes not in (None, known.notes)
        or edit.archived not in (None, known.archived)
        or edit.deleted not in (None, known.deleted)
    )


def _name(text: str) -> str:
    name = " ".join(text.split())
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"a name has at most {LONGEST_NAME} characters, got {len(name)}; the rest belongs in notes")
    return name


def _notes(text: str) -> str:
    if len(text) > LONGEST_NOTES:
        raise ConfigError(f"notes have at most {LONGEST_NOTES} characters, got {len(text)}; link what is longer")
    return text.strip()


def _tag(text: str) -> str:
    tag = " ".join(text.split())
    if not 0 < len(tag) <= LONGEST_TAG or "," in tag:
        raise ConfigError(
            f"a tag is 1 to {LONGEST_TAG} characters without a comma, got {one_line(text, 80)!r}; give each by itself"
        )
    return tag


# Remove old bulk data of runs, kind by kind: details that explain single steps, not the history of the run.
#
# Metrics, events, findings, forecasts, alerts, commands and users' notes are never removed by age. An archived run can
# be deleted as a whole; ``rlwatch purge`` then removes it unless it is restored.

ARCHIVED = "archived"
KINDS = (*(kind.value for kind in Bulk), ARCHIVED)
"""Kinds of data that can be removed: bulk of every run, and archived runs as a whole."""
SHORTEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """Part of a run that was removed, or would be.

    ``kind``: one of :data:`KINDS`. ``n`` batches (or runs) with ``bytes`` bytes in all; ``left`` is the reason why
    nothing was removed.
    """

    run_id: str
    kind: str
    n: int = 0
    bytes: int = 0
    left: str = ""


def prune(
    store: Store,
    ages: Mapping[str, float],
    *,
    by: str,
    runs: Collection[str] = (),
    dry_run: bool = False,
    clock: Clock | None = None,
) -> Iterator[Pruned]:
    """Remove old data, and yield each part of a run with something to remove.

    In a store that is a directory a live run is skipped, as only its trainer writes it; on PostgreSQL its old bulk is
    removed, too. Each removal is recorded in the audit.

    Parameters
    ----------
    store
        The store.
    ages
        Kind of data -> age in seconds above which it is removed, at least 3600.
    by
        Name of the user who removes.
    runs
        Ids of the runs; empty for all.
    dry_run
        True to yield what would be removed, and remove nothing.
    clock
        Source of the time; the system's by default.

    Raises
    ------
    ConfigError
        For an unknown kind, an age below an hour, an empty ``by``, or a store that cannot remove parts of runs.
    StoreError
        If a run cannot be read or changed.
    """
    wrong = next((kind for kind in ages if kind not in KINDS), None)
    if wrong is not None:
        raise ConfigError(f"there is no kind {wrong!r} to remove; the kinds are {', '.join(KINDS)}")
    short = next((kind for kind, age in ages.items() if not age >= SHORTEST_S), None)
    if short is not None:
        raise ConfigError(f"{short}: kept for an hour at least, got {ages[short]:g} s")
    if not by.strip():
        raise ConfigError(f"a removal needs a name, got {by!r}; give yours with --by")
    if not callable(getattr(store, "prune", None)):
        raise ConfigError("this store cannot remove parts of runs: it is no directory and not on PostgreSQL")
    now = (clock or SystemClock()).now()
    for run in store.runs():
        if not runs or run.run_id in runs:
            yield from _of_run(store, run, ages, by, now, dry_run=dry_run)


def _of_run(
    store: Store, run: RunInfo, ages: Mapping[str, float], by: str, now: float, *, dry_run: bool
) -> Iterator[Pruned]:
    seen = last_sign(run) or run.created_at
    if ARCHIVED in ages and run.curation.archived and now - seen >= ages[ARCHIVED] and not reports(run, now):
        if not dry_run:
            edit_run(store, run.run_id, by=by, deleted=True)
        yield Pruned(run.run_id, ARCHIVED, 1)
        return
    for bulk in Bulk:
        if bulk.value not in ages:
            continue
        try:
            n, size = cast("Pruning", store).prune(
                run.run_id, bulk, now - ages[bulk.value], undated=seen, dry_run=dry_run
            )
        except RunLockedError:
            yield Pruned(run.run_id, bulk.value, left="it is being written: once it has ended")
            continue
        if not n:
            continue
        if not dry_run:
            text = f"removed {n} {bulk.value} older than {duration(ages[bulk.value])}"
            store.put_entry(AuditEntry(secrets.token_hex(8), now, by, "prune", text, run.run_id))
        yield Pruned(run.run_id, bulk.value, n, size)
