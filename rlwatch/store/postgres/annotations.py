"""Store silences, audit entries and answers to forecasts in PostgreSQL; implements ``AnswerStore``, in part
``AlertStore``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rlwatch.clock import Clock
from rlwatch.records import Acknowledgement, Alert, AuditEntry, ForecastAnswer, OutboxMessage, Silence
from rlwatch.store.fields import AUDIT, SILENCE, FieldTable
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.copying import add, found, put
from rlwatch.store.postgres.curating import edits_of
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.runrow import load
from rlwatch.store.postgres.server import Server
from rlwatch.store.sqlite.curating import curated

Opened = AbstractContextManager[Connection]
_ANSWER = FieldTable(
    ForecastAnswer,
    "forecast_answer",
    "attempt step is_right answered_by why at",
    renamed={"is_right": "right", "answered_by": "by"},
)


class People(ABC):
    """Part of a store that holds silences, the audit and answers to forecasts. Subclasses open the transactions."""

    _clock: Clock
    server: Server

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection | None]:
        """Open the tables for reading; None if there are none yet."""

    @abstractmethod
    def snapshot(self, run_id: str) -> Opened:
        """Give a connection with a read-only snapshot, if the run exists. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _changing(self, run_id: str) -> Opened:
        """Open a transaction on a run that exists. Raises ``RunNotFoundError``."""

    @contextmanager
    def _looking(self, run_id: str | None) -> Iterator[Connection | None]:
        with self._reading() if run_id is None else self.snapshot(run_id) as db:
            yield db

    def put_silence(self, silence: Silence) -> None:
        """Store the silence, which mutes alerts of the whole store, in place of an earlier one with the same id."""
        with self.server.writing() as db:
            tell(db, self.server.address, "pages", "")
            put(db, SILENCE, silence, key="silence_id")

    def silences(self) -> list[Silence]:
        """Return all silences of the store, oldest first, including expired ones."""
        with self._reading() as db:
            if db is None:
                return []
            rows = db.execute(SILENCE.select("ORDER BY id", "extra").encode())
            return [SILENCE.record(row, extra) for extra, *row in rows]

    def put_entry(self, entry: AuditEntry) -> None:
        """Add the entry to the store's audit, unless an entry with the same id is there."""
        with self.server.writing() as db:
            tell(db, self.server.address, "pages", entry.run_id)
            add(db, AUDIT, entry)

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """Return people's actions and annotations (about one run, or about all), oldest first."""
        with self._reading() as db:
            if db is None:
                return []
            which = AUDIT.select("WHERE %(run)s::text IS NULL OR run = %(run)s ORDER BY id", "extra")
            rows = db.execute(which.encode(), {"run": run_id})
            return [AUDIT.record(row, extra) for extra, *row in rows]

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Store a user's answer to a forecast, in place of an earlier one about the same attempt and step."""
        with self._changing(answer.run_id) as db:
            put(db, _ANSWER, answer, key="run_id, attempt, step", run_id=answer.run_id)

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Return users' answers to forecasts of one run, or of all runs, ordered by run, attempt and step."""
        with self._looking(run_id) as db:
            if db is None:
                return []
            which = "WHERE %(run)s::text IS NULL OR run_id = %(run)s ORDER BY run_id, attempt, step"
            return shown(db, run_id, list(found(db, _ANSWER, which, {"run": run_id})))


_Of = TypeVar("_Of", Alert, OutboxMessage, Acknowledgement, ForecastAnswer)


def shown(db: Connection, run_id: str | None, everything: list[_Of]) -> list[_Of]:
    """Return ``everything`` without the entries of deleted runs, if all runs were asked for (``run_id`` None)."""
    edits = {} if run_id is not None else edits_of(db, None)
    erased = [of for of, changes in edits.items() if any(edit.deleted for edit in changes)]
    if not erased:
        return everything
    runs = [curated(run, edits[run.run_id]) for of in erased if (run := load(db, of)) is not None]
    hidden = {run.run_id for run in runs if run.curation.deleted}
    return [one for one in everything if one.run_id not in hidden]
