"""The run's own row and its attempts, over an open connection to ``run.db``."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

from rlwatch.errors import StoreCorruptError
from rlwatch.records import RunInfo, RunState
from rlwatch.store.sqlite.codec import dumps, loads, plain
from rlwatch.store.sqlite.migrations import transaction

_READ = """SELECT project, name, source, created_at, config, tags, attempt, state, state_reason, heartbeat_at, host, pid
           FROM run"""
_WRITE = """INSERT OR REPLACE INTO run (id, project, name, source, created_at, config, tags, attempt, state,
            state_reason, heartbeat_at, host, pid) VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_NEWEST = "SELECT step, ts, attempt FROM record ORDER BY seq DESC LIMIT 1"


def load(db: sqlite3.Connection, run_id: str) -> RunInfo:
    """The run as last written. Constant time, however long the run."""
    row = db.execute(_READ).fetchone()
    if row is None:
        raise StoreCorruptError(f"run {run_id!r}: its file holds no run")
    project, name, source, created_at, config, tags, attempt, state, reason, heartbeat_at, host, pid = row
    step, ts, _ = db.execute(_NEWEST).fetchone() or (None, None, None)
    return RunInfo(
        run_id=run_id,
        project=project,
        name=name,
        source=source,
        created_at=created_at,
        config=loads(config),
        tags=tuple(loads(tags)),
        attempt=attempt,
        state=RunState(state),
        state_reason=reason,
        heartbeat_at=heartbeat_at,
        last_step=step,
        last_ts=ts,
        host=host,
        pid=pid,
    )


def create(db: sqlite3.Connection, run: RunInfo, now: float) -> RunInfo:
    """Begin the first attempt; returns the run as it now stands."""
    with transaction(db):
        return _begin(db, replace(run, created_at=run.created_at or now, attempt=max(1, run.attempt)), run, now)


def resume(db: sqlite3.Connection, run: RunInfo, now: float) -> RunInfo:
    """Begin the next attempt; returns the run as it now stands."""
    with transaction(db):
        return _begin(db, _resumed(db, load(db, run.run_id), run), run, now)


def last_seq(db: sqlite3.Connection) -> int:
    """The highest number given to a record or an event; 0: none yet."""
    rows = db.execute("SELECT max(seq) FROM record UNION ALL SELECT max(seq) FROM event").fetchall()
    return max(seq or 0 for (seq,) in rows)


def first_seq(db: sqlite3.Connection, attempt: int) -> int:
    """The first number that ``attempt`` may have given."""
    row = db.execute("SELECT first_seq FROM attempt WHERE attempt = ?", (attempt,)).fetchone()
    return int(row[0]) if row is not None else 1


def beat(db: sqlite3.Connection, now: float) -> None:
    """Note that the writer lives."""
    db.execute("UPDATE run SET heartbeat_at = ?", (now,))


def end(db: sqlite3.Connection, state: RunState, reason: str, now: float) -> None:
    """Note how the run ended."""
    with transaction(db):
        db.execute("UPDATE run SET state = ?, state_reason = ?, heartbeat_at = ?", (state.value, plain(reason), now))


def _begin(db: sqlite3.Connection, run: RunInfo, given: RunInfo, now: float) -> RunInfo:
    _save(db, replace(run, state=RunState.RUNNING, state_reason="", heartbeat_at=now))
    db.execute(
        "INSERT INTO attempt (attempt, started_at, first_seq, host, pid, config) VALUES (?, ?, ?, ?, ?, ?)",
        (run.attempt, now, last_seq(db) + 1, plain(given.host), given.pid, dumps(given.config)),
    )
    return load(db, run.run_id)


def _resumed(db: sqlite3.Connection, old: RunInfo, new: RunInfo) -> RunInfo:
    newest = db.execute(_NEWEST).fetchone()
    return replace(
        old,
        attempt=1 + max(old.attempt, newest[2] if newest else 0),
        name=new.name or old.name,
        source=new.source or old.source,
        config=new.config or old.config,
        tags=new.tags or old.tags,
        host=new.host,
        pid=new.pid,
    )


def _save(db: sqlite3.Connection, run: RunInfo) -> None:
    db.execute(
        _WRITE,
        (
            plain(run.project),
            plain(run.name),
            plain(run.source),
            run.created_at,
            dumps(run.config),
            dumps(list(run.tags)),
            run.attempt,
            run.state.value,
            plain(run.state_reason),
            run.heartbeat_at,
            plain(run.host),
            run.pid,
        ),
    )
