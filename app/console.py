"""The console of a live run whose trainer writes its output to a file on this machine. The output is not stored.

A store records which process wrote a run, but a user who can write to the store could name any process. So the output
of a process is shown only if it holds the file of this run open, and the dashboard's user owns both.
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
"""File descriptors that are read, and the prefix for lines of the second one if it is another file."""


def show_console(run_id: str) -> None:
    """Draw a fold with the newest lines, if there are any."""
    with layout.readable("This run"):
        run = queries.run(run_id)
        lines = console_tail(run, getattr(queries.store(), "root", None))
        if lines:
            with st.expander("Console", key="console"):
                st.code("\n".join(lines), language=None, wrap_lines=True)


def console_tail(run: RunInfo, root: Path | None) -> list[str]:
    """Return the newest lines that the process of a live run wrote to files, with secrets redacted."""
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
