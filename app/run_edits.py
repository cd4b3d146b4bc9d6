"""Edits of runs on the list of runs: rename, tag, annotate, archive, delete, and undo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import streamlit as st

from rlwatch.curation import edit_run
from rlwatch.errors import RLWatchError
from rlwatch.ports import Store
from rlwatch.records import RunInfo

from . import format as fmt
from . import layout, queries
from .markup import el
from .principal import Principal

EDITING, UNDO, REFUSED = "edit-pending", "edit-undo", "edit-refused"
"""Session keys: ids of the runs whose dialog is open; the undo of the last change; the errors of the last change."""


def change(store: Store, run_ids: Sequence[str], *, by: Principal, **what: Any) -> list[str]:
    """Make the same change to runs; returns the errors of those where it failed.

    Raises ``NotPermittedError`` unless ``by`` is an operator.
    """
    by.require_command()
    refused = []
    for run_id in run_ids:
        try:
            edit_run(store, run_id, by=by.name, **what)
        except RLWatchError as error:
            refused.append(str(error))
    return refused


def act(run_ids: Sequence[str], done: str, undoing: dict[str, Any] | None = None, **what: Any) -> None:
    """Change runs as the current user, and store the undo in the session."""
    try:
        refused = change(queries.store(), run_ids, by=layout.principal(), **what)
    except RLWatchError as error:
        refused = [str(error)]
    st.session_state[REFUSED] = refused
    if len(refused) < len(run_ids) and undoing is not None:
        st.session_state[UNDO] = (f"{done} {fmt.plural(len(run_ids) - len(refused), 'run')}.", list(run_ids), undoing)
    else:
        st.session_state.pop(UNDO, None)


def undo() -> None:
    """Undo the last change."""
    _, run_ids, undoing = st.session_state.pop(UNDO)
    act(run_ids, "", **undoing)


def outcome() -> None:
    """Show the last change with its undo button, and its errors."""
    for error in st.session_state.get(REFUSED, ()):
        st.warning(fmt.shorten(error, 300), icon=":material/block:")
    if UNDO in st.session_state:
        done, _, _ = st.session_state[UNDO]
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.html(el("span", done, cls="rl-quiet"), width="content")
            st.button("Undo", key="undo", icon=":material/undo:", on_click=undo)
            st.button("Dismiss", key="undo-dismiss", type="tertiary", on_click=st.session_state.pop, args=(UNDO, None))


def buttons(runs: Sequence[RunInfo]) -> None:
    """Draw a button for each edit of the chosen runs, if the user may make changes."""
    run_ids = [run.run_id for run in runs]
    if all(run.curation.deleted for run in runs):
        st.button(
            "Restore", key="restore", on_click=partial(act, run_ids, "Restored", {"deleted": True}, deleted=False)
        )
        return
    if st.button("Edit…", key="edit"):
        st.session_state[EDITING] = run_ids
        st.rerun()  # the dialog lies outside the fragment that is redrawn
    archived = all(run.curation.archived for run in runs)
    word, done = ("Unarchive", "Unarchived") if archived else ("Archive", "Archived")
    undoing = {"archived": archived}
    st.button(word, key="archive", on_click=partial(act, run_ids, done, undoing, archived=not archived))
    st.button("Delete", key="delete", on_click=partial(act, run_ids, "Deleted", {"deleted": False}, deleted=True))


def _close() -> None:
    st.session_state.pop(EDITING, None)


def dialog_if_open() -> None:
    """Draw the dialog if it is open. Its state is in the session: a rerun does not close it."""
    run_ids = st.session_state.get(EDITING)
    if run_ids:
        every = queries.runs_by_id()
        runs = [every[run_id] for run_id in run_ids if run_id in every]
        tags = sorted({tag for run in every.values() for tag in run.tags})
        if runs:
            title = "Edit the run" if len(runs) == 1 else f"Edit {len(runs)} runs"
            st.dialog(title, width="medium", on_dismiss=_close)(_one if len(runs) == 1 else _several)(runs, tags)


def _one(runs: Sequence[RunInfo], known: Sequence[str]) -> None:
    (run,) = runs
    logged = run.curation.logged_name if run.curation.edited_at else run.name
    name = st.text_input(
        "Name", run.name, key=f"edit-name-{run.run_id}", max_chars=200, placeholder=logged or run.run_id,
        help="Empty: the name its trainer gave.",
    )  # fmt: skip
    tags = _tags("Tags", known, run.tags, f"edit-tags-{run.run_id}")
    notes = st.text_area("Notes", run.curation.notes, key=f"edit-notes-{run.run_id}", max_chars=20_000, height=140)
    _history(run)
    gone = [tag for tag in run.tags if tag not in tags]
    back = {"name": run.name, "notes": run.curation.notes, "tag": gone, "untag": [t for t in tags if t not in run.tags]}
    _save(runs, back, name=name or "", notes=notes or "", tag=tags, untag=gone)


def _several(runs: Sequence[RunInfo], known: Sequence[str]) -> None:
    st.caption(fmt.shorten(", ".join(run.name or run.run_id for run in runs), 400))
    held = sorted({tag for run in runs for tag in run.tags})
    more = _tags("Add tags", known, (), "edit-more")
    less = st.multiselect("Remove tags", held, key="edit-less", placeholder="tags")
    _save(runs, None, tag=more, untag=less)


def _tags(label: str, known: Sequence[str], chosen: Sequence[str], key: str) -> list[str]:
    options = sorted({*known, *chosen})
    return st.multiselect(
        label, options, list(chosen), key=key, accept_new_options=True, placeholder="choose or type a new one"
    )


def _save(runs: Sequence[RunInfo], back: dict[str, Any] | None, **what: Any) -> None:
    layout.signature()
    save, cancel = st.columns(2)
    if save.button("Save", type="primary", key="edit-save", width="stretch"):
        act([run.run_id for run in runs], "Changed", back, **what)
        _close()
        st.rerun()
    if cancel.button("Cancel", key="edit-cancel", width="stretch"):
        _close()
        st.rerun()


def _history(run: RunInfo) -> None:
    curation = run.curation
    if curation.edited_at is None:
        return
    logged = ", ".join(filter(None, (curation.logged_name or "no name", *curation.logged_tags)))
    st.caption(f"Its trainer wrote: {fmt.shorten(logged, 200)}. Last changed by {fmt.shorten(curation.edited_by, 60)}; "
               f"`rlwatch edit {run.run_id} --history` has all changes.")  # fmt: skip
