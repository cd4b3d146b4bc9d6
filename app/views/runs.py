"""Runs: which of my runs is in danger, since when, and why."""

from __future__ import annotations

import time
from collections.abc import Callable

import streamlit as st

from .. import format as fmt
from .. import overview, queries, shell, table
from ..health import Word
from ..markup import el
from . import empty

GoToRun = Callable[[str], None]
"""Leaves for the page of the run of this id."""


def page(go_to_run: GoToRun) -> None:
    """The list of runs, refreshed while somebody looks."""
    live = st.session_state.get("runs-live", True)
    st.fragment(_body, run_every=shell.REFRESH_S if live else None)(live, go_to_run)


def _body(live: bool, go_to_run: GoToRun) -> None:
    with shell.readable():
        fleet, now = queries.fleet(), time.time()
        if fleet.runs:
            _list(overview.entries(fleet, now), now, go_to_run)
            if st.session_state.get("runs-live", live) != live:
                st.rerun()  # how often to look is decided outside the part that is looked at again
        elif not fleet.unreadable:
            empty.show()
        _unreadable(fleet)


def _list(entries: list[overview.Entry], now: float, go_to_run: GoToRun) -> None:
    head, store = st.columns([3, 2], vertical_alignment="bottom")
    head.html(el("div", overview.headline(entries), cls="rl-head"))
    with store:
        running = sum(entry.health.word in {Word.DANGER, Word.WATCH, Word.PAUSED, Word.HEALTHY} for entry in entries)
        shell.store_line(f"{fmt.plural(len(entries), 'run')}, {running} live")
    shown = _filtered(entries) if len(entries) > 1 else entries
    if not shown:
        st.caption("No run matches these filters.")
        return
    opened = table.show("runs", overview.COLUMNS, [overview.row(entry, now) for entry in shown])
    if opened is not None:
        go_to_run(opened)


def _filtered(entries: list[overview.Entry]) -> list[overview.Entry]:
    project, state, text, live = st.columns([3, 3, 4, 1], vertical_alignment="center")
    projects = project.multiselect(
        "Project",
        sorted({entry.run.project for entry in entries}),
        key="project",
        placeholder="project",
        label_visibility="collapsed",
        bind="query-params",
    )
    states = state.multiselect(
        "State",
        [word.value for word in Word],
        key="state",
        placeholder="state",
        label_visibility="collapsed",
        bind="query-params",
    )
    search = text.text_input(
        "Search", key="search", placeholder="search", label_visibility="collapsed", bind="query-params"
    )
    live.toggle("Live", value=True, key="runs-live")
    return overview.matching(entries, projects=projects, states=states, text=search or "")


def _unreadable(fleet: queries.Fleet) -> None:
    if not fleet.unreadable:
        return
    with st.expander(f"{fmt.plural(len(fleet.unreadable), 'run')} cannot be read", icon=":material/error:"):
        rows = [
            table.Row([table.text(fmt.shorten(name, 80)), table.text(why)])
            for name, why in sorted(fleet.unreadable.items())
        ]
        table.show("unreadable", (table.Column("run", "long"), table.Column("why", "long")), rows)
