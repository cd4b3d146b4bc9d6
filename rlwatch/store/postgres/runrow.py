"""Read and write the row that describes a run, its attempts, and how far its journals are stored and it was
analysed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlwatch.ports import Checkpoint
from rlwatch.records import JSON, RunInfo, RunState
from rlwatch.store.fields import RUN, dumps, loads
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.postgres.rows import plain
from rlwatch.store.sqlite.journal import JournalPosition
from rlwatch.store.sqlite.runrow import outdated, resumed

_FIRST = ("run_id", "last_step", "last_ts", "extra")
_COLUMNS = ", ".join((*_FIRST, *RUN.columns))


def all_runs(db: Connection) -> list[RunInfo]:
    """Return all runs, newest first, by one query."""
    return [_run(row) for row in db.execute(f"SELECT {_COLUMNS} FROM run ORDER BY created_at DESC, run_id DESC")]


def load(db: Connection, run_id: str) -> RunInfo | None:
    """Return the run as last written; None if there is no run of that id."""
    row = db.execute(f"SELECT {_COLUMNS} FROM run WHERE run_id = %s", (run_id,)).fetchone()
    return None if row is None else _run(row)


def begin(db: Connection, run: RunInfo, now: float, writer: str) -> RunInfo:
    """Create the run, or begin its next attempt, at ``now`` (Unix seconds), in the caller's transaction.

    ``writer``: name of the process that writes the attempt. Returns the run as stored.
    """
    old = db.execute(
        f"SELECT last_attempt, last_seq, {_COLUMNS} FROM run WHERE run_id = %s FOR UPDATE", (run.run_id,)
    ).fetchone()
    if old is None:
        begun, last = replace(run, created_at=run.created_at or now, attempt=max(1, run.attempt)), 0
    else:
        begun, last = resumed(_run(old[2:]), run, old[0]), old[1]
    begun = replace(begun, state=RunState.RUNNING, state_reason="", heartbeat_at=now)
    _save(db, begun, writer)
    db.execute(
        "INSERT INTO attempt (run_id, attempt, started_at, first_seq, host, pid, config) "
        "VALUES (%s, %s, %s, %s, %s, %s, %s)",
        (run.run_id, begun.attempt, now, last + 1, plain(run.host), run.pid, dumps(run.config)),
    )
    stored = load(db, run.run_id)
    return begun if stored is None else stored


def _save(db: Connection, run: RunInfo, writer: str) -> None:
    statement = RUN.upsert("%s", "run_id", "writer", "extra", key="run_id", kept=("project", "created_at"))
    again = "writer = excluded.writer, extra = excluded.extra, writes = 0"
    values = (run.run_id, writer, plain(RUN.rest_text(run)), *RUN.row(run, plain))
    db.execute(f"{statement}, {again}".encode(), values)


def _run(row: Row) -> RunInfo:
    run_id, step, ts, extra, *columns = row
    return RUN.record(columns, extra, run_id=run_id, last_step=step, last_ts=ts)


def first_seq(db: Connection, run_id: str, attempt: int) -> int:
    """Return the lowest sequence number that the attempt may have given to a record or an event."""
    row = db.execute("SELECT first_seq FROM attempt WHERE run_id = %s AND attempt = %s", (run_id, attempt)).fetchone()
    return int(row[0]) if row is not None else 1


def configs(db: Connection, run_id: str) -> dict[int, Mapping[str, JSON]]:
    """Return attempt -> the configuration that the attempt's process passed to rlwatch."""
    rows = db.execute("SELECT attempt, config FROM attempt WHERE run_id = %s ORDER BY attempt", (run_id,))
    return {attempt: loads(config) for attempt, config in rows}


def judged(db: Connection, run_id: str) -> tuple[int, int]:
    """Return the sequence number up to which findings, forecasts and alerts are written, and the run's last one."""
    row = db.execute("SELECT judged_seq, last_seq FROM run WHERE run_id = %s", (run_id,)).fetchone()
    return (0, 0) if row is None else (row[0], row[1])


def note_rows(db: Connection, run_id: str, last_seq: int, newest: Row | None) -> None:
    """Store the last sequence number that was given, and step, Unix time and attempt of the ``newest`` record, if
    any.
    """
    step, ts, attempt = newest or (None, None, None)
    db.execute(
        "UPDATE run SET last_seq = %s, last_step = coalesce(%s, last_step), last_attempt = coalesce(%s, last_attempt), "
        "last_ts = CASE WHEN %s THEN %s ELSE last_ts END WHERE run_id = %s",
        (last_seq, step, attempt, step is not None, number(ts), run_id),
    )


def number(ts: float | None) -> float | None:
    """Return the time ``ts`` (Unix seconds) as the database holds it: None for NaN, which is an unknown time."""
    return None if ts is None or math.isnan(ts) else ts


def journal_mark(db: Connection, run_id: str, nonce: str) -> JournalPosition:
    """Return which items of the journal named ``nonce`` are stored on the server."""
    row = db.execute("SELECT upto, above FROM journal WHERE run_id = %s AND nonce = %s", (run_id, nonce)).fetchone()
    return JournalPosition(nonce) if row is None else JournalPosition(nonce, row[0], frozenset(loads(row[1])))


def note_journal(db: Connection, run_id: str, mark: JournalPosition) -> None:
    """Store ``mark``, the position up to which a journal is on the server, in the caller's transaction."""
    db.execute(
        "INSERT INTO journal (run_id, nonce, upto, above) VALUES (%s, %s, %s, %s) "
        "ON CONFLICT (run_id, nonce) DO UPDATE SET upto = excluded.upto, above = excluded.above",
        (run_id, mark.nonce, mark.upto, dumps(sorted(mark.above))),
    )


def keep_checkpoint(db: Connection, run_id: str, checkpoint: Checkpoint) -> None:
    """Store a checkpoint of the analysis, and remove some older ones: the older they are, the fewer are kept."""
    c = checkpoint
    db.execute(
        "INSERT INTO checkpoint (run_id, seq, attempt, step, made_by, body) VALUES (%s, %s, %s, %s, %s, %s) "
        "ON CONFLICT (run_id, seq) DO UPDATE SET attempt = excluded.attempt, step = excluded.step, "
        "made_by = excluded.made_by, body = excluded.body",
        (run_id, c.seq, c.attempt, c.step, c.made_by, c.body),
    )
    seqs = [seq for (seq,) in db.execute("SELECT seq FROM checkpoint WHERE run_id = %s ORDER BY seq", (run_id,))]
    gone = outdated(seqs)
    if gone:
        db.execute("DELETE FROM checkpoint WHERE run_id = %s AND seq = ANY(%s)", (run_id, gone))


def newest_checkpoint(
    db: Connection, run_id: str, made_by: str, fits: Callable[[int, int, int], bool]
) -> Checkpoint | None:
    """Return the newest checkpoint of the analysis for which ``fits(seq, attempt, step)`` is true; None if there is
    none.

    ``made_by``: the program that must have written it, as only that program can read its body.
    """
    candidates = db.execute(
        "SELECT seq, attempt, step FROM checkpoint WHERE run_id = %s AND made_by = %s ORDER BY seq DESC",
        (run_id, made_by),
    ).fetchall()
    seq = next((where[0] for where in candidates if fits(*where)), None)
    row = db.execute(
        "SELECT seq, attempt, step, made_by, body FROM checkpoint WHERE run_id = %s AND seq = %s", (run_id, seq)
    ).fetchone()
    return None if row is None else Checkpoint(*row)
