"""Store alerts, outgoing messages, acknowledgements and people's annotations in PostgreSQL; implements
``AlertStore``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, TypeVar

from psycopg import Rollback

from rlwatch.clock import Clock
from rlwatch.errors import RunNotFoundError, StoreBusyError, StoreError
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
    Silence,
)
from rlwatch.store.fields import ACKNOWLEDGEMENT, ALERT, AUDIT, COMMAND, MESSAGE, SILENCE, FieldTable
from rlwatch.store.postgres.connection import Connection, explained
from rlwatch.store.postgres.curating import edits_of
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.ownership import exclusive, wait_for
from rlwatch.store.postgres.rows import add, found, plain, put, record_of
from rlwatch.store.postgres.runrow import load
from rlwatch.store.postgres.server import Server
from rlwatch.store.sqlite.curating import curated
from rlwatch.store.sqlite.layout import is_gone, this_process

# Store silences, audit entries and answers to forecasts in PostgreSQL; implements ``AnswerStore``, in part
# ``AlertStore``.

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
                        UPDATE outbox SET lease_until = %(until)s, leased_by = %(by)s, touched_at = %(now)s,
                        next_attempt_at = least(next_attempt_at, %(now)s) FROM taken
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
    """Return the next revision number of the run's alerts; other writers of them wait until the transaction is over."""
    row = db.execute(
        "INSERT INTO alert_book (run_id, revision) VALUES (%s, 1) "
        "ON CONFLICT (run_id) DO UPDATE SET revision = alert_book.revision + 1 RETURNING revision",
        (run_id,),
    ).fetchone()
    return 0 if row is None else int(row[0])


def _composed(compose: Composer, whole: Ledger, alerts: Sequence[Alert]) -> list[OutboxMessage]:
    """Return the new messages that ``compose`` makes of the stored alerts with the new ``alerts`` among them."""
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


# Store commands to trainers as rows of PostgreSQL; implements ``CommandStore``.

_COMMAND = ", ".join(("run_id", "extra", *COMMAND.columns))
_ANSWERS = tuple(status for status in CommandStatus if not status.open)


class CommandQueries(ABC):
    """Part of a store that holds people's commands to live runs. Subclasses open the transactions."""

    server: Server
    url: str

    @abstractmethod
    def snapshot(self, run_id: str) -> AbstractContextManager[Connection]:
        """Give a connection with a read-only snapshot, if the run exists. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _changing(self, run_id: str) -> AbstractContextManager[Connection]:
        """Open a transaction on a run that exists. Raises ``RunNotFoundError``."""

    def submit(self, command: Command) -> Command:
        """Store a command for a run; return it, or the stored one that has the same id or idempotency key.

        Raises ``RunNotFoundError``, and ``StoreBusyError`` if another process is storing the same command.
        """
        key = plain(command.idempotency_key)
        with self._changing(command.run_id) as db:
            add(db, COMMAND, command, run_id=command.run_id)
            tell(db, self.server.address, "commands", command.run_id)
            same = """WHERE run_id = %s AND (command_id = %s OR (idempotency_key = %s AND idempotency_key <> ''))
                ORDER BY id LIMIT 1"""
            kept = list(found(db, COMMAND, same, (command.run_id, command.command_id, key)))
        if not kept:  # inserted by another transaction that is not over: never with READ COMMITTED
            raise StoreBusyError(f"command {command.command_id!r} is being sent by another process; try again")
        return kept[0]

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Return the run's commands, oldest first; if ``status`` is given, only those in that status."""
        with self.snapshot(run_id) as db:
            which = "WHERE run_id = %s AND (%s::text IS NULL OR status = %s) ORDER BY id"
            return list(found(db, COMMAND, which, (run_id, status, status)))

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Expire the run's queued commands that are overdue at ``now`` (Unix seconds); claim and return the others.

        Rows are locked, so that each command is claimed by one process. Raises ``RunNotFoundError``.
        """
        late = "expires_at > 0 AND expires_at <= %(now)s"
        queued = "FROM command WHERE run_id = %(run)s AND status = 'queued'"
        with self.server.connection() as db:
            known = (
                db.made
                and db.execute(
                    f"SELECT EXISTS (SELECT 1 {queued}) FROM run WHERE run_id = %(run)s", {"run": run_id}
                ).fetchone()
            )
            if not known:
                raise RunNotFoundError(f"no run {run_id!r} in {self.url}; `rlwatch runs` lists what there is")
            if not known[0]:
                return []
            with db.transaction():
                rows = db.execute(
                    f"""UPDATE command SET
                        status = CASE WHEN {late} THEN 'expired' ELSE 'claimed' END,
                        claimed_at = CASE WHEN {late} THEN claimed_at ELSE %(now)s END,
                        finished_at = CASE WHEN {late} THEN %(now)s END
                        WHERE run_id = %(run)s AND status = 'queued' RETURNING id, {_COMMAND}""",
                    {"run": run_id, "now": float(now)},
                ).fetchall()
        taken = [record_of(COMMAND, row[1:]) for row in sorted(rows, key=lambda row: row[0])]
        return [command for command in taken if command.status is CommandStatus.CLAIMED]

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Store the final ``status`` and ``result`` of a claimed command; the first answer stays and is returned.

        ``now``: Unix seconds. ``step``: training step at which the command was done, or None. Raises ``StoreError`` for
        a status that is not final, an unclaimed command, or an unknown id.
        """
        if status not in _ANSWERS:
            answers = ", ".join(answer.value for answer in _ANSWERS)
            raise StoreError(f"a command is settled as one of {answers}, not as {status.value!r}")
        with self._changing(run_id) as db:
            db.execute(
                "UPDATE command SET status = %s, finished_at = %s, finished_step = %s, result = %s "
                "WHERE run_id = %s AND command_id = %s AND status IN ('claimed', 'cancelling')",
                (status.value, now, step, plain(result), run_id, command_id),
            )
            tell(db, self.server.address, "commands", run_id)
            command = _known_command(db, run_id, command_id)
        if command.status is CommandStatus.QUEUED:
            raise StoreError(f"command {command_id!r} is still queued: claim it before settling it")
        return command

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Cancel a queued command, or request the process that claimed it to abandon it; return the command as stored.

        ``now``: Unix seconds. ``result``: the reason. Raises ``StoreError`` if there is no such command.
        """
        with self._changing(run_id) as db:
            db.execute(
                "UPDATE command SET finished_at = CASE status WHEN 'queued' THEN %s::float8 END, result = %s, "
                "status = CASE status WHEN 'queued' THEN 'cancelled' ELSE 'cancelling' END "
                "WHERE run_id = %s AND command_id = %s AND status IN ('queued', 'claimed')",
                (now, plain(result), run_id, command_id),
            )
            tell(db, self.server.address, "commands", run_id)
            return _known_command(db, run_id, command_id)


def _known_command(db: Connection, run_id: str, command_id: str) -> Command:
    for command in found(db, COMMAND, "WHERE run_id = %s AND command_id = %s", (run_id, command_id)):
        return command
    raise StoreError(f"run {run_id!r} has no command {command_id!r}")
