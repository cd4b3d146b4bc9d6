"""Commands as rows: ``CommandStore``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from rlwatch.errors import RunNotFoundError, StoreBusyError, StoreError
from rlwatch.records import Command, CommandStatus
from rlwatch.store.postgres.connection import Connection, Row
from rlwatch.store.postgres.copying import plain
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.server import Server
from rlwatch.store.sqlite.rows import dumps, loads

_COMMAND = """command_id, kind, args, force, status, requested_by, why, idempotency_key, created_at, expires_at,
    claimed_at, finished_at, finished_step, result"""
_ANSWERS = tuple(status for status in CommandStatus if not status.open)


class Commands(ABC):
    """Wishes of people about live runs, over hooks that open a transaction."""

    server: Server
    url: str

    @abstractmethod
    def snapshot(self, run_id: str) -> AbstractContextManager[Connection]:
        """The tables as they are now, of a run that exists. Raises ``RunNotFoundError``."""

    @abstractmethod
    def _changing(self, run_id: str) -> AbstractContextManager[Connection]:
        """A transaction on a run that exists. Raises ``RunNotFoundError``."""

    def submit(self, command: Command) -> Command:
        """Insert, or return the command that already has this id or idempotency key."""
        c, key = command, plain(command.idempotency_key)
        with self._changing(command.run_id) as db:
            db.execute(
                f"INSERT INTO command (run_id, {_COMMAND}) VALUES (%s{', %s' * 14}) ON CONFLICT DO NOTHING",
                (
                    c.run_id,
                    c.command_id,
                    plain(c.kind),
                    dumps(c.args),
                    c.force,
                    c.status.value,
                    plain(c.requested_by),
                    plain(c.why),
                    key,
                    c.created_at,
                    c.expires_at,
                    c.claimed_at,
                    c.finished_at,
                    c.finished_step,
                    plain(c.result),
                ),
            )
            tell(db, self.server.address, "commands", c.run_id)
            row = db.execute(
                f"SELECT {_COMMAND} FROM command WHERE run_id = %s AND "
                "(command_id = %s OR (idempotency_key = %s AND idempotency_key <> '')) ORDER BY id LIMIT 1",
                (c.run_id, c.command_id, key),
            ).fetchone()
        if row is None:  # inserted by another transaction that is not over: never with READ COMMITTED
            raise StoreBusyError(f"command {c.command_id!r} is being sent by another process; try again")
        return _command(c.run_id, row)

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Commands of a run, oldest first."""
        with self.snapshot(run_id) as db:
            rows = db.execute(
                f"SELECT {_COMMAND} FROM command WHERE run_id = %s AND (%s::text IS NULL OR status = %s) ORDER BY id",
                (run_id, status, status),
            )
            return [_command(run_id, row) for row in rows]

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Expire overdue queued commands, take the rest; rows are locked, so that each has one taker."""
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
        taken = [_command(run_id, row[1:]) for row in sorted(rows, key=lambda row: row[0])]
        return [command for command in taken if command.status is CommandStatus.CLAIMED]

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Answer a claimed command; the first answer stays."""
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
        """Cancel what nobody has claimed; ask whoever has to let it go."""
        with self._changing(run_id) as db:
            db.execute(
                "UPDATE command SET finished_at = CASE status WHEN 'queued' THEN %s::float8 END, result = %s, "
                "status = CASE status WHEN 'queued' THEN 'cancelled' ELSE 'cancelling' END "
                "WHERE run_id = %s AND command_id = %s AND status IN ('queued', 'claimed')",
                (now, plain(result), run_id, command_id),
            )
            tell(db, self.server.address, "commands", run_id)
            return _known_command(db, run_id, command_id)


def _command(run_id: str, row: Row) -> Command:
    command_id, kind, args, force, status, *who_why_when = row
    return Command(command_id, run_id, kind, loads(args), force, CommandStatus(status), *who_why_when)


def _known_command(db: Connection, run_id: str, command_id: str) -> Command:
    row = db.execute(
        f"SELECT {_COMMAND} FROM command WHERE run_id = %s AND command_id = %s", (run_id, command_id)
    ).fetchone()
    if row is None:
        raise StoreError(f"run {run_id!r} has no command {command_id!r}")
    return _command(run_id, row)
