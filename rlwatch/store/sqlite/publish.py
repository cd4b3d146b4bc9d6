"""Whole copies of ``run.db`` between the node's directory and the shared one."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from rlwatch.errors import StoreError
from rlwatch.store.sqlite import runrow
from rlwatch.store.sqlite.connect import Opened, reading, reading_immutable
from rlwatch.store.sqlite.layout import RunFiles, touch_private, writing_to
from rlwatch.store.sqlite.problems import explained


def publish(db: sqlite3.Connection, local: RunFiles, shared: RunFiles) -> None:
    """Put a snapshot of ``db`` into the shared directory. Readers see the old file or the new one, never half."""
    made = local.directory / ".run.db.snapshot"
    touch_private(made)
    with explained(str(made)), closing(sqlite3.connect(made, isolation_level=None)) as copy:
        db.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # the copy says "log" in its header until told otherwise
    put_in_place(made, shared.run)
    made.unlink()


def put_in_place(source: Path, target: Path) -> None:
    """Copy ``source`` to ``target`` by way of a rename, on disk before it shows."""
    arriving = target.with_name(f".{target.name}.{os.getpid()}")
    with writing_to(target):
        try:
            touch_private(arriving)
            shutil.copyfile(source, arriving)
            with arriving.open("rb") as written:
                os.fsync(written.fileno())  # network file systems report a full disk here or at close
            arriving.replace(target)
        except OSError:
            arriving.unlink(missing_ok=True)
            raise


def adopt(shared: RunFiles, local: RunFiles) -> None:
    """Before an attempt begins on this node: take the shared copy if the run went on elsewhere meanwhile."""
    if not shared.run.exists() or _progress(reading_immutable(shared)) <= _progress_here(local):
        return
    for stale in (local.run, local.wal, Path(f"{local.run}-shm")):
        stale.unlink(missing_ok=True)
    put_in_place(shared.run, local.run)


def _progress_here(local: RunFiles) -> tuple[int, int]:
    if not local.run.exists():
        return (0, 0)
    try:
        return _progress(reading(local))
    except StoreError:
        return (0, 0)  # damaged, by a full disk say: the shared copy is what there is


def _progress(opened: Opened) -> tuple[int, int]:
    with opened as db:
        return runrow.load(db, "").attempt, runrow.last_seq(db)
