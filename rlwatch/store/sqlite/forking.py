"""Connections that no other thread is inside of while this process forks.

A fork copies the locks of SQLite as they are at that moment. One that another thread holds, to take memory for a row,
is never given back in the child. Whatever uses SQLite there waits for ever, such as a cache in a data loader's worker.
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
"""Longest a fork waits for a thread to come out of SQLite, in seconds. A disk that hangs must not hold it up."""
_LOOK_S = 0.0002


class _Gate:
    """Open to every thread at once, but while one forks. A thread pays for two entries in a dictionary."""

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
        """Before a fork: wait until all threads inside have left, and let none enter."""
        me = threading.get_ident()
        self._forking[me] = None
        end = time.monotonic() + PATIENCE_S
        while any(thread != me for thread in list(self._inside)) and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def open(self) -> None:
        """Called after it, in the parent."""
        self._forking.pop(threading.get_ident(), None)

    def reset(self) -> None:
        """Called in the child, which has one thread."""
        self._inside.clear()
        self._forking.clear()


_gate = _Gate()
os.register_at_fork(before=_gate.close, after_in_parent=_gate.open, after_in_child=_gate.reset)


class Cursor(sqlite3.Cursor):
    """A cursor that keeps a fork waiting while it is inside SQLite."""

    def execute(self, *args: Any) -> Self:
        """See ``sqlite3``."""
        with _gate:
            return super().execute(*args)

    def executemany(self, *args: Any) -> Self:
        """See ``sqlite3``."""
        with _gate:
            return super().executemany(*args)

    def executescript(self, *args: Any) -> Self:
        """See ``sqlite3``."""
        with _gate:
            return super().executescript(*args)  # type: ignore[return-value]

    def fetchone(self) -> Any:
        """See ``sqlite3``."""
        with _gate:
            return super().fetchone()

    def fetchmany(self, *args: Any) -> list[Any]:
        """See ``sqlite3``."""
        with _gate:
            return super().fetchmany(*args)

    def fetchall(self) -> list[Any]:
        """See ``sqlite3``."""
        with _gate:
            return super().fetchall()

    def __next__(self) -> Any:
        with _gate:
            return super().__next__()

    def close(self) -> None:
        """See ``sqlite3``."""
        with _gate:
            super().close()


class Connection(sqlite3.Connection):
    """A connection whose cursors keep a fork waiting while they are inside SQLite."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _gate:
            super().__init__(*args, **kwargs)

    def cursor(self, factory: Any = Cursor) -> Any:
        """See ``sqlite3``."""
        return super().cursor(factory)

    def execute(self, *args: Any) -> Any:  # which by itself makes a plain cursor, as do the next two
        """See ``sqlite3``."""
        return self.cursor().execute(*args)

    def executemany(self, *args: Any) -> Any:
        """See ``sqlite3``."""
        return self.cursor().executemany(*args)

    def executescript(self, *args: Any) -> Any:
        """See ``sqlite3``."""
        return self.cursor().executescript(*args)

    def commit(self) -> None:
        """See ``sqlite3``."""
        with _gate:
            super().commit()

    def rollback(self) -> None:
        """See ``sqlite3``."""
        with _gate:
            super().rollback()

    def backup(self, *args: Any, **kwargs: Any) -> None:
        """See ``sqlite3``."""
        with _gate:
            super().backup(*args, **kwargs)

    def close(self) -> None:
        """See ``sqlite3``."""
        with _gate:
            super().close()


def connect(database: str | Path, **options: Any) -> sqlite3.Connection:
    """Return ``sqlite3.connect(database, **options)``, of the kind above."""
    return sqlite3.connect(database, factory=Connection, **options)
