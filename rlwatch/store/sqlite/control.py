"""Store commands, alerts and outgoing messages as rows of ``control.db``, and as a part of a store."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from rlwatch.clock import Clock
from rlwatch.errors import StoreError
from rlwatch.ports import Composer
from rlwatch.records import (
    Acknowledgement,
    Alert,
    AuditEntry,
    Command,
    CommandStatus,
    ForecastAnswer,
    Ledger,
    OutboxMessage,
    RunInfo,
    Silence,
)
from rlwatch.store.fields import ACKNOWLEDGEMENT, ALERT, ANSWER, AUDIT, COMMAND, MESSAGE, SILENCE, plain
from rlwatch.store.sqlite import layout
from rlwatch.store.sqlite.curating import is_deleted
from rlwatch.store.sqlite.schema import extra_of, merge_extra, read_table, transaction

# Store what people add to runs (silences, audit entries, answers to forecasts), as rows and as a part of a store.

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
    """Return the key of a stored answer to a forecast: attempt and step, the first two columns of its row."""
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


_ANSWERS = tuple(status for status in CommandStatus if not status.open)


def submit_command(db: sqlite3.Connection, command: Command) -> Command:
    """Insert the command, or find the stored one that has the same id or idempotency key; return the stored command."""
    key = plain(command.idempotency_key)
    with transaction(db):
        if db.execute(COMMAND.insert("?", upon="DO NOTHING"), COMMAND.row(command)).rowcount > 0:
            merge_extra(db, COMMAND, {command.command_id: command})
        same = "WHERE command_id = ? OR (idempotency_key = ? AND idempotency_key <> '') ORDER BY id"
        return read_table(db, COMMAND, same, (command.command_id, key), run_id=command.run_id)[0]


def read_commands(db: sqlite3.Connection, run_id: str, status: CommandStatus | None) -> list[Command]:
    """Return the run's commands in the order of their arrival; if ``status`` is given, only those in that status."""
    if status is None:
        return read_table(db, COMMAND, "ORDER BY id", run_id=run_id)
    return read_table(db, COMMAND, "WHERE status = ? ORDER BY id", (status.value,), run_id=run_id)


def claim_commands(db: sqlite3.Connection, run_id: str, now: float) -> list[Command]:
    """Expire the queued commands that are overdue at ``now`` (Unix seconds); claim and return the others.

    The write lock is held throughout, so that each command is claimed exactly once.
    """
    if db.execute("SELECT 1 FROM command WHERE status = 'queued' LIMIT 1").fetchone() is None:
        return []  # the usual poll takes no write lock
    with transaction(db):
        db.execute(
            "UPDATE command SET status = 'expired', finished_at = ?1 "
            "WHERE status = 'queued' AND expires_at > 0 AND expires_at <= ?1",
            (now,),
        )
        queued = [row[0] for row in db.execute("SELECT id FROM command WHERE status = 'queued' ORDER BY id")]
        taken = [(now, number) for number in queued]
        db.executemany("UPDATE command SET status = 'claimed', claimed_at = ? WHERE id = ?", taken)
        return [read_table(db, COMMAND, "WHERE id = ?", (number,), run_id=run_id)[0] for number in queued]


def settle_command(
    db: sqlite3.Connection,
    run_id: str,
    command_id: str,
    *,
    status: CommandStatus,
    now: float,
    step: int | None,
    result: str,
) -> Command:
    """Store the final ``status`` and ``result`` of a claimed command; an answer that was already given stays.

    ``now``: Unix seconds. ``step``: training step at which the command was done, or None. Returns the command as
    stored. Raises ``StoreError`` for a status that is not final, an unclaimed command, or an unknown id.
    """
    if status not in _ANSWERS:
        answers = ", ".join(answer.value for answer in _ANSWERS)
        raise StoreError(f"a command is settled as one of {answers}, not as {status.value!r}")
    with transaction(db):
        db.execute(
            "UPDATE command SET status = ?, finished_at = ?, finished_step = ?, result = ? "
            "WHERE command_id = ? AND status IN ('claimed', 'cancelling')",
            (status.value, now, step, plain(result), command_id),
        )
        command = _known_command(db, run_id, command_id)
    if command.status is CommandStatus.QUEUED:
        raise StoreError(f"command {command_id!r} is still queued: claim it before settling it")
    return command


def cancel_command(db: sqlite3.Connection, run_id: str, command_id: str, *, now: float, result: str) -> Command:
    """Cancel a queued command, or request the process that claimed it to abandon it; return the command as stored.

    ``now``: Unix seconds. ``result``: the reason. Raises ``StoreError`` if there is no such command.
    """
    with transaction(db):
        db.execute(
            "UPDATE command SET finished_at = CASE status WHEN 'queued' THEN ? END, result = ?, "
            "status = CASE status WHEN 'queued' THEN 'cancelled' ELSE 'cancelling' END "
            "WHERE command_id = ? AND status IN ('queued', 'claimed')",
            (now, plain(result), command_id),
        )
        return _known_command(db, run_id, command_id)


def _known_command(db: sqlite3.Connection, run_id: str, command_id: str) -> Command:
    found = read_table(db, COMMAND, "WHERE command_id = ?", (command_id,), run_id=run_id)
    if not found:
        raise StoreError(f"run {run_id!r} has no command {command_id!r}")
    return found[0]


# Alerts and the outbox as rows, over an open connection to ``control.db``.

_PUT_ALERT = ALERT.upsert("?", "seen_at", key="alert_id")
_PUT_MESSAGE = MESSAGE.insert("?", upon="DO NOTHING")
_DUE = (
    "FROM outbox WHERE status = 'pending' AND ((next_attempt_at <= ?1 AND (lease_until <= ?1 "
    "OR leased_by IN ({gone}))) OR touched_at > ?1 + 1)"
)


def put_alerts(db: sqlite3.Connection, alerts: Sequence[Alert], messages: Sequence[OutboxMessage], now: float) -> None:
    """Insert or update the alerts of one run and insert its new messages, in one transaction.

    ``now``: Unix seconds, kept as the time an alert was first stored.
    """
    with transaction(db):
        _insert(db, alerts, messages, now)


def publish(
    db: sqlite3.Connection, run_id: str, alerts: Sequence[Alert], compose: Composer, now: float
) -> list[OutboxMessage]:
    """Insert or update the run's alerts, then insert the messages that ``compose`` returns, in one transaction.

    ``compose`` is called with the run's alerts, messages and acknowledgements. ``now``: Unix seconds. Returns the
    messages whose id was new.
    """
    with transaction(db):
        _insert(db, alerts, (), now)
        whole = read_ledger(db, run_id)
        known = {message.message_id for message in whole.messages}
        made = {message.message_id: message for message in compose(whole) if message.message_id not in known}
        _insert(db, (), list(made.values()), now)
    return list(made.values())


def read_ledger(db: sqlite3.Connection, run_id: str) -> Ledger:
    """Return the run's alerts, messages and acknowledgements, each newest last."""
    newest_first = [alert for *_, alert in read_alerts(db, run_id)]
    return Ledger(tuple(newest_first[::-1]), tuple(read_outbox(db, run_id)), tuple(read_acknowledgements(db, run_id)))


def keep_acknowledgement(db: sqlite3.Connection, acknowledgement: Acknowledgement) -> Acknowledgement:
    """Store the acknowledgement of an alert, unless an earlier one has at least its severity; return the stored one."""
    with transaction(db):
        kept = [a for a in read_acknowledgements(db, acknowledgement.run_id) if a.alert_id == acknowledgement.alert_id]
        if kept and kept[0].severity.rank >= acknowledgement.severity.rank:
            return kept[0]
        put = ACKNOWLEDGEMENT.insert("?", doing="INSERT OR REPLACE")
        db.execute(put, ACKNOWLEDGEMENT.row(acknowledgement))
        merge_extra(db, ACKNOWLEDGEMENT, {acknowledgement.alert_id: acknowledgement})
    return acknowledgement


def read_acknowledgements(db: sqlite3.Connection, run_id: str) -> list[Acknowledgement]:
    """Return the acknowledgements of the run's alerts, oldest first."""
    return read_table(db, ACKNOWLEDGEMENT, "ORDER BY rowid", run_id=run_id)


def read_alerts(db: sqlite3.Connection, run_id: str) -> list[tuple[float, int, Alert]]:
    """Return the run's alerts, newest first, each as (Unix time first stored, row number, alert).

    Time and number serve to sort alerts of several runs.
    """
    rows = db.execute(ALERT.select("ORDER BY id DESC", "seen_at", "id")).fetchall()
    extra = extra_of(db, ALERT) if rows else {}
    return [(seen_at, number, ALERT.record(row, extra.get(row[0]), run_id=run_id)) for seen_at, number, *row in rows]


def lease_messages(
    db: sqlite3.Connection, run_id: str, now: float, *, until: float, limit: int, channels: Sequence[str] | None
) -> list[OutboxMessage]:
    """Lease due messages that are not leased, oldest first, until ``until`` (Unix seconds); return at most ``limit``.

    ``channels``: only messages to these channels; None for all. The write lock is held throughout, so that each message
    goes to one caller. A lease ends early if its process is gone, or if the message's last change lies in the future:
    the clock went back, and its next try, an hour away perhaps, is due now.
    """
    held = db.execute("SELECT DISTINCT leased_by FROM outbox WHERE status = 'pending' AND lease_until > ?", (now,))
    gone = [by for (by,) in held.fetchall() if layout.is_gone(by)]
    due_now, when = _DUE.format(gone=", ".join(f"?{k + 2}" for k in range(len(gone)))), (now, *gone)
    if db.execute(f"SELECT 1 {due_now} LIMIT 1", when).fetchone() is None:
        return []  # the usual poll takes no write lock
    with transaction(db):
        due = db.execute(f"SELECT id, channel {due_now} ORDER BY id", when).fetchall()
        taken = [number for number, channel in due if channels is None or channel in channels][:limit]
        db.executemany(
            "UPDATE outbox SET lease_until = ?1, leased_by = ?2, touched_at = ?3, "
            "next_attempt_at = min(next_attempt_at, ?3) WHERE id = ?4",
            [(until, layout.this_process(), now, number) for number in taken],
        )
        return [read_table(db, MESSAGE, "WHERE id = ?", (number,), run_id=run_id)[0] for number in taken]


def settle_message(db: sqlite3.Connection, message: OutboxMessage) -> None:
    """Store the outcome of a delivery of ``message``, and end its lease (the claim of the process that sends it).

    Nothing changes if the stored message is no longer pending, or, for a failure, if it was leased anew meanwhile.
    """
    with transaction(db):
        db.execute(
            "UPDATE outbox SET status = ?1, attempts = ?2, next_attempt_at = ?3, last_error = ?4, sent_at = ?5, "
            "lease_until = 0 WHERE message_id = ?6 AND status = 'pending' "
            "AND (?1 = 'sent' OR ?7 = 0 OR lease_until = ?7)",
            (
                message.status.value,
                message.attempts,
                message.next_attempt_at,
                plain(message.last_error),
                message.sent_at,
                message.message_id,
                message.lease_until,
            ),
        )


def retry_message(db: sqlite3.Connection, message_id: str) -> None:
    """Make an unsent message due now. It counts as tried before, so that it is tried again however old it is."""
    with transaction(db):
        db.execute(
            "UPDATE outbox SET status = 'pending', next_attempt_at = 0, attempts = max(attempts, 1), "
            "lease_until = CASE status WHEN 'dead' THEN 0 ELSE lease_until END "
            "WHERE message_id = ? AND status != 'sent'",
            (message_id,),
        )


def read_outbox(db: sqlite3.Connection, run_id: str) -> list[OutboxMessage]:
    """Return all outgoing messages of the run, oldest first, whatever their status."""
    return read_table(db, MESSAGE, "ORDER BY id", run_id=run_id)


def has_pending(db: sqlite3.Connection) -> bool:
    """Return True if any message is still to be sent, due or not."""
    return db.execute("SELECT 1 FROM outbox WHERE status = 'pending' LIMIT 1").fetchone() is not None


def _insert(db: sqlite3.Connection, alerts: Sequence[Alert], messages: Sequence[OutboxMessage], now: float) -> None:
    db.executemany(_PUT_ALERT, [(now, *ALERT.row(alert)) for alert in alerts])
    merge_extra(db, ALERT, {alert.alert_id: alert for alert in alerts})
    for message in messages:
        if db.execute(_PUT_MESSAGE, MESSAGE.row(message)).rowcount > 0:
            merge_extra(db, MESSAGE, {message.message_id: message})


# Commands, alerts and outbox of all runs, over hooks: where control tables are, or are to be.


class ControlTables(PeopleTables):
    """Part of a store that holds commands, alerts, outgoing messages and acknowledgements.

    It implements ``CommandStore`` and ``AlertStore``. Subclasses provide access to the tables.
    """

    _clock: Clock

    def submit(self, command: Command) -> Command:
        """Store a command for a run; return it, or the stored one that has the same id or idempotency key."""
        with self._made_control(command.run_id) as db:
            return submit_command(db, command)

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Return the run's commands, oldest first; if ``status`` is given, only those in that status."""
        with self._control(run_id) as db:
            return [] if db is None else read_commands(db, run_id, status)

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Expire the run's queued commands that are overdue at ``now`` (Unix seconds); claim and return the others."""
        with self._control(run_id) as db:
            return [] if db is None else claim_commands(db, run_id, now)

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Store the final ``status`` and ``result`` of a claimed command; the first answer stays and is returned.

        ``now``: Unix seconds. ``step``: training step at which the command was done, or None. Raises ``StoreError`` for
        a status that is not final, an unclaimed command, or an unknown id.
        """
        with self._made_control(run_id) as db:
            return settle_command(db, run_id, command_id, status=status, now=now, step=step, result=result)

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Cancel a queued command, or request the process that claimed it to abandon it; return the command as stored.

        ``now``: Unix seconds. ``result``: the reason. Raises ``StoreError`` if there is no such command.
        """
        with self._made_control(run_id) as db:
            return cancel_command(db, run_id, command_id, now=now, result=result)

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Insert or update alerts and insert messages whose id is new, in one transaction per run."""
        runs = [alert.run_id for alert in alerts] + [message.run_id for message in messages]
        for run_id in dict.fromkeys(runs):
            with self._made_control(run_id) as db:
                own = [alert for alert in alerts if alert.run_id == run_id]
                new = [message for message in messages if message.run_id == run_id]
                put_alerts(db, own, new, self._clock.now())

    def publish(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Insert or update the run's alerts, then insert the messages that ``compose`` returns, in one transaction.

        ``compose`` is called with the run's alerts, messages and acknowledgements. Returns the messages whose id was
        new.
        """
        with self._made_control(run_id) as db:
            return publish(db, run_id, alerts, compose, self._clock.now())

    def ledger(self, run_id: str) -> Ledger:
        """Return the run's alerts, messages and acknowledgements at one moment, each newest last."""
        with self._control(run_id) as db:
            if db is None:
                return Ledger()
            with transaction(db):
                return read_ledger(db, run_id)

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Store the acknowledgement of an alert, unless an earlier one has at least its severity; return the stored
        one.
        """
        with self._made_control(acknowledgement.run_id) as db:
            return keep_acknowledgement(db, acknowledgement)

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Return the acknowledgements of alerts of one run, or of all runs that can be read."""
        return self._gathered(run_id, read_acknowledgements)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold a lock of the whole store, over all processes, until the block is left."""
        with self._made_store_wide() as db, transaction(db):
            yield

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Return the alerts of one run, or of all runs that can be read, newest first."""
        gathered = self._gathered(run_id, read_alerts)
        return [alert for *_, alert in sorted(gathered, key=itemgetter(0, 1), reverse=True)]

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Lease due messages of all runs until ``now + lease_s`` (seconds) and return at most ``limit``, oldest first.

        ``channels``: only messages to these channels; None for all. Runs whose files are busy or damaged are skipped.
        """
        leased: list[OutboxMessage] = []
        for run_id in self._controlled():
            if len(leased) >= limit:
                break
            with suppress(StoreError):  # busy, damaged, not ours: the other runs must not wait for it
                leased += self._lease(run_id, now, now + lease_s, limit=limit - len(leased), channels=channels)
        return sorted(leased, key=attrgetter("created_at"))

    def settle_message(self, message: OutboxMessage) -> None:
        """Store the outcome of a delivery of ``message``, and end its lease (the claim of the process that sends
        it).
        """
        with self._made_control(message.run_id) as db:
            settle_message(db, message)

    def retry_message(self, message: OutboxMessage) -> None:
        """Make an unsent message due now, also one that was given up."""
        with self._made_control(message.run_id) as db:
            retry_message(db, message.message_id)

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """Return all outgoing messages of one run, or of all runs that can be read, oldest first."""
        return sorted(self._gathered(run_id, read_outbox), key=attrgetter("created_at"))

    def _lease(
        self, run_id: str, now: float, until: float, *, limit: int, channels: Sequence[str] | None
    ) -> list[OutboxMessage]:
        with self._control(run_id) as db:
            return [] if db is None else lease_messages(db, run_id, now, until=until, limit=limit, channels=channels)
