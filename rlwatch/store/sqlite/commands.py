"""Commands as rows, over an open connection to ``control.db``."""

from __future__ import annotations

import sqlite3
from typing import Any

from rlwatch.errors import StoreError
from rlwatch.records import Command, CommandStatus
from rlwatch.store.sqlite.codec import dumps, loads, plain
from rlwatch.store.sqlite.migrations import transaction

_READ = """SELECT command_id, kind, args, force, status, requested_by, why, idempotency_key, created_at, expires_at,
           claimed_at, finished_at, finished_step, result FROM command """
_ANSWERS = tuple(status for status in CommandStatus if not status.open)


def submit(db: sqlite3.Connection, command: Command) -> Command:
    """Insert, or find the one with this id or this idempotency key."""
    key = plain(command.idempotency_key)
    with transaction(db):
        db.execute(
            "INSERT INTO command VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (
                command.command_id,
                plain(command.kind),
                dumps(command.args),
                int(command.force),
                command.status.value,
                plain(command.requested_by),
                plain(command.why),
                key,
                command.created_at,
                command.expires_at,
                command.claimed_at,
                command.finished_at,
                command.finished_step,
                plain(command.result),
            ),
        )
        same = "WHERE command_id = ? OR (idempotency_key = ? AND idempotency_key <> '') ORDER BY id"
        return _command(command.run_id, db.execute(_READ + same, (command.command_id, key)).fetchone())


def commands(db: sqlite3.Connection, run_id: str, status: CommandStatus | None) -> list[Command]:
    """Commands in the order they came in."""
    if status is None:
        found = db.execute(_READ + "ORDER BY id")
    else:
        found = db.execute(_READ + "WHERE status = ? ORDER BY id", (status.value,))
    return [_command(run_id, row) for row in found]


def claim(db: sqlite3.Connection, run_id: str, now: float) -> list[Command]:
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
        return [_command(run_id, db.execute(_READ + "WHERE id = ?", (number,)).fetchone()) for number in queued]


def settle(
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
        command = _known(db, run_id, command_id)
    if command.status is CommandStatus.QUEUED:
        raise StoreError(f"command {command_id!r} is still queued: claim it before settling it")
    return command


def cancel(db: sqlite3.Connection, run_id: str, command_id: str, *, now: float, result: str) -> Command:
    """Cancel what nobody has claimed; ask whoever has claimed it to let it go."""
    with transaction(db):
        db.execute(
            "UPDATE command SET finished_at = CASE status WHEN 'queued' THEN ? END, result = ?, "
            "status = CASE status WHEN 'queued' THEN 'cancelled' ELSE 'cancelling' END "
            "WHERE command_id = ? AND status IN ('queued', 'claimed')",
            (now, plain(result), command_id),
        )
        return _known(db, run_id, command_id)


def _known(db: sqlite3.Connection, run_id: str, command_id: str) -> Command:
    row = db.execute(_READ + "WHERE command_id = ?", (command_id,)).fetchone()
    if row is None:
        raise StoreError(f"run {run_id!r} has no command {command_id!r}")
    return _command(run_id, row)


def _command(run_id: str, row: tuple[Any, ...]) -> Command:
    command_id, kind, args, force, status, *who_why_when = row
    return Command(command_id, run_id, kind, loads(args), bool(force), CommandStatus(status), *who_why_when)
