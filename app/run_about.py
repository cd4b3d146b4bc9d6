"""Start, output and end of a run, as far as recorded: settings, code, machine, and the last lines of its trainer."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import streamlit as st

from rlwatch.compare import Absent, ConfigOption, config_diff, settings
from rlwatch.importers.lines import open_regular, plain
from rlwatch.records import ORIGIN, Event, RunInfo, RunState
from rlwatch.redaction import redacted
from rlwatch.wording import cell, visible

from . import format as fmt
from . import layout, queries
from .markup import Markup, el, joined

MOST_SETTINGS = 400
LAST_WORDS = ("traceback", "stderr", "console", "message")
"""Entries of an exception event that may hold the last console output, the most detailed first."""


def show_about(run: RunInfo) -> None:
    """Draw folded sections with the run's settings, origin and last output."""
    with st.expander(f"Settings ({len(_settings(run))})", key="settings"):
        st.fragment(show_settings)(run)
    with st.expander("Environment", key="where"):
        st.html(joined(pairs(where(run))))
    tail = console_tail(queries.events(run.run_id))
    if tail:
        with st.expander("Last output", key="tail", expanded=True):
            st.code(tail, language=None, wrap_lines=True)


def show_settings(run: RunInfo) -> None:
    """Draw the settings of a run with a search, and a switch to only those that differ from the last run of its
    project.
    """
    values, before = _settings(run), last_run(run, queries.runs_by_id().values())
    if not values:
        st.html(el("div", "No settings logged: pass config= to rlwatch.init", cls="rl-quiet"))
        return
    differs = {} if before is None else differing(before, run)
    label = "Only what differs from the last run"
    alone = "This is the first run of its project" if before is None else None
    only = st.toggle(f"{label} ({len(differs)})", key="settings-differ", disabled=before is None, help=alone)
    if before is not None:
        st.caption(f"The last run of the project is {fmt.shorten(before.name or before.run_id, 80)}.")
    wanted = st.text_input(
        "Search settings", key="settings-search", placeholder="name or value", label_visibility="collapsed"
    )
    rows = list(differs.items()) if only else [(one.name, _written(one.values[0])) for one in values]
    found = [row for row in rows if (wanted or "").casefold() in " ".join(row).casefold()]
    st.html(joined(pairs(found[:MOST_SETTINGS]) if found else el("div", "None matches.", cls="rl-quiet")))
    if len(found) > MOST_SETTINGS:
        st.caption(f"and {len(found) - MOST_SETTINGS} more: search by name")


def _settings(run: RunInfo) -> list[ConfigOption]:
    return settings([{name: value for name, value in run.config.items() if name != ORIGIN}])


def last_run(run: RunInfo, runs: Iterable[RunInfo]) -> RunInfo | None:
    """Return the last run in ``runs`` that began before ``run`` and belongs to its project; None if there is none."""
    earlier = [
        one
        for one in runs
        if one.project == run.project and one.run_id != run.run_id and one.created_at < run.created_at
    ]
    return max(earlier, key=lambda one: one.created_at, default=None)


def differing(before: RunInfo, run: RunInfo) -> dict[str, str]:
    """Return the settings in which ``run`` differs from the earlier run ``before``, with both values, as ``3e-06, was
    1e-06``.
    """
    configs = [{name: value for name, value in one.config.items() if name != ORIGIN} for one in (before, run)]
    return {one.name: f"{_written(one.values[1])}, was {_written(one.values[0])}" for one in config_diff(configs)}


PLANNED = ("max_steps", "total_training_steps", "total_steps", "num_training_steps", "max_iterations")
"""Last parts of the names of settings that hold the number of steps at which a trainer ends."""


def planned_steps(run: RunInfo) -> int | None:
    """Return the step at which the run is to end according to its settings; None if they do not hold it.

    >>> planned_steps(RunInfo("r", config={"trainer": {"total_training_steps": 500}}))
    500
    """
    for one in _settings(run):
        value = one.values[0]
        known = one.name.rpartition(".")[2] in PLANNED
        if known and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**53:
            return int(value)
    return None


def where(run: RunInfo) -> list[tuple[str, str]]:
    """Return names and values of a run's code, command, packages, machine, process and attempts, as far as recorded."""
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
    """Return names and values as an HTML list."""
    return el("dl", *(part for name, value in rows for part in (el("dt", name), el("dd", value))), cls="rl-pairs")


def console_tail(events: Sequence[Event]) -> str:
    """Return the last output before the newest failure in ``events``, or ""."""
    failed = [event for event in events if event.kind in ("exception", "signal")]
    if not failed:
        return ""
    entries = [str(failed[-1].body[name]) for name in LAST_WORDS if failed[-1].body.get(name)]
    return entries[0] if entries else fmt.evidence_line(failed[-1].body)


def _written(value: object) -> str:
    return fmt.NOTHING if isinstance(value, Absent) else fmt.shorten("null" if value is None else cell(value), 400)


# The console of a live run whose trainer writes its output to a file on this machine. The output is not stored.
#
# A store records which process wrote a run, but a user who can write to the store could name any process. So the output
# of a process is shown only if it holds the file of this run open, and the dashboard's user owns both.

READ_BYTES, MOST_LINES, MOST_LETTERS = 32_768, 40, 400
OUTPUTS = {"1": "", "2": "stderr: "}
"""File descriptors that are read, and the prefix for lines of the second one if it is another file."""


def show_console(run_id: str) -> None:
    """Draw a folded section with the newest output of a live run on this machine, if there is any."""
    with layout.readable("This run"):
        run = queries.run(run_id)
        lines = output_tail(run, getattr(queries.store(), "root", None))
        if lines:
            with st.expander("Console", key="console"):
                st.code("\n".join(lines), language=None, wrap_lines=True)


def output_tail(run: RunInfo, root: Path | None) -> list[str]:
    """Return the newest lines that the process of a live run wrote to files, with secrets redacted.

    ``root``: directory of the store. Empty unless the run is live on this machine.
    """
    if root is None or run.state is not RunState.RUNNING or not run.pid or run.host != socket.gethostname():
        return []
    process = Path("/proc", str(run.pid), "fd")
    try:
        if not _writes(process, root / run.run_id / "run.db"):
            return []
        lines, seen = [], set()
        for number, before in OUTPUTS.items():
            at = (process / number).stat()
            if stat.S_ISREG(at.st_mode) and (at.st_dev, at.st_ino) not in seen:
                seen.add((at.st_dev, at.st_ino))
                lines += [f"{before}{line}" for line in _last_lines(process / number)]
    except OSError:  # the process has ended, or there is no /proc
        return []
    return lines


def _writes(process: Path, file: Path) -> bool:
    """Return True if the process has the file open, and this user owns both."""
    wanted, own = file.stat(), os.geteuid()
    if wanted.st_uid != own or process.stat().st_uid != own:
        return False
    return any(_same(one, wanted) for one in process.iterdir())


def _same(descriptor: Path, wanted: os.stat_result) -> bool:
    try:
        found = descriptor.stat()
    except OSError:  # closed meanwhile
        return False
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def _last_lines(output: Path) -> list[str]:
    """Return the last lines as a terminal shows them: a progress bar in its last state, without colours."""
    with open_regular(output) as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, end - READ_BYTES))
        lines = file.read(READ_BYTES).decode("utf-8", "replace").split("\n")
    lines = lines[1:] if start else lines  # the first is cut
    shown = (plain(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in lines)
    return [visible(redacted(line, most=MOST_LETTERS)) for line in shown if line][-MOST_LINES:]
