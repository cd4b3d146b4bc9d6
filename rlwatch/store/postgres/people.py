"""Silences, the audit and answers to forecasts: ``AlertStore`` in part, and ``AnswerStore``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypeVar

from rlwatch.clock import Clock
from rlwatch.records import Acknowledgement, Alert, AuditEntry, ForecastAnswer, OutboxMessage, Severity, Silence
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.postgres.copying import plain
from rlwatch.store.postgres.curating import edits_of
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.runrow import load
from rlwatch.store.postgres.server import Server
from rlwatch.store.sqlite.curating import curated
from rlwatch.store.sqlite.rows import dumps, loads

Opened = AbstractContextManager[Connection]


class People(ABC):
    """Acts and words of people, over hooks that open a transaction."""

    _clock: Clock
    server: Server

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection | None]:
        """The tables as they are now; None where there are none yet."""

    @abstractmethod
    def snapshot(self, run_id: str) -> Opened:
        """The same, of a run that exists. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _changing(self, run_id: str) -> Opened:
        """A transaction on a run that exists. Raises ``RunNotFoundError``."""

    @contextmanager
    def _looking(self, run_id: str | None) -> Iterator[Connection | None]:
        with self._reading() if run_id is None else self.snapshot(run_id) as db:
            yield db

    def put_silence(self, silence: Silence) -> None:
        """Insert or replace by id."""
        s = silence
        texts = [plain(text) for text in (s.run, s.project, s.kind, s.rule)]
        which = (dumps(dict(s.labels)), dumps(list(s.alerts)), "" if s.up_to is None else s.up_to.value)
        with self.server.writing() as db:
            tell(db, self.server.address, "pages", "")
            db.execute(
                """INSERT INTO silence
                   (silence_id, silenced_by, why, created_at, until, run, project, kind, rule, labels, alerts, up_to)
                   VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (silence_id) DO UPDATE SET
                   silenced_by = excluded.silenced_by, why = excluded.why, created_at = excluded.created_at,
                   until = excluded.until, run = excluded.run, project = excluded.project, kind = excluded.kind,
                   rule = excluded.rule, labels = excluded.labels, alerts = excluded.alerts, up_to = excluded.up_to""",
                (s.silence_id, plain(s.by), plain(s.why), s.created_at, s.until, *texts, *which),
            )

    def silences(self) -> list[Silence]:
        """All silences, oldest first."""
        with self._reading() as db:
            if db is None:
                return []
            rows = db.execute(
                "SELECT silence_id, silenced_by, why, created_at, until, run, project, kind, rule, labels, "
                "alerts, up_to FROM silence ORDER BY id"
            )
            return [_silence(row) for row in rows]

    def put_entry(self, entry: AuditEntry) -> None:
        """Add it, unless its id is known."""
        e = entry
        texts = [plain(text) for text in (e.by, e.act, e.text, e.run_id, e.alert_id)]
        with self.server.writing() as db:
            tell(db, self.server.address, "pages", e.run_id)
            db.execute(
                "INSERT INTO audit (entry_id, at, done_by, act, text, run, alert) VALUES (%s, %s, %s, %s, %s, %s, %s) "
                "ON CONFLICT (entry_id) DO NOTHING",
                (e.entry_id, e.at, *texts),
            )

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """Acts and words of people (about one run, or all), oldest first."""
        with self._reading() as db:
            if db is None:
                return []
            rows = db.execute(
                "SELECT entry_id, at, done_by, act, text, run, alert FROM audit "
                "WHERE %(run)s::text IS NULL OR run = %(run)s ORDER BY id",
                {"run": run_id},
            )
            return [AuditEntry(*row) for row in rows]

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Keep it, in place of an earlier one about the same attempt and step."""
        a = answer
        with self._changing(a.run_id) as db:
            db.execute(
                """INSERT INTO forecast_answer (run_id, attempt, step, is_right, answered_by, why, at)
                   VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (run_id, attempt, step) DO UPDATE SET
                   is_right = excluded.is_right, answered_by = excluded.answered_by, why = excluded.why,
                   at = excluded.at""",
                (a.run_id, a.attempt, a.step, a.right, plain(a.by), plain(a.why), a.at),
            )

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Answers about one run, or about all, by run, attempt and step."""
        with self._looking(run_id) as db:
            if db is None:
                return []
            rows = db.execute(
                "SELECT run_id, step, is_right, answered_by, why, at, attempt FROM forecast_answer "
                "WHERE %(run)s::text IS NULL OR run_id = %(run)s ORDER BY run_id, attempt, step",
                {"run": run_id},
            )
            return shown(db, run_id, [ForecastAnswer(*row) for row in rows])


def _silence(row: Row) -> Silence:
    about, (labels, alerts, up_to) = row[:9], row[9:]
    return replace(
        Silence(*about), labels=loads(labels), alerts=tuple(loads(alerts)), up_to=Severity(up_to) if up_to else None
    )


_Of = TypeVar("_Of", Alert, OutboxMessage, Acknowledgement, ForecastAnswer)


def shown(db: Connection, run_id: str | None, found: list[_Of]) -> list[_Of]:
    """Of all runs: what is not of one that is deleted."""
    edits = {} if run_id is not None else edits_of(db, None)
    erased = [of for of, said in edits.items() if any(edit.deleted for edit in said)]
    if not erased:
        return found
    runs = [curated(run, edits[run.run_id]) for of in erased if (run := load(db, of)) is not None]
    hidden = {run.run_id for run in runs if run.curation.deleted}
    return [one for one in found if one.run_id not in hidden]
