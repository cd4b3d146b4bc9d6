"""Alerts and the outbox as rows, over an open connection to ``control.db``."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from rlwatch.ports import Composer
from rlwatch.records import Acknowledgement, Alert, AlertState, Ledger, OutboxMessage, OutboxStatus, Severity
from rlwatch.store.sqlite import owner
from rlwatch.store.sqlite.codec import dumps, loads, plain
from rlwatch.store.sqlite.migrations import transaction

_ALERTS = """SELECT seen_at, id, alert_id, rule, kind, severity, state, onset_step, step, message, reason, detector,
             evidence, fired_at, resolved_step, resolved_at FROM alert ORDER BY id DESC"""
_PUT = """INSERT INTO alert VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
          ON CONFLICT (alert_id) DO UPDATE SET rule = excluded.rule, kind = excluded.kind,
          severity = excluded.severity, state = excluded.state, onset_step = excluded.onset_step,
          step = excluded.step, message = excluded.message, reason = excluded.reason, detector = excluded.detector,
          evidence = excluded.evidence, fired_at = excluded.fired_at, resolved_step = excluded.resolved_step,
          resolved_at = excluded.resolved_at"""
_MESSAGES = """SELECT message_id, alert_id, channel, payload, status, attempts, next_attempt_at, lease_until,
               last_error, created_at, sent_at FROM outbox """
_DUE = (
    "FROM outbox WHERE status = 'pending' AND ((next_attempt_at <= ?1 AND (lease_until <= ?1 "
    "OR leased_by IN ({gone}))) OR touched_at > ?1 + 1)"
)


def put(db: sqlite3.Connection, alerts: Sequence[Alert], messages: Sequence[OutboxMessage], now: float) -> None:
    """Insert or update the alerts of one run, insert its new messages: one transaction."""
    with transaction(db):
        _insert(db, alerts, messages, now)


def tell(
    db: sqlite3.Connection, run_id: str, alerts: Sequence[Alert], compose: Composer, now: float
) -> list[OutboxMessage]:
    """Insert or update alerts, then what ``compose`` makes of the run's ledger; returns what was new."""
    with transaction(db):
        _insert(db, alerts, (), now)
        whole = ledger(db, run_id)
        known = {message.message_id for message in whole.messages}
        made = {message.message_id: message for message in compose(whole) if message.message_id not in known}
        _insert(db, (), list(made.values()), now)
    return list(made.values())


def ledger(db: sqlite3.Connection, run_id: str) -> Ledger:
    """The run's alerts, messages and acknowledgements, newest last."""
    newest_first = [alert for *_, alert in rows_of_alerts(db, run_id)]
    return Ledger(tuple(newest_first[::-1]), tuple(outbox(db, run_id)), tuple(acknowledgements(db, run_id)))


def acknowledge(db: sqlite3.Connection, acknowledgement: Acknowledgement) -> Acknowledgement:
    """Keep it, unless an earlier one of the alert covers it; returns what is kept."""
    with transaction(db):
        kept = [a for a in acknowledgements(db, acknowledgement.run_id) if a.alert_id == acknowledgement.alert_id]
        if kept and kept[0].severity.rank >= acknowledgement.severity.rank:
            return kept[0]
        a = acknowledgement
        row = (a.alert_id, plain(a.by), plain(a.why), a.at, a.severity.value)
        db.execute("INSERT OR REPLACE INTO acknowledgement VALUES (?, ?, ?, ?, ?)", row)
    return acknowledgement


def acknowledgements(db: sqlite3.Connection, run_id: str) -> list[Acknowledgement]:
    """Acknowledgements of the run, oldest first."""
    rows = db.execute("SELECT alert_id, acknowledged_by, why, at, severity FROM acknowledgement ORDER BY rowid")
    return [Acknowledgement(alert_id, run_id, by, why, at, Severity(level)) for alert_id, by, why, at, level in rows]


def rows_of_alerts(db: sqlite3.Connection, run_id: str) -> list[tuple[float, int, Alert]]:
    """Alerts of the run, newest first, each after the time and number to sort it by among other runs' ones."""
    return [(row[0], row[1], _alert(run_id, *row[2:])) for row in db.execute(_ALERTS)]


def lease(
    db: sqlite3.Connection, run_id: str, now: float, *, until: float, limit: int, channels: Sequence[str] | None
) -> list[OutboxMessage]:
    """Take due messages nobody holds, oldest first. The lock held from the first line on makes it one taker each.

    What a process held that is gone is free; so is what was last touched at a time that is still to come.
    """
    held = db.execute("SELECT DISTINCT leased_by FROM outbox WHERE status = 'pending' AND lease_until > ?", (now,))
    gone = [by for (by,) in held.fetchall() if owner.is_gone(by)]
    due_now, when = _DUE.format(gone=", ".join(f"?{k + 2}" for k in range(len(gone)))), (now, *gone)
    if db.execute(f"SELECT 1 {due_now} LIMIT 1", when).fetchone() is None:
        return []  # the usual poll takes no write lock
    with transaction(db):
        due = db.execute(f"SELECT id, channel {due_now} ORDER BY id", when).fetchall()
        taken = [number for number, channel in due if channels is None or channel in channels][:limit]
        db.executemany(
            "UPDATE outbox SET lease_until = ?, leased_by = ?, touched_at = ? WHERE id = ?",
            [(until, owner.this_process(), now, number) for number in taken],
        )
        return [_message(run_id, db.execute(_MESSAGES + "WHERE id = ?", (number,)).fetchone()) for number in taken]


def settle(db: sqlite3.Connection, message: OutboxMessage) -> None:
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


def retry(db: sqlite3.Connection, message_id: str) -> None:
    """Make an unsent message due now. Tried before, so that it is tried again however old it is."""
    with transaction(db):
        db.execute(
            "UPDATE outbox SET status = 'pending', next_attempt_at = 0, attempts = max(attempts, 1), "
            "lease_until = CASE status WHEN 'dead' THEN 0 ELSE lease_until END "
            "WHERE message_id = ? AND status != 'sent'",
            (message_id,),
        )


def outbox(db: sqlite3.Connection, run_id: str) -> list[OutboxMessage]:
    """All messages of the run, oldest first."""
    return [_message(run_id, row) for row in db.execute(_MESSAGES + "ORDER BY id")]


def waiting(db: sqlite3.Connection) -> bool:
    """Whether any message is still to be sent, due or not."""
    return db.execute("SELECT 1 FROM outbox WHERE status = 'pending' LIMIT 1").fetchone() is not None


def _insert(db: sqlite3.Connection, alerts: Sequence[Alert], messages: Sequence[OutboxMessage], now: float) -> None:
    db.executemany(_PUT, [_alert_row(alert, now) for alert in alerts])
    db.executemany(
        "INSERT INTO outbox (message_id, alert_id, channel, payload, status, attempts, next_attempt_at, lease_until, "
        "last_error, created_at, sent_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        [_message_row(message) for message in messages],
    )


def _alert_row(alert: Alert, now: float) -> tuple[object, ...]:
    return (
        alert.alert_id,
        now,
        plain(alert.rule),
        plain(alert.kind),
        alert.severity.value,
        alert.state.value,
        alert.onset_step,
        alert.step,
        plain(alert.message),
        plain(alert.reason),
        plain(alert.detector),
        dumps(alert.evidence),
        alert.fired_at,
        alert.resolved_step,
        alert.resolved_at,
    )


def _message_row(message: OutboxMessage) -> tuple[object, ...]:
    return (
        message.message_id,
        message.alert_id,
        plain(message.channel),
        dumps(message.payload),
        message.status.value,
        message.attempts,
        message.next_attempt_at,
        message.lease_until,
        plain(message.last_error),
        message.created_at,
        message.sent_at,
    )


def _alert(run_id: str, *row: Any) -> Alert:
    alert_id, rule, kind, severity, state, onset, step, message, reason, detector, evidence, *ends = row
    judged = (Severity(severity), AlertState(state), onset, step)
    return Alert(alert_id, run_id, rule, kind, *judged, message, reason, detector, loads(evidence), *ends)


def _message(run_id: str, row: tuple[Any, ...]) -> OutboxMessage:
    message_id, alert_id, channel, payload, status, *rest = row
    return OutboxMessage(message_id, run_id, alert_id, channel, loads(payload), OutboxStatus(status), *rest)
