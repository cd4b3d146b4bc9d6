"""Edit the description of runs, and remove runs that were deleted long enough ago."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.liveness import last_sign, reports
from rlwatch.errors import ConfigError
from rlwatch.ports import Store
from rlwatch.records import Purge, RunEdit, RunInfo
from rlwatch.wording import duration, one_line

GRACE_S = 7 * 86_400.0
"""Default for the seconds during which a deleted run cannot be purged."""
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
    more = [one for one in dict.fromkeys(map(_tag, tag)) if one not in run.tags]
    less = [one for one in dict.fromkeys(map(_tag, untag)) if one in run.tags]
    if len(set(run.tags) | set(more)) > MOST_TAGS:
        raise ConfigError(f"a run has at most {MOST_TAGS} tags; {run_id} would have {len(run.tags) + len(more)}")
    if deleted and reports(run, now):
        since_sign = duration(now - (last_sign(run) or now))
        raise ConfigError(
            f"run {run_id} is live (last sign {since_sign} ago) and cannot be deleted; stop it first, or archive it"
        )
    edit = RunEdit(
        run_id,
        by.strip(),
        now,
        name=None if name is None else _name(name),
        notes=None if notes is None else _notes(notes),
        tagged=tuple(more),
        untagged=tuple(less),
        archived=archived,
        deleted=deleted,
    )
    return store.edit(edit) if _changes(run, edit) else run


def purge_run(store: Store, run_id: str, *, by: str, grace_s: float = GRACE_S, clock: Clock | None = None) -> Purge:
    """Remove the data of a run for good, if it was deleted at least ``grace_s`` seconds ago.

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
