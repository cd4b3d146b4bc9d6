"""Store what people add to runs (silences, audit entries, answers to forecasts), as rows and as a part of a store."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from rlwatch.clock import Clock
from rlwatch.errors import StoreError
from rlwatch.records import AuditEntry, ForecastAnswer, RunInfo, Silence
from rlwatch.store.fields import ANSWER, AUDIT, SILENCE
from rlwatch.store.sqlite.curating import is_deleted
from rlwatch.store.sqlite.extra import merge_extra, read_table
from rlwatch.store.sqlite.schema import transaction

# Silences and the audit, over an open connection to the store's ``alerts.db``.


def put_silence(db: sqlite3.Connection, silence: Silence) -> None:
    """Insert the silence, or replace the stored one with the same id. ``db``: the store's ``alerts.db``."""
    with transaction(db):
        db.execute(SILENCE.upsert("?", key="silence_id"), SILENCE.row(silence))
        merge_extra(db, SILENCE, {silence.silence_id: silence})


def read_silences(db: sqlite3.Connection) -> list[Silence]:
    """Return all silences in the store's ``alerts.db``, oldest first, including expired ones."""
    return read_table(db, SILENCE, "ORDER BY id")


def put_entry(db: sqlite3.Connection, entry: AuditEntry) -> None:
    """Insert the audit entry into the store's ``alerts.db``, unless an entry with the same id is stored."""
    with transaction(db):
        if db.execute(AUDIT.insert("?", upon="DO NOTHING"), AUDIT.row(entry)).rowcount > 0:
            merge_extra(db, AUDIT, {entry.entry_id: entry})


def read_audit(db: sqlite3.Connection, run_id: str | None) -> list[AuditEntry]:
    """Return the audit entries in the store's ``alerts.db``, oldest first: all, or those about one run."""
    return read_table(db, AUDIT, "WHERE ?1 IS NULL OR run = ?1 ORDER BY id", (run_id,))


# Answers to forecasts, over an open connection to a run's ``control.db``.


def put_answer(db: sqlite3.Connection, answer: ForecastAnswer) -> None:
    """Insert a user's answer to a forecast, or replace the one about the same attempt and step. ``db``:
    ``control.db``.
    """
    with transaction(db):
        db.execute(ANSWER.insert("?", doing="INSERT OR REPLACE"), ANSWER.row(answer))
        merge_extra(db, ANSWER, {_place(ANSWER.row(answer)): answer})


def read_answers(db: sqlite3.Connection, run_id: str) -> list[ForecastAnswer]:
    """Return users' answers to the run's forecasts, ordered by attempt and step. ``db``: the run's ``control.db``."""
    return read_table(db, ANSWER, "ORDER BY attempt, step", key=_place, run_id=run_id)


def _place(row: Sequence[Any]) -> str:
    """Return the key of an answer: attempt and step, which are its first columns."""
    return f"{row[0]}/{row[1]}"


_T = TypeVar("_T")


class PeopleTables(ABC):
    """Part of a store that holds silences, the audit and answers to forecasts.

    It implements ``AnswerStore`` and a part of ``AlertStore``. Subclasses provide access to the tables.
    """

    _clock: Clock

    @abstractmethod
    def run(self, run_id: str) -> RunInfo:
        """Return one run, with people's edits of its name and tags applied. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _controlled(self) -> list[str]:
        """Return the ids of the runs that have control tables."""

    @abstractmethod
    def _control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection | None]:
        """Open the run's control tables; None if nothing has been written there yet. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _made_control(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """Open the run's control tables, created if need be. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _store_wide(self) -> AbstractContextManager[sqlite3.Connection | None]:
        """Open the tables of the whole store; None if nothing has been written there yet."""

    @abstractmethod
    def _made_store_wide(self) -> AbstractContextManager[sqlite3.Connection]:
        """Open the tables of the whole store, created if need be."""

    def put_silence(self, silence: Silence) -> None:
        """Store the silence, which mutes alerts of the whole store, in place of an earlier one with the same id."""
        with self._made_store_wide() as db:
            put_silence(db, silence)

    def silences(self) -> list[Silence]:
        """Return all silences of the store, oldest first, including expired ones."""
        with self._store_wide() as db:
            return [] if db is None else read_silences(db)

    def put_entry(self, entry: AuditEntry) -> None:
        """Add the entry to the store's audit, unless an entry with the same id is there."""
        with self._made_store_wide() as db:
            put_entry(db, entry)

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """Return people's actions and annotations (about one run, or about all), oldest first."""
        with self._store_wide() as db:
            return [] if db is None else read_audit(db, run_id)

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Store a user's answer to a forecast, in place of an earlier one about the same attempt and step."""
        with self._made_control(answer.run_id) as db:
            put_answer(db, answer)

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Return users' answers to forecasts of one run, or of all runs that can be read."""
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
        """Return rows of a run, and whether its edits mark it as deleted."""
        with self._control(run_id) as db:
            return ([], False) if db is None else (rows(db, run_id), is_deleted(db, run_id))
