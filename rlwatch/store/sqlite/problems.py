"""SQLite's error codes as our errors, each with the path and what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from rlwatch.errors import StoreBusyError, StoreCorruptError, StoreError, StoreFullError

# A write SQLite reports as an I/O error is a quota (EDQUOT) or a file size limit (EFBIG) far more often than
# a failing disk: SQLite itself tells only ENOSPC apart.
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
    """Turn SQLite's errors, and stored values that no longer parse, into ours; ``where`` is the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, where) from error
    except (ValueError, KeyError) as error:
        raise StoreCorruptError(f"{where} is damaged: {error!r}") from error


def explain(error: sqlite3.Error, where: str) -> StoreError:
    """The error of ours that says what happened to ``where``."""
    extended = getattr(error, "sqlite_errorcode", 0)
    code = extended & 0xFF
    if extended in _FULL or code in _FULL:
        return StoreFullError(f"no room to write {where} ({error}); free disk space or quota: nothing was half-written")
    if code in _DAMAGED or extended == sqlite3.SQLITE_IOERR_SHORT_READ:
        return StoreCorruptError(f"{where} is damaged ({error}); restore it from a copy or remove the run's directory")
    if code in _HELD:
        return StoreBusyError(f"{where} is held by another process right now; try again")
    if code in _REFUSED:
        return StoreError(
            f"cannot open {where} for this ({error}); check that it exists and that you may read and write its "
            "directory, or choose another with RLWATCH_STORE or store="
        )
    return StoreError(f"{where}: {error}")
