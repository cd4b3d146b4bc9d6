"""Page with the list of runs, most urgent first, with state, onset and reason."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypedDict

import streamlit as st

from rlwatch.curation import edit_run
from rlwatch.errors import RLWatchError
from rlwatch.ports import Store
from rlwatch.records import RunInfo

from . import fleet_rows, layout, queries, table
from . import format as fmt
from .fleet import (
    HIGH,
    LOW,
    NOT_GROUPED,
    SORTS,
    URGENT,
    Fleet,
    RunEntry,
    fleet,
    group_names,
)
from .fleet_rows import ARCHIVED, COLUMNS, DEFAULT_COLUMNS, DEFAULT_CURVES, DELETED, NORMAL, FleetRow, ListView
from .health import Word
from .layout import GoToCompare, GoToRun
from .markup import el
from .page_script import base_path
from .principal import Principal

SORT = "sort"
BEHIND_S = 5.0
"""Most seconds that the browser's address may lag behind a click."""
PICKED, UNFOLDED = "picked", "open"
"""Query parameters of ticked runs and of unfolded groups."""
MEMBERS = "group-members"
"""Session key of a mapping from the message of a click on a group to the ids of its runs."""
MOST_CURVES = 6


def headline(all_entries: Sequence[RunEntry]) -> str:
    """Return the headline for the list of runs: ``2 runs need attention`` or ``No live run needs attention · 8 of 60
    finished runs collapsed``.
    """
    count = sum(entry.health.needs_you for entry in all_entries)
    ended = [entry for entry in all_entries if entry.health.ended]
    lost = sum(entry.health.word is Word.COLLAPSED for entry in ended)
    after = f" · {lost} of {fmt.plural(len(ended), 'finished run')} collapsed" if lost else ""
    if count:
        return f"{fmt.plural(count, 'run')} {'needs' if count == 1 else 'need'} attention{after}"
    return f"No live run needs attention{after}"


# An empty store: the lines to add to a trainer.

TRL = """\
from rlwatch.integrations.trl import watch
watch(trainer, project="my-project")
trainer.train()"""

LOOP = """\
import rlwatch
run = rlwatch.init(project="my-project")
run.log({"reward": r, "entropy": h, "grad_norm": g}, step=step)"""


def show_no_runs() -> None:
    """Draw the page of an empty store: code to add to a trainer, the store to write to, and other ways to begin."""
    url = queries.store_url()
    st.html(el("div", "No runs yet", cls="rl-head"))
    st.caption("Runs appear here as soon as one writes to the store below.")
    st.html(el("div", "Add rlwatch to a trainer", cls="rl-family"))
    trl, loop = st.columns(2, gap="large")
    with trl:
        st.caption("TRL")
        st.code(TRL, language="python", wrap_lines=True)
    with loop:
        st.caption("Custom training loop")
        st.code(LOOP, language="python", wrap_lines=True)
    st.caption("Point the trainer at this store")
    st.code(f"export RLWATCH_STORE={shlex.quote(_absolute(url))}", language="bash", wrap_lines=True)
    st.html(el("div", "Or start without a trainer", cls="rl-family"))
    scan, demo = st.columns(2, gap="large")
    with scan:
        st.caption("Scan an existing log")
        st.code("rlwatch scan train.log", language="bash")
    with demo:
        st.caption("Watch a small training run collapse")
        st.code("rlwatch demo", language="bash")


def _absolute(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().absolute())


def page(go_to_run: GoToRun, go_to_compare: GoToCompare) -> None:
    """Draw the page with the list of runs, and refresh it while it is open.

    ``go_to_run``, ``go_to_compare``: open the page of a run, or the comparison of several.
    """
    with layout.readable():
        dialog_if_open()
    live = st.session_state.get("runs-live", True)
    st.fragment(_body, run_every=layout.REFRESH_S if live else None)(live, go_to_run, go_to_compare)


def _body(live: bool, go_to_run: GoToRun, go_to_compare: GoToCompare) -> None:
    with layout.readable():
        which = st.session_state.get("show") or st.query_params.get("show", NORMAL)
        every, now = fleet(deleted=which == DELETED), time.time()
        entries = fleet_rows.listed(every, which, now)
        away = len(entries) < len(every.runs) or (not every.runs and bool(queries.store().runs(deleted=True)))
        if entries or which or away:
            choose = len(entries) > 1 or bool(which) or away
            _runs_list(entries, now, go_to_run, go_to_compare, choose=choose)
            if st.session_state.get("runs-live", live) != live:
                st.rerun()  # the refresh interval is set outside the fragment that is redrawn
        elif not every.unreadable:
            show_no_runs()
        _unreadable(every)


def _runs_list(
    entries: list[RunEntry], now: float, go_to_run: GoToRun, go_to_compare: GoToCompare, *, choose: bool
) -> None:
    """Draw the list; ``choose``: with the filters, if there are several runs."""
    head, store = st.columns([3, 2], vertical_alignment="bottom")
    head.html(el("div", headline(entries), cls="rl-head"))
    with store:
        running = sum(not entry.health.ended and entry.health.word is not Word.STALE for entry in entries)
        layout.store_line(f"{fmt.plural(len(entries), 'run')}, {running} live")
    view = _chosen(entries) if choose else ListView()
    may_edit = layout.principal().may_command
    picked = _picked(entries, go_to_compare, may_edit=may_edit) if len(entries) > 1 or may_edit else []
    outcome()
    boxed = len(entries) > 1 or may_edit
    view = replace(view, columns=fleet_rows.used_columns(view.columns, entries))
    view = replace(view, picked=frozenset(picked) if boxed else None)
    lines = view.lines(entries)
    if not lines:
        st.caption("No run matches these filters.")
        return
    st.session_state[MEMBERS] = {
        fleet_rows.GROUP + line.name: [entry.run.run_id for entry in line.entries]
        for line in lines
        if line.name is not None
    }
    opened = table.show("runs", on_open=_unfold, on_pick=_pick, on_sort=_sort, **first_rows(view, lines, now))
    if opened is not None and not opened.startswith(fleet_rows.GROUP):
        go_to_run(opened)


class FirstRows(TypedDict):
    """The first rows of the list as arguments of :func:`table.show`."""

    columns: Sequence[table.TableColumn]
    rows: Sequence[table.TableRow]
    total: int
    more: str


def first_rows(view: ListView, lines: Sequence[FleetRow], now: float) -> FirstRows:
    """Return the first block of the lines of the list at the time ``now``, and where the browser gets the others."""
    shown, more = view.drawn(now), f"{base_path()}/api/list?{view.query()}"
    return {"columns": shown.heads(), "rows": shown.rows(lines[: table.BLOCK]), "total": len(lines), "more": more}


# Choices in the address and the widgets.


def _chosen(entries: list[RunEntry]) -> ListView:
    """Draw the widgets above the list (search, two popovers, live switch) and return the choices."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        text = st.text_input(
            "Search", key="search", placeholder="search: words, lr=3e-5, beta>0, tag=paper, -ablation", width="stretch",
            label_visibility="collapsed", bind="query-params",
        )  # fmt: skip
        with st.popover("Filter", icon=":material/filter_list:"):
            projects, states, tags = _filters(entries)
        with st.popover("View", icon=":material/tune:"):
            columns, curves, sort, group = _layout(entries)
        st.toggle("Live", value=True, key="runs-live")
    narrowed = [*states, *projects, *tags, *filter(None, [st.session_state.get("show")])]
    if narrowed:
        st.caption("Only " + " · ".join(fmt.shorten(one, 60) for one in narrowed))
    which = str(st.session_state.get("show") or NORMAL)
    return ListView(
        projects, states, tags, text or "", columns, curves, sort, group, frozenset(_in_address(UNFOLDED)), which
    )


def _filters(entries: list[RunEntry]) -> tuple[list[str], list[str], list[str]]:
    states = _several("State", [word.value for word in Word], "state")
    projects = _several("Project", sorted({entry.run.project for entry in entries}), "project")
    tags = _several("Tag", sorted({tag for entry in entries for tag in entry.run.tags}), "tag")
    st.selectbox(
        "Runs", [NORMAL, ARCHIVED, DELETED], key="show", bind="query-params",
        format_func=lambda which: which or "active",
    )  # fmt: skip
    return projects, states, tags


def _layout(entries: list[RunEntry]) -> tuple[list[str], list[str], str, str]:
    unused = "The risk is left out as long as no run has a forecast."
    columns = _several("Columns", list(COLUMNS), "columns", DEFAULT_COLUMNS, note=unused)
    metrics = sorted({name for entry in entries for name in entry.vitals.sources})
    curves = _several("Sparklines", metrics, "curves", [c for c in DEFAULT_CURVES if c in metrics], most=MOST_CURVES)
    sorts = [URGENT, *(f"{name}, {way}" for name in SORTS for way in (HIGH, LOW))]
    sort = st.selectbox("Sort by", sorts, key=SORT, bind="query-params")
    named = _group_names(entries)
    group = st.selectbox(
        "Group by", [NOT_GROUPED, *named], key="group", bind="query-params",
        format_func=lambda name: name or "no grouping", help="Collapsed groups show mean and band, such as of seeds.",
    )  # fmt: skip
    return columns, curves, sort or URGENT, group or NOT_GROUPED


def _group_names(entries: Sequence[RunEntry]) -> list[str]:
    """Return the names to group by, cached per list of runs: flattening a thousand settings takes 80 ms."""
    runs = sorted((entry.run.run_id, entry.run.attempt) for entry in entries)
    kept = _kept_names(queries.store_url())
    known = kept.get("names")
    if known is None or known[0] != runs:
        known = kept["names"] = (runs, group_names(entry.run for entry in entries))
    return known[1]


@lru_cache(maxsize=4)
def _kept_names(url: str) -> dict[str, tuple[list[tuple[str, int]], list[str]]]:  # noqa: ARG001  (the key)
    return {}


def _several(
    label: str,
    options: list[str],
    key: str,
    default: Sequence[str] = (),
    *,
    most: int | None = None,
    note: str | None = None,
) -> list[str]:
    return st.multiselect(
        label, options, default=list(default), key=key, placeholder="any" if not default else "none",
        max_selections=most, bind="query-params", help=note,
    )  # fmt: skip


def _sort(name: str) -> None:
    """Sort by a column; a second click reverses the order, a third restores the order by urgency."""
    now = str(st.session_state.get(SORT) or st.query_params.get(SORT, ""))
    order = [f"{name}, {HIGH}", f"{name}, {LOW}", URGENT]
    st.session_state[SORT] = order[(order.index(now) + 1) % 3] if now in order else order[0]


def _unfold(opened: str) -> None:
    """Unfold a group, or fold it."""
    name = opened.removeprefix(fleet_rows.GROUP)
    if name != opened:
        now = _in_address(UNFOLDED)
        _put_in_address(UNFOLDED, [one for one in now if one != name] if name in now else [*now, name])


def _in_address(name: str) -> list[str]:
    """Return the values in the address, or a newer choice of this session that the browser has not put there yet.

    The second of two quick clicks is sent before the browser has the address of the first.
    """
    here = st.query_params.get_all(name)
    kept: list[str] = st.session_state.setdefault(f"kept-{name}", here)
    since, before = st.session_state.setdefault(f"before-{name}", (time.monotonic(), [here]))
    if here != kept and (
        here not in before or time.monotonic() > since + BEHIND_S
    ):  # another address, such as by the back button
        st.session_state[f"kept-{name}"] = kept = here
    return kept


def _put_in_address(name: str, values: Sequence[str]) -> None:
    now = _in_address(name)
    _, before = st.session_state[f"before-{name}"]
    st.session_state[f"before-{name}"] = time.monotonic(), [*before[-4:], now]
    st.session_state[f"kept-{name}"] = list(values)
    st.query_params[name] = list(values)


# Ticked runs.


def _pick(changed: Mapping[str, bool]) -> None:
    """Tick or clear boxes; the box of a group ticks or clears all of its runs."""
    picked = _in_address(PICKED)
    for asked, ticked in changed.items():
        members = st.session_state.get(MEMBERS, {}).get(asked, [asked])
        picked = [one for one in picked if one not in members] + (list(members) if ticked else [])
    _put_in_address(PICKED, picked)


def _picked(entries: Sequence[RunEntry], go_to_compare: GoToCompare, *, may_edit: bool) -> list[str]:
    """Return the ticked runs in order, even those hidden by a filter, and draw their buttons."""
    known: Mapping[str, RunInfo] = {entry.run.run_id: entry.run for entry in entries}
    picked = [run_id for run_id in _in_address(PICKED) if run_id in known]
    if picked:
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            label = f"Compare {fmt.plural(len(picked), 'run')}" if len(picked) > 1 else "Compare: select another run"
            if st.button(label, key="compare", type="primary", disabled=len(picked) < 2):
                go_to_compare(picked)
            if may_edit:
                buttons([known[run_id] for run_id in picked])
            st.button("Clear", key="compare-clear", type="tertiary", on_click=_put_in_address, args=(PICKED, ()))
    return picked


def _unreadable(fleet: Fleet) -> None:
    if not fleet.unreadable:
        return
    with st.expander(f"{fmt.plural(len(fleet.unreadable), 'run')} cannot be read", icon=":material/error:"):
        rows = [
            table.TableRow([table.text(fmt.shorten(name, 80)), table.text(why)])
            for name, why in sorted(fleet.unreadable.items())
        ]
        table.show("unreadable", (table.TableColumn("run", "long"), table.TableColumn("why", "long")), rows)


# Edits of runs on the list of runs: rename, tag, annotate, archive, delete, and undo.

EDITING, UNDO, REFUSED = "edit-pending", "edit-undo", "edit-refused"
"""Session keys: ids of the runs whose dialog is open; the undo of the last change; the errors of the last change."""


def change(store: Store, run_ids: Sequence[str], *, by: Principal, **what: Any) -> list[str]:
    """Apply one edit to each of several runs; return the errors of those for which it failed.

    ``what``: fields to change. Raises ``NotPermittedError`` unless ``by`` is an operator.
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
    """Edit runs as the current user, and store errors and the undo in the session.

    Parameters
    ----------
    run_ids
        The runs.
    done
        The action in the past tense.
    undoing
        Fields that undo the change; None if it cannot be undone.
    **what
        Fields to change.
    """
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
    """Undo the last edit of runs."""
    _, run_ids, undoing = st.session_state.pop(UNDO)
    act(run_ids, "", **undoing)


def outcome() -> None:
    """Draw the last edit of runs with its undo button, and its errors."""
    for error in st.session_state.get(REFUSED, ()):
        st.warning(fmt.shorten(error, 300), icon=":material/block:")
    if UNDO in st.session_state:
        done, _, _ = st.session_state[UNDO]
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.html(el("span", done, cls="rl-quiet"), width="content")
            st.button("Undo", key="undo", icon=":material/undo:", on_click=undo)
            st.button("Dismiss", key="undo-dismiss", type="tertiary", on_click=st.session_state.pop, args=(UNDO, None))


def buttons(runs: Sequence[RunInfo]) -> None:
    """Draw a button for each kind of edit of the chosen runs, if the user may make changes."""
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
    """Draw the dialog that edits runs if it is open. Its state is in the session, so a rerun does not close it."""
    run_ids = st.session_state.get(EDITING)
    if run_ids:
        every = queries.runs_by_id()
        runs = [every[run_id] for run_id in run_ids if run_id in every]
        tags = sorted({tag for run in every.values() for tag in run.tags})
        if runs:
            title = "Edit the run" if len(runs) == 1 else f"Edit {len(runs)} runs"
            st.dialog(title, width="medium", on_dismiss=_close)(_one if len(runs) == 1 else _edit_several)(runs, tags)


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


def _edit_several(runs: Sequence[RunInfo], known: Sequence[str]) -> None:
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
