"""Which process holds a row, told so that another process of the same machine can see whether it still lives."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path


def this_process() -> str:
    """Machine, process id and the moment the process started (ids come round again)."""
    return _named(os.getpid())


@cache
def _named(pid: int) -> str:
    return f"{socket.gethostname()}/{pid}/{_started(pid)}"


def is_gone(owner: str) -> bool:
    """Whether the process is of this machine and has ended; of another machine's nobody here knows."""
    host, _, rest = owner.rpartition("/")[0].rpartition("/")
    started = owner.rpartition("/")[2]
    if host != socket.gethostname() or not rest.isdecimal():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return started != _started(int(rest))


def _started(pid: int) -> str:
    """In clock ticks since the machine started; empty where there is no ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
