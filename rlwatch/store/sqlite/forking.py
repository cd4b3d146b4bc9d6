"""Open SQLite connections that are safe with ``fork``: no other thread is inside SQLite when this process forks.

A fork copies SQLite's locks as they are at that moment. A lock that another thread holds, to allocate memory for a row,
is never released in the child. Whatever uses SQLite there, such as a cache in a data loader's worker, would wait for
ever.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 0.25
"""Longest time that a fork waits for threads to leave SQLite, in seconds. A disk that hangs must not block it."""
_LOOK_S = 0.0002


class _Gate:
    """A gate that any number of threads may pass, except while one forks. Each pass costs two entries in a
    dictionary.
    """

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}
        self._forking: dict[int, None] = {}

    def __enter__(self) -> None:
        me = threading.get_ident()
        deep = self._inside.get(me, 0)
        self._inside[me] = deep + 1
        if self._forking and not deep and me not in self._forking:
            del self._inside[me]
            self._wait()
            self._inside[me] = 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        me = threading.get_ident()
        deep = self._inside.get(me, 1)
        if deep > 1:
            self._inside[me] = deep - 1
        else:
            self._inside.pop(me, None)

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self._forking and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Before a fork: keep threads from entering, and wait until those inside have left."""
        me = threading.get_ident()
        self._forking[me] = None
        end = time.monotonic() + PATIENCE_S
        while any(thread != me for thread in list(self._inside)) and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def open(self) -> None:
        """After the fork, in the parent: let threads enter again."""
        self._forking.pop(threading.get_ident(), None)

    def reset(self) -> None:
        """After the fork, in the child, which has one thread: forget the parent's threads."""
        self._inside.clear()
        self._forking.clear()


_gate = _Gate()
os.register_at_fork(before=_gate.close, after_in_parent=_gate.open, after_in_child=_gate.reset)


class Cursor(sqlite3.Cursor):
    """A ``sqlite3.Cursor`` whose calls delay a concurrent ``fork`` until they have returned."""

    def execute(self, *args: Any) -> Self:
        """Run one SQL statement as ``sqlite3.Cursor.execute`` does; the process cannot fork meanwhile."""
        with _gate:
            return super().execute(*args)

    def executemany(self, *args: Any) -> Self:
        """Run one SQL statement for each set of parameters as ``sqlite3`` does, with forks held back meanwhile."""
        with _gate:
            return super().executemany(*args)

    def executescript(self, *args: Any) -> Self:
        """Run several SQL statements as ``sqlite3.Cursor.executescript`` does; the process cannot fork meanwhile."""
        with _gate:
            return super().executescript(*args)  # type: ignore[return-value]

    def fetchone(self) -> Any:
        """Return the next row of the result or None, as ``sqlite3`` does, with forks held back meanwhile."""
        with _gate:
            return super().fetchone()

    def fetchmany(self, *args: Any) -> list[Any]:
        """Return the next rows of the result, as ``sqlite3`` does; the process cannot fork meanwhile."""
        with _gate:
            return super().fetchmany(*args)

    def fetchall(self) -> list[Any]:
        """Return all rows left of the result, as ``sqlite3`` does, with forks held back meanwhile."""
        with _gate:
            return super().fetchall()

    def __next__(self) -> Any:
        with _gate:
            return super().__next__()

    def close(self) -> None:
        """Close the cursor as ``sqlite3`` does, with forks held back meanwhile."""
        with _gate:
            super().close()


class Connection(sqlite3.Connection):
    """A ``sqlite3.Connection`` that, like its cursors, delays a concurrent ``fork`` while a call is inside SQLite."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _gate:
            super().__init__(*args, **kwargs)

    def cursor(self, factory: Any = Cursor) -> Any:
        """Return a cursor of the class ``factory``, by default one whose calls hold forks back."""
        return super().cursor(factory)

    def execute(self, *args: Any) -> Any:  # which by itself makes a plain cursor, as do the next two
        """Run one SQL statement in a new fork-safe cursor, and return the cursor."""
        return self.cursor().execute(*args)

    def executemany(self, *args: Any) -> Any:
        """Run one SQL statement for each set of parameters in a new fork-safe cursor, and return the cursor."""
        return self.cursor().executemany(*args)

    def executescript(self, *args: Any) -> Any:
        """Run several SQL statements in a new fork-safe cursor, and return the cursor."""
        return self.cursor().executescript(*args)

    def commit(self) -> None:
        """Commit the open transaction as ``sqlite3`` does, with forks held back meanwhile."""
        with _gate:
            super().commit()

    def rollback(self) -> None:
        """Roll the open transaction back as ``sqlite3`` does, with forks held back meanwhile."""
        with _gate:
            super().rollback()

    def backup(self, *args: Any, **kwargs: Any) -> None:
        """Copy the database into another connection as ``sqlite3`` does; the process cannot fork meanwhile."""
        with _gate:
            super().backup(*args, **kwargs)

    def close(self) -> None:
        """Close the connection as ``sqlite3`` does, with forks held back meanwhile."""
        with _gate:
            super().close()


def connect(database: str | Path, **options: Any) -> sqlite3.Connection:
    """Return a fork-safe :class:`Connection` to ``database``; ``options`` are those of ``sqlite3.connect``."""
    return sqlite3.connect(database, factory=Connection, **options)
