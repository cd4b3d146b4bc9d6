"""The ends of a process: exit, SIGTERM, fork. A run must survive them all without being asked to."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

from rlwatch.seam import described

END_S = 5.0
"""Longest one run takes to end with its process, in seconds."""
ALL_S = 9.0
"""Longest all runs of a process take."""
SIGNAL_S = 12.0
"""So many seconds after a SIGTERM it is passed on whatever the main thread does: it may be inside a call that hangs."""


class Mortal(Protocol):
    """What a process end concerns."""

    def end(self, state: str, reason: str, deadline_s: float = END_S) -> None:
        """Flush and finish within ``deadline_s`` seconds; idempotent."""
        ...

    def forked(self) -> None:
        """Become inert: this is a forked child, whose parent owns the run."""
        ...


_runs: weakref.WeakSet[Mortal] = weakref.WeakSet()
_installed = False


def watch_over(run: Mortal, *, sigterm: bool = True) -> None:
    """Finish ``run`` at exit and on SIGTERM, and make its copy in a forked child inert.

    A SIGTERM handler is installed only in the main thread and only where nobody else has one. It never raises into what
    it interrupts, and the signal is passed on when the runs have ended, after :data:`SIGNAL_S` seconds at the latest.
    """
    _runs.add(run)
    _install()
    untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if sigterm and untouched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
        _insist()


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    """A script that died of an exception leaves it in ``sys.last_value``."""
    error = getattr(sys, "last_value", None)
    if error is None:
        _end_all("finished", "the process exited")
    else:
        _end_all("crashed", described(error))


def _end_all(state: str, reason: str) -> None:
    until = time.monotonic() + ALL_S
    for run in list(_runs):
        with suppress(Exception):
            run.end(state, reason, min(END_S, max(0.5, until - time.monotonic())))


def _on_sigterm(*_: object) -> None:
    try:
        _end_all("crashed", "killed by SIGTERM")
    finally:  # die as the sender expects, with the right exit status, whatever was raised (a Ctrl-C, say)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _insist() -> None:
    """Pass SIGTERM on in time even if the main thread never comes to run the handler.

    Python runs handlers between two instructions of the main thread; one that waits inside a collective or a kernel has
    none, and the default action, which would have ended it at once, is gone. The interpreter writes each signal's
    number to the wake-up descriptor at the moment it arrives. Nothing is done where somebody else uses that, nor where
    the program took SIGTERM over meanwhile, to save and go on perhaps: it is theirs then.
    """
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(read, True)
    taken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)
        os.close(read)
        os.close(write)
        return
    threading.Thread(target=_wait_for_sigterm, args=(read, os.getpid()), name="rlwatch-sigterm", daemon=True).start()


def _wait_for_sigterm(read: int, pid: int) -> None:
    while True:
        if signal.SIGTERM in os.read(read, 64) and _is_ours():
            time.sleep(SIGNAL_S)
            if _is_ours():
                break
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL; Python allows its own call in the main thread only
    os.kill(pid, signal.SIGTERM)


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is _on_sigterm


def _after_fork() -> None:
    for run in list(_runs):
        run.forked()
    _runs.clear()
