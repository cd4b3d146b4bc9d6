"""Commands, alerts and the outbox as rows, and the half of a store that answers with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter, itemgetter

from rlwatch.clock import Clock
from rlwatch.errors import StoreError
from rlwatch.ports import Composer
from rlwatch.records import (
    Acknowledgement,
    Alert,
    Command,
    CommandStatus,
    Ledger,
    OutboxMessage,
)
from rlwatch.store.fields import ACKNOWLEDGEMENT, ALERT, COMMAND, MESSAGE, plain
from rlwatch.store.sqlite import ownership
from rlwatch.store.sqlite.annotations import PeopleTables
from rlwatch.store.sqlite.extra import extra_of, merge_extra, read_table
from rlwatch.store.sqlite.schema import transaction

_ANSWERS = tuple(status for status in CommandStatus if not status.open)


def submit_command(db: sqlite3.Connection, command: Command) -> Command:
    """Insert, or find the one with this id or this idempotency key."""
    key = plain(command.idempotency_key)
    with transaction(db):
        if db.execute(COMMAND.insert("?", upon="DO NOTHING"), COMMAND.row(command)).rowcount > 0:
            merge_extra(db, COMMAND, {command.command_id: command})
        same = "WHERE command_id = ? OR (idempotency_key = ? AND idempotency_key <> '') ORDER BY id"
        return read_table(db, COMMAND, same, (command.command_id, key), run_id=command.run_id)[0]


def read_commands(db: sqlite3.Connection, run_id: str, status: CommandStatus | None) -> list[Command]:
    """Commands in the order they came in."""
    if status is None:
        return read_table(db, COMMAND, "ORDER BY id", run_id=run_id)
    return read_table(db, COMMAND, "WHERE status = ? ORDER BY id", (status.value,), run_id=run_id)


def claim_commands(db: sqlite3.Connection, run_id: str, now: float) -> list[Command]:
    """Expire what is overdue, take the rest. The lock held from the first line on makes it exactly once."""
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
    """Answer a claimed command; an answer already given stays."""
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
    """Cancel a queued command; ask the claimant of a claimed one to abandon it."""
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
    """Insert or update the alerts of one run, insert its new messages: one transaction."""
    with transaction(db):
        _insert(db, alerts, messages, now)


def publish(
    db: sqlite3.Connection, run_id: str, alerts: Sequence[Alert], compose: Composer, now: float
) -> list[OutboxMessage]:
    """Insert or update alerts, then what ``compose`` makes of the run's ledger; returns what was new."""
    with transaction(db):
        _insert(db, alerts, (), now)
        whole = read_ledger(db, run_id)
        known = {message.message_id for message in whole.messages}
        made = {message.message_id: message for message in compose(whole) if message.message_id not in known}
        _insert(db, (), list(made.values()), now)
    return list(made.values())


def read_ledger(db: sqlite3.Connection, run_id: str) -> Ledger:
    """The run's alerts, messages and acknowledgements, newest last."""
    newest_first = [alert for *_, alert in read_alerts(db, run_id)]
    return Ledger(tuple(newest_first[::-1]), tuple(read_outbox(db, run_id)), tuple(read_acknowledgements(db, run_id)))


def keep_acknowledgement(db: sqlite3.Connection, acknowledgement: Acknowledgement) -> Acknowledgement:
    """Keep it, unless an earlier one of the alert covers it; returns what is kept."""
    with transaction(db):
        kept = [a for a in read_acknowledgements(db, acknowledgement.run_id) if a.alert_id == acknowledgement.alert_id]
        if kept and kept[0].severity.rank >= acknowledgement.severity.rank:
            return kept[0]
        put = ACKNOWLEDGEMENT.insert("?", doing="INSERT OR REPLACE")
        db.execute(put, ACKNOWLEDGEMENT.row(acknowledgement))
        merge_extra(db, ACKNOWLEDGEMENT, {acknowledgement.alert_id: acknowledgement})
    return acknowledgement


def read_acknowledgements(db: sqlite3.Connection, run_id: str) -> list[Acknowledgement]:
    """Acknowledgements of the run, oldest first."""
    return read_table(db, ACKNOWLEDGEMENT, "ORDER BY rowid", run_id=run_id)


def read_alerts(db: sqlite3.Connection, run_id: str) -> list[tuple[float, int, Alert]]:
    """Alerts of the run, newest first, each after the time and number to sort it by among other runs' ones."""
    rows = db.execute(ALERT.select("ORDER BY id DESC", "seen_at", "id")).fetchall()
    extra = extra_of(db, ALERT) if rows else {}
    return [(seen_at, number, ALERT.record(row, extra.get(row[0]), run_id=run_id)) for seen_at, number, *row in rows]


def lease_messages(
    db: sqlite3.Connection, run_id: str, now: float, *, until: float, limit: int, channels: Sequence[str] | None
) -> list[OutboxMessage]:
    """Lease due messages without a lease, oldest first. The lock, held from the first line on, gives each to one
    caller.

    A lease ends early if its process is gone, or if the message's last change lies in the future.
    """
    held = db.execute("SELECT DISTINCT leased_by FROM outbox WHERE status = 'pending' AND lease_until > ?", (now,))
    gone = [by for (by,) in held.fetchall() if ownership.is_gone(by)]
    due_now, when = _DUE.format(gone=", ".join(f"?{k + 2}" for k in range(len(gone)))), (now, *gone)
    if db.execute(f"SELECT 1 {due_now} LIMIT 1", when).fetchone() is None:
        return []  # the usual poll takes no write lock
    with transaction(db):
        due = db.execute(f"SELECT id, channel {due_now} ORDER BY id", when).fetchall()
        taken = [number for number, channel in due if channels is None or channel in channels][:limit]
        db.executemany(
            "UPDATE outbox SET lease_until = ?, leased_by = ?, touched_at = ? WHERE id = ?",
            [(until, ownership.this_process(), now, number) for number in taken],
        )
        return [read_table(db, MESSAGE, "WHERE id = ?", (number,), run_id=run_id)[0] for number in taken]


def settle_message(db: sqlite3.Connection, message: OutboxMessage) -> None:
    """Write the outcome back and drop the lease, unless the message is over or in other hands by now."""
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
    """Make an unsent message due now. Tried before, so that it is tried again however old it is."""
    with transaction(db):
        db.execute(
            "UPDATE outbox SET status = 'pending', next_attempt_at = 0, attempts = max(attempts, 1), "
            "lease_until = CASE status WHEN 'dead' THEN 0 ELSE lease_until END "
            "WHERE message_id = ? AND status != 'sent'",
            (message_id,),
        )


def read_outbox(db: sqlite3.Connection, run_id: str) -> list[OutboxMessage]:
    """All messages of the run, oldest first."""
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
    """Commands; alerts, outbox and acknowledgements (``CommandStore``, ``AlertStore``)."""

    _clock: Clock

    def submit(self, command: Command) -> Command:
        """Insert, or return the command that already has this id or idempotency key."""
        with self._made_control(command.run_id) as db:
            return submit_command(db, command)

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Commands of a run, oldest first."""
        with self._control(run_id) as db:
            return [] if db is None else read_commands(db, run_id, status)

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Expire overdue queued commands, take the rest."""
        with self._control(run_id) as db:
            return [] if db is None else claim_commands(db, run_id, now)

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Answer a claimed command; the first answer stays."""
        with self._made_control(run_id) as db:
            return settle_command(db, run_id, command_id, status=status, now=now, step=step, result=result)

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Cancel a queued command; ask the claimant of a claimed one to abandon it."""
        with self._made_control(run_id) as db:
            return cancel_command(db, run_id, command_id, now=now, result=result)

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Insert or update alerts, insert new messages; one transaction per run."""
        runs = [alert.run_id for alert in alerts] + [message.run_id for message in messages]
        for run_id in dict.fromkeys(runs):
            with self._made_control(run_id) as db:
                own = [alert for alert in alerts if alert.run_id == run_id]
                new = [message for message in messages if message.run_id == run_id]
                put_alerts(db, own, new, self._clock.now())

    def publish(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Store alerts and what is to be written about them, in one transaction."""
        with self._made_control(run_id) as db:
            return publish(db, run_id, alerts, compose, self._clock.now())

    def ledger(self, run_id: str) -> Ledger:
        """The run's alerts, messages and acknowledgements at one moment."""
        with self._control(run_id) as db:
            if db is None:
                return Ledger()
            with transaction(db):
                return read_ledger(db, run_id)

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Keep it, unless an earlier one covers it."""
        with self._made_control(acknowledgement.run_id) as db:
            return keep_acknowledgement(db, acknowledgement)

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Acknowledgements (of one run, or of all that can be read)."""
        return self._gathered(run_id, read_acknowledgements)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held by one caller at a time, whichever process it is in."""
        with self._made_store_wide() as db, transaction(db):
            yield

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Alerts (of one run, or of all that can be read), newest first."""
        gathered = self._gathered(run_id, read_alerts)
        return [alert for *_, alert in sorted(gathered, key=itemgetter(0, 1), reverse=True)]

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Return due pending messages without a lease, oldest first, leased until ``now + lease_s``; over all runs."""
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
            settle_message(db, message)

    def retry_message(self, message: OutboxMessage) -> None:
        """Make an unsent message due now."""
        with self._made_control(message.run_id) as db:
            retry_message(db, message.message_id)

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """All messages (of one run, or of all that can be read), oldest first."""
        return sorted(self._gathered(run_id, read_outbox), key=attrgetter("created_at"))

    def _lease(
        self, run_id: str, now: float, until: float, *, limit: int, channels: Sequence[str] | None
    ) -> list[OutboxMessage]:
        with self._control(run_id) as db:
            return [] if db is None else lease_messages(db, run_id, now, until=until, limit=limit, channels=channels)
