"""Acts and words of people as rows (silences, the audit, answers to forecasts), and a store's part that has them."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from rlwatch.clock import Clock
from rlwatch.errors import StoreError
from rlwatch.records import AuditEntry, ForecastAnswer, RunInfo, Severity, Silence
from rlwatch.store.sqlite.curating import is_deleted
from rlwatch.store.sqlite.rows import dumps, loads, plain
from rlwatch.store.sqlite.schema import transaction

# Silences and the audit, over an open connection to the store's ``alerts.db``.

_SILENCES = """SELECT silence_id, silenced_by, why, created_at, until, run, project, kind, rule, labels, alerts, up_to
          FROM silence ORDER BY id"""
_PUT_SILENCE = """INSERT INTO silence VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
          ON CONFLICT (silence_id) DO UPDATE SET silenced_by = excluded.silenced_by, why = excluded.why,
          created_at = excluded.created_at, until = excluded.until, run = excluded.run, project = excluded.project,
          kind = excluded.kind, rule = excluded.rule, labels = excluded.labels, alerts = excluded.alerts,
          up_to = excluded.up_to"""


def put_silence(db: sqlite3.Connection, silence: Silence) -> None:
    """Insert or replace."""
    s = silence
    texts = [plain(text) for text in (s.run, s.project, s.kind, s.rule)]
    which = (dumps(dict(s.labels)), dumps(list(s.alerts)), "" if s.up_to is None else s.up_to.value)
    row = (s.silence_id, plain(s.by), plain(s.why), s.created_at, s.until, *texts, *which)
    with transaction(db):
        db.execute(_PUT_SILENCE, row)


def read_silences(db: sqlite3.Connection) -> list[Silence]:
    """All, oldest first."""
    return [_silence(*row) for row in db.execute(_SILENCES)]


def _silence(*row: Any) -> Silence:
    about, (labels, alerts, up_to) = row[:9], row[9:]
    return replace(
        Silence(*about), labels=loads(labels), alerts=tuple(loads(alerts)), up_to=Severity(up_to) if up_to else None
    )


def put_entry(db: sqlite3.Connection, entry: AuditEntry) -> None:
    """Insert, unless its id is there."""
    e = entry
    texts = [plain(text) for text in (e.by, e.act, e.text, e.run_id, e.alert_id)]
    with transaction(db):
        db.execute(
            "INSERT INTO audit VALUES (NULL, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", (e.entry_id, e.at, *texts)
        )


def read_audit(db: sqlite3.Connection, run_id: str | None) -> list[AuditEntry]:
    """All, or those about one run; oldest first."""
    rows = "SELECT entry_id, at, done_by, act, text, run, alert FROM audit WHERE ?1 IS NULL OR run = ?1 ORDER BY id"
    return [AuditEntry(*row) for row in db.execute(rows, (run_id,))]


# Answers to forecasts, over an open connection to a run's ``control.db``.


def put_answer(db: sqlite3.Connection, answer: ForecastAnswer) -> None:
    """Insert or replace."""
    a = answer
    row = (a.attempt, a.step, int(a.right), plain(a.by), plain(a.why), a.at)
    with transaction(db):
        db.execute("INSERT OR REPLACE INTO forecast_answer VALUES (?, ?, ?, ?, ?, ?)", row)


def read_answers(db: sqlite3.Connection, run_id: str) -> list[ForecastAnswer]:
    """Answers about the run, by attempt and step."""
    rows = db.execute("SELECT step, right, answered_by, why, at, attempt FROM forecast_answer ORDER BY attempt, step")
    return [ForecastAnswer(run_id, step, bool(right), *said) for step, right, *said in rows]


_T = TypeVar("_T")


class PeopleTables(ABC):
    """Silences, the audit, answers (``AlertStore`` in part, ``AnswerStore``), over hooks: where the tables are."""

    _clock: Clock

    @abstractmethod
    def run(self, run_id: str) -> RunInfo:
        """One run, as people edited it."""

    @abstractmethod
    def _controlled(self) -> list[str]:
        """Run ids that have control tables."""

    @abstractmethod
    def _control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection | None]:
        """The run's control tables, or None where nobody needed them yet. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _made_control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """The run's control tables, created if need be. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _store_wide(self) -> AbstractContextManager[sqlite3.Connection | None]:
        """Tables of the whole store, or None where nobody needed them yet."""

    @abstractmethod
    def _made_store_wide(self) -> AbstractContextManager[sqlite3.Connection]:
        """The same, created if need be."""

    def put_silence(self, silence: Silence) -> None:
        """Insert or replace by id."""
        with self._made_store_wide() as db:
            put_silence(db, silence)

    def silences(self) -> list[Silence]:
        """All silences, oldest first."""
        with self._store_wide() as db:
            return [] if db is None else read_silences(db)

    def put_entry(self, entry: AuditEntry) -> None:
        """Add it, unless its id is known."""
        with self._made_store_wide() as db:
            put_entry(db, entry)

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """All that people did and said (about one run, or at all), oldest first."""
        with self._store_wide() as db:
            return [] if db is None else read_audit(db, run_id)

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Keep it, in place of an earlier one about the same attempt and step."""
        with self._made_control(answer.run_id) as db:
            put_answer(db, answer)

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Answers about one run, or about all that can be read."""
        return self._gathered(run_id, read_answers)

    def _gathered(self, run_id: str | None, rows: Callable[[sqlite3.Connection, str], list[_T]]) -> list[_T]:
        gathered: list[_T] = []
        for each in self._controlled() if run_id is None else [run_id]:
            try:
                found, deleted = self._rows(each, rows)
                if run_id is not None or not (deleted and self.run(each).curation.deleted):
                    gathered += found
            except StoreError:
                if run_id is not None:
                    raise
        return gathered

    def _rows(self, run_id: str, rows: Callable[[sqlite3.Connection, str], list[_T]]) -> tuple[list[_T], bool]:
        """Rows of a run, and whether its edits say that it is deleted."""
        with self._control(run_id) as db:
            return ([], False) if db is None else (rows(db, run_id), is_deleted(db, run_id))
