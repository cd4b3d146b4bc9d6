"""Own a run: one writer at a time, no shared state in forked children, and leases that end with their process."""

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
    """An object that belongs to the process that made it, such as a lock or a database connection."""

    def disown(self) -> None:
        """Drop the resources of the parent process, without touching files. Called in a freshly forked child."""
        ...


_alive: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def belongs_here(thing: ForkAware) -> None:
    """Have ``thing.disown()`` called in every child that this process forks from now on."""
    _alive.add(thing)


def keep_forever(db: object) -> None:
    """Keep the database connection ``db`` from ever being closed, even when the interpreter ends.

    In a forked child, closing an inherited connection rolls back the transaction that the parent is writing, in the
    log's index that both share in memory. That would damage the parent's file.
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
    """The lock of a run, which its one writer holds from construction to :meth:`release`.

    ``path``: the lock file. ``optional``: succeed on file systems that cannot lock at all (some network ones).
    ``amending``: the lock is held only briefly, and its file notes that.

    ``flock`` belongs to the opened file, not to the process: a second lock in the same process is refused, too. Raises
    ``RunLockedError``, which names the holder, if the lock is taken.
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
        """Release the lock; idempotent. A forked child may hold a copy of the file, so that closing ours would not
        release it.
        """
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a file system that cannot lock has nothing to let go
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.disown()

    def disown(self) -> None:
        """Close this forked child's copy of the lock file, so that the lock ends with the parent."""
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
    """Return a description of the lock's holder, and True if it holds the lock only briefly."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        note = json.loads(os.pread(fd, 4096, 0))
        return f"process {note['pid']} on {note['host']}", bool(note.get("amending"))
    return "another process", False


# The process that holds a row, written so that another process of the same machine can check whether it still lives.


def this_process() -> str:
    """Return a name of this process that is unique over time: host, process id, and start time, as ids are reused."""
    return _process_name(os.getpid())


@cache
def _process_name(pid: int) -> str:
    return f"{socket.gethostname()}/{pid}/{_started_at(pid)}"


def is_gone(owner: str) -> bool:
    """Return True if the process named ``owner`` (see :func:`this_process`) ran on this machine and has ended.

    Always False for a process of another machine, which cannot be checked.
    """
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
