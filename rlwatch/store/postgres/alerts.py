"""Store alerts, outgoing messages, acknowledgements and people's annotations in PostgreSQL; implements
``AlertStore``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from psycopg import Rollback

from rlwatch.ports import Composer
from rlwatch.records import (
    Acknowledgement,
    Alert,
    Ledger,
    OutboxMessage,
)
from rlwatch.store.fields import ACKNOWLEDGEMENT, ALERT, MESSAGE
from rlwatch.store.postgres.annotations import People, shown
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.copying import add, found, plain, put, record_of
from rlwatch.store.postgres.failures import explained
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.ownership import exclusive, wait_for
from rlwatch.store.sqlite.ownership import is_gone, this_process

_MESSAGE = ", ".join(("run_id", "extra", *MESSAGE.columns))
_OF_RUN = "WHERE %(run)s::text IS NULL OR run_id = %(run)s"
_FREE_TRIES = 3
"""Times that messages are composed without a lock on the run's alerts; then the lock is held meanwhile."""


class Alerts(People):
    """Part of a store that holds alerts, outgoing messages and acknowledgements, which several processes write."""

    _control_timeout_s: float
    url: str

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Insert or update alerts and insert messages whose id is new, in one transaction per run."""
        runs = [alert.run_id for alert in alerts] + [message.run_id for message in messages]
        for run_id in dict.fromkeys(runs):
            with self._changing(run_id) as db:
                _turn_page(db, run_id)
                tell(db, self.server.address, "alerts", run_id)
                own = [alert for alert in alerts if alert.run_id == run_id]
                new = [message for message in messages if message.run_id == run_id]
                _insert(db, run_id, own, new, self._clock.now())

    def publish(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Insert or update the run's alerts and the messages that ``compose`` returns, in one transaction.

        ``compose`` is called with the run's alerts, messages and acknowledgements, outside of a transaction. The result
        is written only if no other process wrote meanwhile; otherwise it is composed again. Returns the messages whose
        id was new.
        """
        for _ in range(_FREE_TRIES):
            with self.snapshot(run_id) as db:
                page, whole = _page(db, run_id), _ledger(db, run_id)
            made = _composed(compose, whole, alerts)
            with self._changing(run_id) as db:
                if _turn_page(db, run_id) != page + 1:
                    raise Rollback
                tell(db, self.server.address, "alerts", run_id)
                _insert(db, run_id, alerts, made, self._clock.now())
                return made
        with self._changing(run_id) as db:  # others write all the time: they wait this once
            _turn_page(db, run_id)
            tell(db, self.server.address, "alerts", run_id)
            made = _composed(compose, _ledger(db, run_id), alerts)
            _insert(db, run_id, alerts, made, self._clock.now())
        return made

    def ledger(self, run_id: str) -> Ledger:
        """Return the run's alerts, messages and acknowledgements at one moment, each newest last."""
        with self.snapshot(run_id) as db:
            return _ledger(db, run_id)

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Return the alerts of one run, or of all runs, newest first."""
        with self._looking(run_id) as db:
            return [] if db is None else shown(db, run_id, _alerts(db, run_id))[::-1]

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Store the acknowledgement of an alert, unless an earlier one has at least its severity; return the stored
        one.
        """
        a = acknowledgement
        with self._changing(a.run_id) as db:
            _turn_page(db, a.run_id)  # others wait
            tell(db, self.server.address, "alerts", a.run_id)
            kept = [each for each in _acknowledgements(db, a.run_id) if each.alert_id == a.alert_id]
            if kept and kept[0].severity.rank >= a.severity.rank:
                return kept[0]
            db.execute("DELETE FROM acknowledgement WHERE run_id = %s AND alert_id = %s", (a.run_id, a.alert_id))
            add(db, ACKNOWLEDGEMENT, a, run_id=a.run_id)
        return a

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Return the acknowledgements of alerts of one run, or of all runs."""
        with self._looking(run_id) as db:
            return [] if db is None else shown(db, run_id, _acknowledgements(db, run_id))

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """Return all outgoing messages of one run, or of all runs, oldest first."""
        with self._looking(run_id) as db:
            messages = [] if db is None else shown(db, run_id, _messages(db, run_id))
        return sorted(messages, key=attrgetter("created_at"))

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Lease due messages of all runs until ``now + lease_s`` (seconds) and return at most ``limit``, oldest first.

        ``channels``: only messages to these channels; None for all. A lease ends early if its process was on this
        machine and is gone, or if the message's last change lies in the future.
        """
        asked: dict[str, Any] = {"now": float(now), "until": now + lease_s, "by": this_process(), "limit": limit}
        asked["channels"] = None if channels is None else list(channels)
        due = """status = 'pending' AND ((next_attempt_at <= %(now)s AND (lease_until <= %(now)s
                 OR leased_by = ANY(%(gone)s))) OR touched_at > %(now)s + 1)
                 AND (%(channels)s::text[] IS NULL OR channel = ANY(%(channels)s))"""
        leased: list[OutboxMessage] = []
        with self.server.connection() as db:
            if limit < 1 or not self.server.is_made(db):
                return []
            held = "SELECT DISTINCT leased_by FROM outbox WHERE status = 'pending' AND lease_until > %s"
            asked["gone"] = [by for (by,) in db.execute(held, (now,)).fetchall() if is_gone(by)]
            waiting = db.execute(
                f"SELECT run_id FROM outbox WHERE {due} GROUP BY 1 ORDER BY min(created_at), min(id) LIMIT %(limit)s",
                asked,
            ).fetchall()
            for (run_id,) in waiting:
                if asked["limit"] < 1:
                    break
                rows = db.execute(
                    f"""WITH taken AS MATERIALIZED (SELECT id AS number FROM outbox WHERE run_id = %(run)s AND {due}
                        ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
                        UPDATE outbox SET lease_until = %(until)s, leased_by = %(by)s, touched_at = %(now)s FROM taken
                        WHERE run_id = %(run)s AND id = number RETURNING id, {_MESSAGE}""",
                    asked | {"run": run_id},
                ).fetchall()
                leased += [record_of(MESSAGE, row[1:]) for row in sorted(rows, key=lambda row: row[0])]
                asked["limit"] -= len(rows)
        return sorted(leased, key=attrgetter("created_at"))

    def settle_message(self, message: OutboxMessage) -> None:
        """Store the outcome of a delivery of ``message``, and end its lease (the claim of the process that sends it).

        Nothing changes if the stored message is no longer pending, or, for a failure, if it was leased anew meanwhile.
        """
        m = message
        with self._changing(m.run_id) as db:
            db.execute(
                """UPDATE outbox SET status = %(status)s, attempts = %(attempts)s, next_attempt_at = %(next)s,
                   last_error = %(error)s, sent_at = %(sent)s, lease_until = 0 WHERE run_id = %(run)s
                   AND message_id = %(id)s AND status = 'pending'
                   AND (%(status)s = 'sent' OR %(lease)s = 0 OR lease_until = %(lease)s)""",
                {
                    "status": m.status.value,
                    "attempts": m.attempts,
                    "next": m.next_attempt_at,
                    "error": plain(m.last_error),
                    "sent": m.sent_at,
                    "run": m.run_id,
                    "id": m.message_id,
                    "lease": float(m.lease_until),
                },
            )

    def retry_message(self, message: OutboxMessage) -> None:
        """Make an unsent message due now. It counts as tried before, so that it is tried again however old it is."""
        with self._changing(message.run_id) as db:
            db.execute(
                "UPDATE outbox SET status = 'pending', next_attempt_at = 0, attempts = greatest(attempts, 1), "
                "lease_until = CASE status WHEN 'dead' THEN 0 ELSE lease_until END "
                "WHERE run_id = %s AND message_id = %s AND status <> 'sent'",
                (message.run_id, message.message_id),
            )

    # Tables of the whole store

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold a lock of the whole store, over all processes, until the block is left; no transaction is open
        meanwhile.

        Raises ``StoreBusyError`` if another process holds it too long.
        """
        db = self.server.connect()
        try:
            with explained(self.server.address):
                wait_for(db, exclusive(self.server.address), self._control_timeout_s)
            yield
            with explained(self.server.address):
                db.execute("SELECT pg_advisory_unlock_all()")
        finally:
            db.close()


# The book of a run's alerts: who writes turns its page, so that who composes sees that others wrote.


def _page(db: Connection, run_id: str) -> int:
    row = db.execute("SELECT revision FROM alert_book WHERE run_id = %s", (run_id,)).fetchone()
    return 0 if row is None else int(row[0])


def _turn_page(db: Connection, run_id: str) -> int:
    """Return the next revision of the run's alerts; other writers of them wait until the transaction is over."""
    row = db.execute(
        "INSERT INTO alert_book (run_id, revision) VALUES (%s, 1) "
        "ON CONFLICT (run_id) DO UPDATE SET revision = alert_book.revision + 1 RETURNING revision",
        (run_id,),
    ).fetchone()
    return 0 if row is None else int(row[0])


def _composed(compose: Composer, whole: Ledger, alerts: Sequence[Alert]) -> list[OutboxMessage]:
    """Return the new messages that ``compose`` makes of the stored alerts and these."""
    known = {alert.alert_id: alert for alert in whole.alerts} | {alert.alert_id: alert for alert in alerts}
    written = {message.message_id for message in whole.messages}
    composed = compose(Ledger(tuple(known.values()), whole.messages, whole.acknowledgements))
    return list({message.message_id: message for message in composed if message.message_id not in written}.values())


def _ledger(db: Connection, run_id: str) -> Ledger:
    return Ledger(tuple(_alerts(db, run_id)), tuple(_messages(db, run_id)), tuple(_acknowledgements(db, run_id)))


def _insert(
    db: Connection, run_id: str, alerts: Sequence[Alert], messages: Sequence[OutboxMessage], now: float
) -> None:
    for alert in alerts:
        put(db, ALERT, alert, key="run_id, alert_id", run_id=run_id, seen_at=now)
    for message in messages:
        add(db, MESSAGE, message, run_id=run_id)


def _alerts(db: Connection, run_id: str | None) -> list[Alert]:
    """Return alerts in the order they were first stored, newest last."""
    return list(found(db, ALERT, f"{_OF_RUN} ORDER BY seen_at, id", {"run": run_id}))


def _messages(db: Connection, run_id: str | None) -> list[OutboxMessage]:
    return list(found(db, MESSAGE, f"{_OF_RUN} ORDER BY id", {"run": run_id}))


def _acknowledgements(db: Connection, run_id: str | None) -> list[Acknowledgement]:
    return list(found(db, ACKNOWLEDGEMENT, f"{_OF_RUN} ORDER BY id", {"run": run_id}))
