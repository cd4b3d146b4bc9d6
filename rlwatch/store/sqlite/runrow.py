"""Read and write the row that describes a run, its attempts, and how far it was analysed, over a connection to
``run.db``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlwatch import codec
from rlwatch.errors import StoreCorruptError
from rlwatch.ports import Checkpoint
from rlwatch.records import JSON, RunInfo, RunState
from rlwatch.store.fields import RUN, dumps, loads, plain
from rlwatch.store.sqlite.journal import JournalPosition
from rlwatch.store.sqlite.schema import extra_of, merge_extra, transaction

_READ = RUN.select()
_WRITE = RUN.insert("?", "id", doing="INSERT OR REPLACE")
_ONE = 1  # the key of the one run
_NEWEST = "SELECT step, ts, attempt FROM record ORDER BY seq DESC LIMIT 1"


def load(db: sqlite3.Connection, run_id: str) -> RunInfo:
    """Return the run as last written, in constant time however long the run.

    Raises ``StoreCorruptError`` if the file holds no run.
    """
    row = db.execute(_READ).fetchone()
    if row is None:
        raise StoreCorruptError(f"run {run_id!r}: its file holds no run")
    step, ts, _ = db.execute(_NEWEST).fetchone() or (None, None, None)
    return RUN.record(row, extra_of(db, RUN).get(_ONE), run_id=run_id, last_step=step, last_ts=ts)


def create(db: sqlite3.Connection, run: RunInfo, now: float) -> RunInfo:
    """Store a new run with its first attempt, begun at ``now`` (Unix seconds); return the run as stored."""
    with transaction(db):
        return _begin(db, replace(run, created_at=run.created_at or now, attempt=max(1, run.attempt)), run, now)


def resume(db: sqlite3.Connection, run: RunInfo, now: float) -> RunInfo:
    """Begin the run's next attempt at ``now`` (Unix seconds); return the run as stored.

    ``run``: description by the new attempt's process; what it leaves out stays as it was.
    """
    with transaction(db):
        return _begin(db, _resumed(db, load(db, run.run_id), run), run, now)


def last_seq(db: sqlite3.Connection) -> int:
    """Return the highest sequence number given to a record or an event of the run; 0 if it has none yet."""
    rows = db.execute("SELECT max(seq) FROM record UNION ALL SELECT max(seq) FROM event").fetchall()
    return max(seq or 0 for (seq,) in rows)


def first_seq(db: sqlite3.Connection, attempt: int) -> int:
    """Return the lowest sequence number that the attempt may have given to a record or an event."""
    row = db.execute("SELECT first_seq FROM attempt WHERE attempt = ?", (attempt,)).fetchone()
    return int(row[0]) if row is not None else 1


def configs(db: sqlite3.Connection) -> dict[int, Mapping[str, JSON]]:
    """Return attempt -> the configuration that the attempt's process passed to rlwatch, ``{}`` if it passed none."""
    return {attempt: loads(config) for attempt, config in db.execute("SELECT attempt, config FROM attempt")}


def beat(db: sqlite3.Connection, run: RunInfo, now: float, stage: str, since: float | None) -> RunInfo:
    """Store the heartbeat time ``now`` (Unix seconds) of the run's writer; return the run with its current stage.

    ``stage``: what the writer's process does now, and ``since`` when (Unix seconds); stored only if it changed.
    """
    db.execute("UPDATE run SET heartbeat_at = ?", (now,))
    if (stage, since) == (run.stage, run.stage_since):
        return run
    moved = replace(run, stage=stage, stage_since=since)
    with transaction(db):
        merge_extra(db, RUN, {_ONE: moved})
    return moved


def end(db: sqlite3.Connection, state: RunState, reason: str, now: float) -> None:
    """Store the run's final ``state``, the ``reason`` in words, and the time ``now`` (Unix seconds)."""
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
    return resumed(old, new, newest[2] if newest else 0)


def resumed(old: RunInfo, new: RunInfo, last_attempt: int) -> RunInfo:
    """Return the run ``old`` as it is at the start of its next attempt.

    Name, source, configuration and tags are those of ``new`` where given, else as they were. ``last_attempt``: attempt
    of the newest record, which the new attempt's number must exceed.
    """
    begun = replace(
        old,
        attempt=1 + max(old.attempt, last_attempt),
        name=new.name or old.name,
        source=new.source or old.source,
        config=new.config or old.config,
        tags=new.tags or old.tags,
        host=new.host,
        pid=new.pid,
        stage="",
        stage_since=None,
    )
    return codec.enriched(begun, RUN.rest(new))


def _save(db: sqlite3.Connection, run: RunInfo) -> None:
    db.execute(_WRITE, (_ONE, *RUN.row(run)))
    merge_extra(db, RUN, {_ONE: run})


# Progress of a run: which part of its journal is stored, which rows are judged, and the judge's state.

CHECKPOINTS_KEPT = 12
"""Number of checkpoints of the analysis that are kept for a run. They thin out with age, but never to none, because the
next attempt may begin at any step below the last.
"""


def journal_mark(db: sqlite3.Connection, nonce: str) -> JournalPosition:
    """Return which items of the journal named ``nonce`` the database holds; none if it has items of another journal."""
    row = db.execute("SELECT value, body FROM progress WHERE name = 'journal'").fetchone()
    body = loads(row[1]) if row is not None else {}
    if body.get("nonce") != nonce:
        return JournalPosition(nonce)
    return JournalPosition(nonce, row[0], frozenset(body["above"]))


def note_journal(db: sqlite3.Connection, mark: JournalPosition) -> None:
    """Store ``mark``, the position up to which the run's journal is in the database, in the caller's transaction."""
    body = dumps({"nonce": mark.nonce, "above": sorted(mark.above)})
    db.execute("INSERT OR REPLACE INTO progress VALUES ('journal', ?, ?)", (mark.upto, body))


def judged_seq(db: sqlite3.Connection) -> int:
    """Return the sequence number up to which findings, forecasts and alerts are written.

    A file from before this was recorded counts as analysed to its end.
    """
    if not _has_progress(db):
        return last_seq(db)
    row = db.execute("SELECT value FROM progress WHERE name = 'judged'").fetchone()
    return int(row[0]) if row is not None else 0


def note_judged(db: sqlite3.Connection, seq: int) -> None:
    """Store that findings, forecasts and alerts are written up to sequence number ``seq``."""
    db.execute("INSERT OR REPLACE INTO progress VALUES ('judged', ?, '')", (seq,))


def keep_checkpoint(db: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    """Store a checkpoint of the analysis, and remove some older ones: the older they are, the fewer are kept."""
    row = (checkpoint.seq, checkpoint.attempt, checkpoint.step, checkpoint.made_by, checkpoint.body)
    db.execute("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?, ?)", row)
    seqs = [seq for (seq,) in db.execute("SELECT seq FROM checkpoint ORDER BY seq")]
    for seq in outdated(seqs):
        db.execute("DELETE FROM checkpoint WHERE seq = ?", (seq,))


def outdated(seqs: Sequence[int]) -> list[int]:
    """Return those of the ascending ``seqs`` whose checkpoints are removed, so that ``CHECKPOINTS_KEPT`` are left."""
    kept, gone = list(seqs), []
    while len(kept) > CHECKPOINTS_KEPT:  # the one goes that leaves the smallest hole in proportion to its age
        ages = [kept[-1] - seq + 1 for seq in kept]
        inner = range(1, len(kept) - 1)
        goes = min(inner, key=lambda k: ages[k - 1] / ages[k + 1])
        gone.append(kept.pop(goes))
    return gone


def newest_checkpoint(db: sqlite3.Connection, made_by: str, fits: Callable[[int, int, int], bool]) -> Checkpoint | None:
    """Return the newest checkpoint of the analysis for which ``fits(seq, attempt, step)`` is true; None if there is
    none.

    ``made_by``: the program that must have written it, as only that program can read its body.
    """
    if not _has_progress(db):
        return None
    candidates = db.execute("SELECT seq, attempt, step FROM checkpoint WHERE made_by = ? ORDER BY seq DESC", (made_by,))
    seq = next((where[0] for where in candidates.fetchall() if fits(*where)), None)
    row = db.execute("SELECT seq, attempt, step, made_by, body FROM checkpoint WHERE seq = ?", (seq,)).fetchone()
    return Checkpoint(*row) if row is not None else None


def _has_progress(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'progress'").fetchone() is not None
