"""How far a run has come: what of its journal is stored, what of it is judged, and what the judge knew."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from rlwatch.ports import Checkpoint
from rlwatch.store.sqlite import runrow
from rlwatch.store.sqlite.codec import dumps, loads
from rlwatch.store.sqlite.journal import Mark

KEPT = 12
"""Checkpoints of a run. They thin out with age: the next attempt may begin anywhere below the last step."""


def journal_mark(db: sqlite3.Connection, nonce: str) -> Mark:
    """What is stored of the journal of this name."""
    row = db.execute("SELECT value, body FROM progress WHERE name = 'journal'").fetchone()
    body = loads(row[1]) if row is not None else {}
    if body.get("nonce") != nonce:
        return Mark(nonce)
    return Mark(nonce, row[0], frozenset(body["above"]))


def note(db: sqlite3.Connection, mark: Mark) -> None:
    """Keep ``mark``."""
    body = dumps({"nonce": mark.nonce, "above": sorted(mark.above)})
    db.execute("INSERT OR REPLACE INTO progress VALUES ('journal', ?, ?)", (mark.upto, body))


def judged(db: sqlite3.Connection) -> int:
    """Up to which ``seq`` the run is judged; of a file from before this was noted, all of it."""
    if not _is_here(db):
        return runrow.last_seq(db)
    row = db.execute("SELECT value FROM progress WHERE name = 'judged'").fetchone()
    return int(row[0]) if row is not None else 0


def judge(db: sqlite3.Connection, seq: int) -> None:
    """Note that the run is judged up to ``seq``."""
    db.execute("INSERT OR REPLACE INTO progress VALUES ('judged', ?, '')", (seq,))


def keep(db: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    """Add a checkpoint; of the older ones some go, the younger the more are kept."""
    row = (checkpoint.seq, checkpoint.attempt, checkpoint.step, checkpoint.made_by, checkpoint.body)
    db.execute("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?, ?)", row)
    seqs = [seq for (seq,) in db.execute("SELECT seq FROM checkpoint ORDER BY seq")]
    while len(seqs) > KEPT:  # the one goes that leaves the smallest hole in proportion to its age
        ages = [seqs[-1] - seq + 1 for seq in seqs]
        inner = range(1, len(seqs) - 1)
        goes = min(inner, key=lambda k: (ages[k - 1] - ages[k + 1]) / ages[k + 1])
        db.execute("DELETE FROM checkpoint WHERE seq = ?", (seqs.pop(goes),))


def newest(db: sqlite3.Connection, made_by: str, fits: Callable[[int, int, int], bool]) -> Checkpoint | None:
    """The newest checkpoint of which ``fits(seq, attempt, step)``; None if there is none."""
    if not _is_here(db):
        return None
    found = db.execute("SELECT seq, attempt, step FROM checkpoint WHERE made_by = ? ORDER BY seq DESC", (made_by,))
    seq = next((where[0] for where in found.fetchall() if fits(*where)), None)
    row = db.execute("SELECT seq, attempt, step, made_by, body FROM checkpoint WHERE seq = ?", (seq,)).fetchone()
    return Checkpoint(*row) if row is not None else None


def _is_here(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'progress'").fetchone() is not None
