"""Commands, alerts and outbox of all runs, over hooks: where control tables are, or are to be."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter, itemgetter
from typing import TypeVar

from rlwatch.clock import Clock
from rlwatch.errors import StoreError
from rlwatch.ports import Composer
from rlwatch.records import Acknowledgement, Alert, Command, CommandStatus, Ledger, OutboxMessage, Silence
from rlwatch.store.sqlite import alerts as alert_rows
from rlwatch.store.sqlite import commands as command_rows
from rlwatch.store.sqlite import silences as silence_rows
from rlwatch.store.sqlite.migrations import transaction

_T = TypeVar("_T")


class ControlTables(ABC):
    """Commands; alerts, outbox, acknowledgements and silences (``CommandStore``, ``AlertStore``)."""

    _clock: Clock

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
    def _desk(self) -> AbstractContextManager[sqlite3.Connection | None]:
        """What belongs to the whole store, or None where nobody needed it yet."""

    @abstractmethod
    def _made_desk(self) -> AbstractContextManager[sqlite3.Connection]:
        """The same, created if need be."""

    def submit(self, command: Command) -> Command:
        """Insert, or return the command that already has this id or idempotency key."""
        with self._made_control(command.run_id) as db:
            return command_rows.submit(db, command)

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Commands of a run, oldest first."""
        with self._control(run_id) as db:
            return [] if db is None else command_rows.commands(db, run_id, status)

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Expire overdue queued commands, take the rest."""
        with self._control(run_id) as db:
            return [] if db is None else command_rows.claim(db, run_id, now)

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Answer a claimed command; the first answer stays."""
        with self._made_control(run_id) as db:
            return command_rows.settle(db, run_id, command_id, status=status, now=now, step=step, result=result)

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Cancel what nobody has claimed; ask whoever has to let it go."""
        with self._made_control(run_id) as db:
            return command_rows.cancel(db, run_id, command_id, now=now, result=result)

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Insert or update alerts, insert new messages; one transaction per run."""
        runs = [alert.run_id for alert in alerts] + [message.run_id for message in messages]
        for run_id in dict.fromkeys(runs):
            with self._made_control(run_id) as db:
                own = [alert for alert in alerts if alert.run_id == run_id]
                new = [message for message in messages if message.run_id == run_id]
                alert_rows.put(db, own, new, self._clock.now())

    def tell(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Store alerts and what is to be written about them, in one transaction."""
        with self._made_control(run_id) as db:
            return alert_rows.tell(db, run_id, alerts, compose, self._clock.now())

    def ledger(self, run_id: str) -> Ledger:
        """The run's alerts, messages and acknowledgements at one moment."""
        with self._control(run_id) as db:
            if db is None:
                return Ledger()
            with transaction(db):
                return alert_rows.ledger(db, run_id)

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Keep it, unless an earlier one covers it."""
        with self._made_control(acknowledgement.run_id) as db:
            return alert_rows.acknowledge(db, acknowledgement)

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Acknowledgements (of one run, or of all that can be read)."""
        return self._gathered(run_id, alert_rows.acknowledgements)

    def put_silence(self, silence: Silence) -> None:
        """Insert or replace by id."""
        with self._made_desk() as db:
            silence_rows.put(db, silence)

    def silences(self) -> list[Silence]:
        """All silences, oldest first."""
        with self._desk() as db:
            return [] if db is None else silence_rows.silences(db)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held by one caller at a time, whichever process it is in."""
        with self._made_desk() as db, transaction(db):
            yield

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Alerts (of one run, or of all that can be read), newest first."""
        found = self._gathered(run_id, alert_rows.rows_of_alerts)
        return [alert for *_, alert in sorted(found, key=itemgetter(0, 1), reverse=True)]

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Due pending messages nobody holds, oldest first, held until ``now + lease_s``; over all runs."""
        leased: list[OutboxMessage] = []
        for run_id in self._controlled():
            if len(leased) >= limit:
                break
            with suppress(StoreError):  # busy, damaged, not ours: the other runs must not wait for it
                leased += self._lease(run_id, now, now + lease_s, limit=limit - len(leased), channels=channels)
        return sorted(leased, key=attrgetter("created_at"))

    def settle_message(self, message: OutboxMessage) -> None:
        """Write the outcome of a delivery back."""
        with self._made_control(message.run_id) as db:
            alert_rows.settle(db, message)

    def retry_message(self, message: OutboxMessage) -> None:
        """Make an unsent message due now."""
        with self._made_control(message.run_id) as db:
            alert_rows.retry(db, message.message_id)

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """All messages (of one run, or of all that can be read), oldest first."""
        return sorted(self._gathered(run_id, alert_rows.outbox), key=attrgetter("created_at"))

    def _gathered(self, run_id: str | None, rows: Callable[[sqlite3.Connection, str], list[_T]]) -> list[_T]:
        found: list[_T] = []
        for each in self._controlled() if run_id is None else [run_id]:
            try:
                with self._control(each) as db:
                    found += [] if db is None else rows(db, each)
            except StoreError:
                if run_id is not None:
                    raise
        return found

    def _lease(
        self, run_id: str, now: float, until: float, *, limit: int, channels: Sequence[str] | None
    ) -> list[OutboxMessage]:
        with self._control(run_id) as db:
            return [] if db is None else alert_rows.lease(db, run_id, now, until=until, limit=limit, channels=channels)
