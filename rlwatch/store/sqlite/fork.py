"""What a forked child must not keep: the writer's lock and its connection."""

from __future__ import annotations

import ctypes
import os
import sqlite3
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """Something that belongs to the process that made it."""

    def disown(self) -> None:
        """Called in a freshly forked child: let go of what is the parent's, without touching files."""
        ...


_alive: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def belongs_here(thing: ForkAware) -> None:
    """Have ``thing.disown()`` called in every child forked from now on."""
    _alive.add(thing)


def keep_forever(db: sqlite3.Connection) -> None:
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
