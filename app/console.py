"""The console of a live run, where its trainer's output goes to a file of this machine: read there, kept nowhere.

A store says who wrote a run, but whoever can write a store could name any process. So output is shown only of one that
holds this very run's file open, and both are of the user whom the dashboard runs as.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import streamlit as st

from rlwatch.importers.lines import open_regular, plain
from rlwatch.records import RunInfo, RunState
from rlwatch.redaction import redacted
from rlwatch.wording import visible

from . import layout, queries

READ_BYTES, MOST_LINES, MOST_LETTERS = 32_768, 40, 400
OUTPUTS = {"1": "", "2": "stderr: "}
"""File descriptors that are looked at, and what is put before the lines of the second where it is another file."""


def show_console(run_id: str) -> None:
    """A fold with the newest lines; nothing where there are none to be had."""
    with layout.readable("This run"):
        run = queries.run(run_id)
        said = console_tail(run, getattr(queries.store(), "root", None))
        if said:
            with st.expander("Console", key="console"):
                st.code("\n".join(said), language=None, wrap_lines=True)


def console_tail(run: RunInfo, root: Path | None) -> list[str]:
    """The newest lines that the process of a live run wrote to files, its secrets blacked out."""
    if root is None or run.state is not RunState.RUNNING or not run.pid or run.host != socket.gethostname():
        return []
    process = Path("/proc", str(run.pid), "fd")
    try:
        if not _writes(process, root / run.run_id / "run.db"):
            return []
        said, seen = [], set()
        for number, before in OUTPUTS.items():
            at = (process / number).stat()
            if stat.S_ISREG(at.st_mode) and (at.st_dev, at.st_ino) not in seen:
                seen.add((at.st_dev, at.st_ino))
                said += [f"{before}{line}" for line in _last_lines(process / number)]
    except OSError:  # it has ended meanwhile, or there is no /proc
        return []
    return said


def _writes(process: Path, file: Path) -> bool:
    """True if the process has the file open, and both are the user's own."""
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
    """As a terminal would show them: of a bar that is drawn again and again its last state, without colours."""
    with open_regular(output) as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, end - READ_BYTES))
        lines = file.read(READ_BYTES).decode("utf-8", "replace").split("\n")
    lines = lines[1:] if start else lines  # the first is cut
    shown = (plain(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in lines)
    return [visible(redacted(line, most=MOST_LETTERS)) for line in shown if line][-MOST_LINES:]
