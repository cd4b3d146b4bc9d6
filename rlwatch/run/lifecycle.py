"""The ends of a process: exit, SIGTERM, fork. A run must survive them all without being asked to."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from typing import Protocol


class Mortal(Protocol):
    """What a process end concerns."""

    def end(self, state: str, reason: str) -> None:
        """Flush and finish within the run's own deadline; idempotent."""
        ...

    def forked(self) -> None:
        """Become inert: this is a forked child, whose parent owns the run."""
        ...


_runs: weakref.WeakSet[Mortal] = weakref.WeakSet()
_installed = False


def watch_over(run: Mortal, *, sigterm: bool = True) -> None:
    """Finish ``run`` at exit and on SIGTERM, and make its copy in a forked child inert.

    A SIGTERM handler is installed only in the main thread and only where nobody else has one.
    """
    _runs.add(run)
    _install()
    untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if sigterm and untouched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    """A script that died of an exception leaves it in ``sys.last_value``."""
    error = getattr(sys, "last_value", None)
    state, reason = ("crashed", f"{type(error).__name__}: {error}") if error else ("finished", "the process exited")
    for run in list(_runs):
        run.end(state, reason)


def _on_sigterm(*_: object) -> None:
    for run in list(_runs):
        run.end("crashed", "killed by SIGTERM")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)  # die as the sender expects, with the right exit status


def _after_fork() -> None:
    for run in list(_runs):
        run.forked()
    _runs.clear()
