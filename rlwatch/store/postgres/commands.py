"""Store commands to trainers as rows of PostgreSQL; implements ``CommandStore``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from rlwatch.errors import RunNotFoundError, StoreBusyError, StoreError
from rlwatch.records import Command, CommandStatus
from rlwatch.store.fields import COMMAND
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.copying import add, found, plain, record_of
from rlwatch.store.postgres.news import tell
from rlwatch.store.postgres.server import Server

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
