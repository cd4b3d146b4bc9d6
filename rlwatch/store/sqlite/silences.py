"""Silences as rows, over an open connection to the store's ``alerts.db``."""

from __future__ import annotations

import sqlite3

from rlwatch.records import Silence
from rlwatch.store.sqlite.codec import dumps, loads, plain
from rlwatch.store.sqlite.migrations import transaction

_PUT = """INSERT INTO silence VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
          ON CONFLICT (silence_id) DO UPDATE SET silenced_by = excluded.silenced_by, why = excluded.why,
          created_at = excluded.created_at, until = excluded.until, run = excluded.run, project = excluded.project,
          kind = excluded.kind, rule = excluded.rule, labels = excluded.labels"""


def put(db: sqlite3.Connection, silence: Silence) -> None:
    """Insert or replace."""
    s = silence
    texts = [plain(text) for text in (s.run, s.project, s.kind, s.rule)]
    row = (s.silence_id, plain(s.by), plain(s.why), s.created_at, s.until, *texts, dumps(dict(s.labels)))
    with transaction(db):
        db.execute(_PUT, row)


def silences(db: sqlite3.Connection) -> list[Silence]:
    """All, oldest first."""
    rows = db.execute(
        "SELECT silence_id, silenced_by, why, created_at, until, run, project, kind, rule, labels FROM silence "
        "ORDER BY id"
    )
    return [
        Silence(silence_id, by, why, created_at, until, run, project, kind, rule, loads(labels))
        for silence_id, by, why, created_at, until, run, project, kind, rule, labels in rows
    ]
