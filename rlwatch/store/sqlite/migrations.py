"""Numbered schema changes. A file's version is its ``PRAGMA user_version``: how many it has been through."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rlwatch.errors import StoreCorruptError, StoreVersionError


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: its name (for people) and what to do to a connection inside a transaction."""

    name: str
    apply: Callable[[sqlite3.Connection], None]


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, holding the write lock from the start.

    Transactions never nest: one that is open was begun by a Ctrl-C's victim, interrupted before it did anything.
    """
    if db.in_transaction:
        db.execute("ROLLBACK")
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # not committed; after a full disk SQLite may have rolled back by itself
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")


def version_of(db: sqlite3.Connection) -> int:
    """How many migrations the file has been through; 0: none."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection, steps: Sequence[Migration], where: str) -> None:
    """Bring the file to the newest version, one transaction a step. Raises ``StoreVersionError`` if it is newer."""
    refuse_newer(version_of(db), len(steps), where)
    for number, step in enumerate(steps, start=1):
        if version_of(db) >= number:
            continue
        with transaction(db):
            if version_of(db) < number:  # nobody did it while we waited for the lock
                step.apply(db)
                db.execute(f"PRAGMA user_version = {number}")


def check_readable(db: sqlite3.Connection, newest: int, where: str) -> None:
    """Readers read the newest version and the two before: the writer of a live run may be the older program."""
    version = version_of(db)
    refuse_newer(version, newest, where)
    if version == 0:
        raise StoreCorruptError(f"{where} holds no run: it is empty, or not a file of rlwatch")
    if version < newest - 2:
        raise StoreVersionError(
            f"{where} has format {version}; this rlwatch reads {newest - 2} to {newest}: "
            "resume the run once with this version to bring it up to date, or read it with an older rlwatch"
        )


def refuse_newer(version: int, newest: int, where: str) -> None:
    """Raise ``StoreVersionError`` for a file of a version this program does not know."""
    if version > newest:
        raise StoreVersionError(
            f"{where} has format {version}, but this rlwatch knows only up to {newest}: install a newer rlwatch"
        )
