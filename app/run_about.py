"""Start and end of a run: settings, machine, and a failed trainer's last words, as far as they are recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence

import streamlit as st

from rlwatch.compare import Absent, settings
from rlwatch.records import Event, RunInfo
from rlwatch.wording import cell

from . import format as fmt
from . import queries
from .markup import Markup, el, joined

MOST_SETTINGS = 400
LAST_WORDS = ("traceback", "stderr", "console", "message")
"""Entries of an exception that are shown as the console's tail, the fullest first."""


def show_about(run: RunInfo) -> None:
    """Folds: settings, where it ran, the console's tail."""
    values = settings([run.config])
    with st.expander(f"Settings ({len(values)})", key="settings"):
        rows = [(one.name, _written(one.values[0])) for one in values[:MOST_SETTINGS]]
        st.html(
            joined(pairs(rows) if rows else el("div", "None recorded: pass config= to rlwatch.init", cls="rl-quiet"))
        )
        if len(values) > MOST_SETTINGS:
            st.caption(f"and {len(values) - MOST_SETTINGS} more")
    with st.expander("Where it ran", key="where"):
        st.html(joined(pairs(where(run))))
    tail = console_tail(queries.events(run.run_id))
    if tail:
        with st.expander("Last words", key="tail", expanded=True):
            st.code(tail, language=None, wrap_lines=True)


def where(run: RunInfo) -> list[tuple[str, str]]:
    """Machine, process and attempts, as far as they are known."""
    rows = [
        ("host", run.host),
        ("process", "" if run.pid is None else str(run.pid)),
        ("source", run.source),
        ("attempt", str(run.attempt)),
        ("started", time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at)) if run.created_at else ""),
        ("run id", run.run_id),
    ]
    return [(name, value) for name, value in rows if value]


def pairs(rows: Sequence[tuple[str, str]]) -> Markup:
    """Names and values, one under the other."""
    return el("dl", *(part for name, value in rows for part in (el("dt", name), el("dd", value))), cls="rl-pairs")


def console_tail(events: Sequence[Event]) -> str:
    """Last words of the newest failure, or nothing."""
    failed = [event for event in events if event.kind in ("exception", "signal")]
    if not failed:
        return ""
    said = [str(failed[-1].body[name]) for name in LAST_WORDS if failed[-1].body.get(name)]
    return said[0] if said else fmt.evidence_line(failed[-1].body)


def _written(value: object) -> str:
    return fmt.NOTHING if isinstance(value, Absent) else fmt.shorten("null" if value is None else cell(value), 400)
