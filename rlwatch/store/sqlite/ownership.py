"""Own a run: one writer at a time, nothing left to a forked child, and leases that die with their process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import weakref
from functools import cache
from pathlib import Path
from typing import Protocol

from rlwatch.errors import RunLockedError
from rlwatch.store.sqlite.layout import writing_to


class ForkAware(Protocol):
    """Something that belongs to the process that made it."""

    def disown(self) -> None:
        """Called in a freshly forked child: let go of what is the parent's, without touching files."""
        ...


_alive: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def belongs_here(thing: ForkAware) -> None:
    """Have ``thing.disown()`` called in every child forked from now on."""
    _alive.add(thing)


def keep_forever(db: object) -> None:
    """Never close ``db``, not even when the interpreter ends.

    Closing an inherited connection rolls back what the parent is in the middle of writing, in the log's index
    that both share in memory: the parent's file is damaged from then on.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


def _in_child() -> None:
    for thing in list(_alive):
        thing.disown()
    _alive.clear()


os.register_at_fork(after_in_child=_in_child)


# One writer per run: ``flock`` on ``run.lock``, which dies with the process that holds it.

_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class RunLock:
    """The lock, taken. Raises ``RunLockedError``, which names the holder, if it is held already.

    ``flock`` belongs to the opened file, not to the process: a second open in this very process is refused
    too. ``optional``: file systems that cannot lock at all (some network ones) are let through. ``amending``: the
    lock is held only briefly, and its file notes that.
    """

    def __init__(self, path: Path, *, optional: bool = False, amending: bool = False) -> None:
        self._amending = amending
        with writing_to(path):
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        belongs_here(self)
        with contextlib.ExitStack() as undo:
            undo.callback(self.release)
            self._take(self._fd, path, optional=optional)
            undo.pop_all()

    def release(self) -> None:
        """Let go; idempotent. A child forked a moment ago may still have a copy: closing ours would not do."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a file system that cannot lock has nothing to let go
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.disown()

    def disown(self) -> None:
        """In a forked child: close our copy, so that the lock dies with the parent."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _take(self, fd: int, path: Path, *, optional: bool) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder, amending = _holder(fd)
            error = RunLockedError(
                f"run {path.parent.name!r} is already being written by {holder}; "
                "wait for it to end, stop it, or give this run another run_id"
            )
            error.amending = amending
            raise error from None
        except OSError as error:
            if not (optional and error.errno in _UNSUPPORTED):
                with writing_to(path):
                    raise
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "amending": self._amending}
        note = json.dumps(owner).encode()
        with writing_to(path):
            os.truncate(fd, 0)
            os.pwrite(fd, note, 0)


def _holder(fd: int) -> tuple[str, bool]:
    """Return the holder in words, and True if it holds the lock only briefly."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        note = json.loads(os.pread(fd, 4096, 0))
        return f"process {note['pid']} on {note['host']}", bool(note.get("amending"))
    return "another process", False


# The process that holds a row, written so that another process of the same machine can check whether it still lives.


def this_process() -> str:
    """Machine, process id and the moment the process started (ids come round again)."""
    return _process_name(os.getpid())


@cache
def _process_name(pid: int) -> str:
    return f"{socket.gethostname()}/{pid}/{_started_at(pid)}"


def is_gone(owner: str) -> bool:
    """Return True if the process is of this machine and has ended; for another machine's process always False."""
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
    return started != _started_at(int(rest))


def _started_at(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if there is no ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
