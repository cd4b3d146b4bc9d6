"""Start and end of a run, as far as recorded: settings, code, machine, and the last output of a failed trainer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import streamlit as st

from rlwatch.compare import Absent, settings
from rlwatch.records import ORIGIN, Event, RunInfo
from rlwatch.wording import cell

from . import format as fmt
from . import queries
from .markup import Markup, el, joined

MOST_SETTINGS = 400
LAST_WORDS = ("traceback", "stderr", "console", "message")
"""Entries of an exception event that may hold the console's tail, the most detailed first."""


def show_about(run: RunInfo) -> None:
    """Draw folds with the settings, the origin and the console's tail."""
    values = settings([{name: value for name, value in run.config.items() if name != ORIGIN}])
    with st.expander(f"Settings ({len(values)})", key="settings"):
        rows = [(one.name, _written(one.values[0])) for one in values[:MOST_SETTINGS]]
        st.html(
            joined(
                pairs(rows) if rows else el("div", "No settings logged: pass config= to rlwatch.init", cls="rl-quiet")
            )
        )
        if len(values) > MOST_SETTINGS:
            st.caption(f"and {len(values) - MOST_SETTINGS} more")
    with st.expander("Environment", key="where"):
        st.html(joined(pairs(where(run))))
    tail = console_tail(queries.events(run.run_id))
    if tail:
        with st.expander("Last output", key="tail", expanded=True):
            st.code(tail, language=None, wrap_lines=True)


def where(run: RunInfo) -> list[tuple[str, str]]:
    """Return code, command, packages, machine, process and attempts, as far as recorded."""
    recorded = run.config.get(ORIGIN)
    origin = recorded if isinstance(recorded, Mapping) else {}
    rows = [
        ("code", _code(origin.get("git"))),
        ("command", str(origin.get("command", ""))),
        ("directory", str(origin.get("directory", ""))),
        ("python", str(origin.get("python", ""))),
        ("packages", _listed(origin.get("packages"))),
        ("GPUs", str(origin.get("gpus", ""))),
        ("environment", _listed(origin.get("environment"))),
        ("system", " · ".join(filter(None, (str(origin.get("system", "")), _cpus(origin.get("cpus")))))),
        ("host", run.host),
        ("process", "" if run.pid is None else str(run.pid)),
        ("source", run.source),
        ("attempt", str(run.attempt)),
        ("started", time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at)) if run.created_at else ""),
        ("run id", run.run_id),
    ]
    return [(name, value) for name, value in rows if value]


def _code(git: object) -> str:
    if not isinstance(git, Mapping) or "commit" not in git:
        return ""
    branch = f" on {git['branch']}" if git.get("branch") else ""
    changed = str(git.get("changed_files", ""))
    files = f", {fmt.plural(int(changed), 'file')} changed since" if changed.isdecimal() and changed != "0" else ""
    return f"git commit {git['commit']}{branch}{files}"


def _listed(values: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if isinstance(values, Mapping) else ""


def _cpus(count: object) -> str:
    return f"{count} CPUs" if count else ""


def pairs(rows: Sequence[tuple[str, str]]) -> Markup:
    """Return a list of names and values."""
    return el("dl", *(part for name, value in rows for part in (el("dt", name), el("dd", value))), cls="rl-pairs")


def console_tail(events: Sequence[Event]) -> str:
    """Return the last output before the newest failure, or an empty string."""
    failed = [event for event in events if event.kind in ("exception", "signal")]
    if not failed:
        return ""
    entries = [str(failed[-1].body[name]) for name in LAST_WORDS if failed[-1].body.get(name)]
    return entries[0] if entries else fmt.evidence_line(failed[-1].body)


def _written(value: object) -> str:
    return fmt.NOTHING if isinstance(value, Absent) else fmt.shorten("null" if value is None else cell(value), 400)
