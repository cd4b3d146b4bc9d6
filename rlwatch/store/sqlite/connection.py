"""Open SQLite connections to a run's files, for its writer, for readers and for control tables; explain SQLite's
errors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from rlwatch.errors import StoreBusyError, StoreCorruptError, StoreError, StoreFullError
from rlwatch.store.sqlite import schema
from rlwatch.store.sqlite.layout import RunFiles, files_in, is_there, require_plain, size_of, touch_private
from rlwatch.store.sqlite.schema import Migration, check_readable, migrate, version_of

# Open SQLite connections that are safe with ``fork``: no other thread is inside SQLite when this process forks.
#
# A fork copies SQLite's locks as they are at that moment. A lock that another thread holds, to allocate memory for a
# row, is never released in the child. Whatever uses SQLite there, such as a cache in a data loader's worker, would
# wait for ever.

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


# A write SQLite reports as an I/O error is a quota (EDQUOT) or a file size limit (EFBIG) far more often than
# a failing disk: SQLite itself distinguishes only ENOSPC.
_FULL = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_REFUSED = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Convert SQLite's errors, and parse errors of stored values, to ``StoreError``; ``where``: the file, for the
    message.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, where) from error
    except (ValueError, KeyError) as error:
        raise StoreCorruptError(f"{where} is damaged: {error!r}") from error


def explain(error: sqlite3.Error, where: str) -> StoreError:
    """Return the ``StoreError`` (full disk, damage, busy, no access) that describes SQLite's ``error`` in the file
    ``where``.
    """
    extended = getattr(error, "sqlite_errorcode", 0)
    code = extended & 0xFF
    if extended in _FULL or code in _FULL:
        return StoreFullError(f"no room to write {where} ({error}); free disk space or quota: nothing was half-written")
    if code in _DAMAGED or extended == sqlite3.SQLITE_IOERR_SHORT_READ:
        return StoreCorruptError(f"{where} is damaged ({error}); {advice(Path(where))}")
    if code == sqlite3.SQLITE_INTERRUPT:
        return StoreCorruptError(f"{where} is damaged: reading its first row does not end; {advice(Path(where))}")
    if code in _HELD:
        return StoreBusyError(f"{where} is held by another process right now; try again")
    if code in _REFUSED:
        return StoreError(
            f"cannot open {where} for this ({error}); check that it exists and that you may read and write its "
            "directory, or choose another with RLWATCH_STORE or store="
        )
    return StoreError(f"{where}: {error}")


def advice(damaged: Path) -> str:
    """Return advice on a damaged file. It never advises to remove the directory, where a journal may hold rows."""
    if files_in(damaged.parent):
        return f"restore it from a copy, or move {damaged.name} away: what its journal holds is read without it"
    return f"restore it from a copy, or move {damaged.name} out of the store"


@contextmanager
def bounded(db: sqlite3.Connection) -> Iterator[None]:
    """Limit the work of queries that normally take constant time, so that a damaged or hostile file cannot block the
    caller.
    """
    looks = itertools.count()
    db.set_progress_handler(lambda: next(looks) >= _MOST_LOOKS, _LOOK_EVERY)
    try:
        yield
    finally:
        db.set_progress_handler(None, 0)


_LOOK_EVERY, _MOST_LOOKS = 10_000, 100
"""Instructions of SQLite's virtual machine between two checks, and checks until a query is stopped: a million
instructions in all. To read a row by its key takes some dozens.
"""


# Opening the files: the writer's connection, a reader's, and one to the control tables.

Opened = contextlib.AbstractContextManager[sqlite3.Connection]
_OLDEST = (3, 24)  # UPSERT
_READER_WAIT_S = 5.0  # a reader meets a lock only while a run ends or a log is recovered: milliseconds
_NO_SIDE_FILES = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
}


def open_writer(path: Path) -> sqlite3.Connection:
    """Return the one connection that writes the run's ``run.db``; its tables are upgraded to the newest format.

    A commit survives the death of the process and takes 10 µs. Raises ``StoreError`` for a SQLite older than 3.24 and
    for a file that cannot be used.
    """
    if sqlite3.sqlite_version_info < _OLDEST:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old, 3.24 is needed: use a newer Python build")
    with explained(str(path)), contextlib.ExitStack() as undo:
        db = undo.enter_context(contextlib.closing(connected(path, "rw", _READER_WAIT_S, check_same_thread=False)))
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        migrate(db, schema.RUN_TABLES, str(path))
        undo.pop_all()
        return db


@contextlib.contextmanager
def open_reader(files: RunFiles) -> Iterator[sqlite3.Connection]:
    """Give a read-only snapshot of ``run.db``, of a live, crashed or finished run, even in a read-only directory.

    Raises ``StoreError`` if the file is gone, damaged or of an unknown version.
    """
    if not is_there(files.run):
        raise StoreError(
            f"{files.run} is gone; what the journal beside it holds can be read once nobody writes the run any more, "
            "by who may write its directory"
        )
    with explained(str(files.run)), contextlib.ExitStack() as stack:
        try:
            db = stack.enter_context(contextlib.closing(_snapshot(files.run, "mode=ro")))
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF not in _NO_SIDE_FILES:
                raise
            db = stack.enter_context(_without_side_files(files))
        check_readable(db, len(schema.RUN_TABLES), str(files.run))
        yield db


@contextlib.contextmanager
def open_immutable(files: RunFiles) -> Iterator[sqlite3.Connection]:
    """Give a connection to a ``run.db`` that is only ever replaced by rename, never changed in place; takes no lock."""
    with explained(str(files.run)), contextlib.closing(_snapshot(files.run, "immutable=1")) as db:
        check_readable(db, len(schema.RUN_TABLES), str(files.run))
        yield db


def open_control(files: RunFiles, timeout_s: float) -> contextlib.AbstractContextManager[sqlite3.Connection | None]:
    """Give a connection to the run's ``control.db``; None if there is none yet.

    Raises ``StoreBusyError`` if another process holds it for ``timeout_s`` seconds.
    """
    return open_tables(files.control, schema.CONTROL_TABLES, timeout_s)


def create_control(files: RunFiles, timeout_s: float) -> Opened:
    """Give a connection to the run's ``control.db``, which is created if missing.

    Raises ``StoreBusyError`` if another process holds it for ``timeout_s`` seconds.
    """
    return create_tables(files.control, schema.CONTROL_TABLES, timeout_s)


@contextlib.contextmanager
def open_tables(path: Path, tables: Sequence[Migration], timeout_s: float) -> Iterator[sqlite3.Connection | None]:
    """Give a connection to a database file that several processes write; None if the file does not exist yet.

    ``tables``: the migrations that an older file is brought up to date with. Raises ``StoreBusyError`` if another
    process holds the file for ``timeout_s`` seconds.
    """
    if not is_there(path):
        yield None
        return
    with explained(str(path)), contextlib.closing(connected(path, "rw", timeout_s)) as db:
        made = version_of(db) > 0
        if made:
            migrate(db, tables, str(path))
        yield db if made else None


@contextlib.contextmanager
def open_as_it_is(path: Path, timeout_s: float) -> Iterator[sqlite3.Connection]:
    """Give a read-only connection to a database file that several processes write, whatever the version of its
    tables.
    """
    with explained(str(path)), contextlib.closing(connected(path, "ro", timeout_s)) as db:
        yield db


@contextlib.contextmanager
def create_tables(path: Path, tables: Sequence[Migration], timeout_s: float) -> Iterator[sqlite3.Connection]:
    """Give a connection to a database file that several processes write, which is created if missing.

    ``tables``: the migrations that make its tables. Raises ``StoreBusyError`` if another process holds the file for
    ``timeout_s`` seconds.
    """
    touch_private(path)
    with explained(str(path)), contextlib.closing(connected(path, "rw", timeout_s)) as db:
        migrate(db, tables, str(path))
        yield db


def uri(path: Path, options: str) -> str:
    """Return SQLite's URI for the file ``path``, with the query string ``options``; paths may hold any character."""
    return f"file:{quote(str(path))}?{options}"


def connected(
    path: Path, mode: str, timeout_s: float, *, check_same_thread: bool = True, cut_short: bool = False
) -> sqlite3.Connection:
    """Return a connection to a database file, after a check that it is a regular file and holds only plain tables.

    ``mode``: SQLite's ``ro`` or ``rw``. ``timeout_s``: seconds to wait for locks. ``cut_short``: accept a file whose
    end is missing. Raises ``StoreCorruptError`` if a check fails.
    """
    require_plain(path)
    with contextlib.ExitStack() as undo:
        db = connect(
            uri(path, f"mode={mode}"),
            uri=True,
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=check_same_thread,
        )
        undo.enter_context(contextlib.closing(db))
        db.execute("PRAGMA trusted_schema = OFF")  # as below
        if cut_short:  # SQLite's own way to read a file that has fewer pages than its header gives
            db.execute("PRAGMA writable_schema = ON")
        with bounded(db):
            schema.refuse_foreign(db, str(path))
        undo.pop_all()
        return db


def _snapshot(path: Path, options: str) -> sqlite3.Connection:
    require_plain(path)
    with contextlib.ExitStack() as undo:
        db = connect(uri(path, options), uri=True, timeout=_READER_WAIT_S, isolation_level=None)
        undo.enter_context(contextlib.closing(db))
        db.execute("PRAGMA trusted_schema = OFF")  # run directories travel: the file may be a stranger's
        db.execute("BEGIN")
        with bounded(db):
            schema.refuse_foreign(db, str(path))  # reads the first page: the snapshot is taken now
        undo.pop_all()
        return db


@contextlib.contextmanager
def _without_side_files(files: RunFiles) -> Iterator[sqlite3.Connection]:
    """Give a snapshot of a run whose directory cannot take the log's index; no process writes there, or it would
    exist.
    """
    if not size_of(files.wal):
        with contextlib.closing(_snapshot(files.run, "immutable=1")) as db:
            yield db
        return
    with tempfile.TemporaryDirectory(prefix="rlwatch-") as elsewhere:
        copy = RunFiles(Path(elsewhere))
        try:
            shutil.copyfile(files.wal, copy.wal)
            shutil.copyfile(files.run, copy.run)
        except OSError as error:
            raise StoreError(f"cannot read {files.directory} ({error.strerror}); check its permissions") from error
        with contextlib.closing(_snapshot(copy.run, "mode=ro")) as db:
            yield db
