"""Store commands of a run on a network file system, where each node has a file of its own: ``CommandStore``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from rlwatch import codec
from rlwatch.errors import StoreError
from rlwatch.records import Command, CommandStatus
from rlwatch.store.sqlite.nodefiles import NodeFiles, gathered, records_of, words_of


class FileCommands(ABC):
    """Commands to a trainer that each node keeps in its own file. Only the run's trainer claims and settles commands.

    A command that is cancelled before it was claimed is ``cancelling`` until the trainer reports it as cancelled.
    """

    @abstractmethod
    def _said(self, run_id: str) -> NodeFiles:
        """Return the files of all nodes about a run. Raises ``RunNotFoundError``."""

    def submit(self, command: Command) -> Command:
        """Store the command in this node's file; return it, or the stored one that has the same id or idempotency key.

        Raises ``RunNotFoundError``.
        """
        files = self._said(command.run_id)
        with files.change() as mine:
            for known in self.commands(command.run_id):
                same_key = command.idempotency_key and known.idempotency_key == command.idempotency_key
                if known.command_id == command.command_id or same_key:
                    return known
            mine.setdefault("commands", {})[command.command_id] = words_of(command)
        return command

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Return the commands to a run from all nodes, oldest first; if ``status`` is given, only those in that status.

        Of two commands with the same idempotency key only the older counts.
        """
        nodes = self._said(run_id).all()
        asked = records_of(gathered(nodes, "commands"), Command)
        answers: dict[str, dict[str, Any]] = {}
        for command_id, answer in gathered(nodes, "answers"):
            if isinstance(answer, dict) and _later(answer, answers.get(command_id)):
                answers[command_id] = answer
        cancelled = dict(gathered(nodes, "cancelled"))
        found, keys = [], set[str]()
        for command in sorted(asked, key=lambda each: (each.created_at, each.command_id)):
            if command.idempotency_key and command.idempotency_key in keys:
                continue
            keys.add(command.idempotency_key)
            found.append(_with_answer(command, answers.get(command.command_id), cancelled))
        return [command for command in found if status in (None, command.status)]

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Claim the commands that wait for the run's trainer and return them.

        Commands that expired before ``now`` (Unix seconds) and commands that were cancelled are settled as such and not
        returned.
        """
        waiting = [command for command in self.commands(run_id) if command.status.open and command.claimed_at is None]
        if not waiting:
            return []
        taken = []
        with self._said(run_id).change() as mine:
            for command in waiting:
                if 0 < command.expires_at <= now:
                    answered = replace(command, status=CommandStatus.EXPIRED, finished_at=now)
                elif command.status is CommandStatus.CANCELLING:
                    answered = replace(command, status=CommandStatus.CANCELLED, finished_at=now)
                else:
                    answered = replace(command, status=CommandStatus.CLAIMED, claimed_at=now)
                    taken.append(answered)
                mine.setdefault("answers", {})[command.command_id] = words_of(answered)
        return taken

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Settle a claimed command: store its final ``status``, the ``step`` at which it was done and its ``result``.

        Returns the command as stored; if it was already settled, the first answer stays. Raises ``StoreError`` if
        ``status`` is not final, if the command was never claimed, or if there is no such command. ``now``: Unix
        seconds.
        """
        if status.open:
            answers = ", ".join(each.value for each in CommandStatus if not each.open)
            raise StoreError(f"a command is settled as one of {answers}, not as {status.value!r}")
        with self._said(run_id).change() as mine:
            command = self._known(run_id, command_id)
            if not command.status.open:
                return command
            if command.claimed_at is None:
                raise StoreError(f"command {command_id!r} is still queued: claim it before settling it")
            settled = replace(command, status=status, finished_at=now, finished_step=step, result=result)
            mine.setdefault("answers", {})[command_id] = words_of(settled)
        return settled

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Request that the run's trainer drops the command; the trainer answers at its next poll. Returns the command
        as it is now.

        A command that is already settled stays as it is. ``now``: Unix seconds. ``result``: the reason, for the
        command's log. Raises ``StoreError`` if there is no such command.
        """
        with self._said(run_id).change() as mine:
            command = self._known(run_id, command_id)
            if not command.status.open:
                return command
            mine.setdefault("cancelled", {})[command_id] = {"at": now, "result": result}
        return self._known(run_id, command_id)

    def _known(self, run_id: str, command_id: str) -> Command:
        for command in self.commands(run_id):
            if command.command_id == command_id:
                return command
        raise StoreError(f"run {run_id!r} has no command {command_id!r}")


def _later(answer: dict[str, Any], known: dict[str, Any] | None) -> bool:
    """Return True if ``answer`` replaces ``known``, the answer of an earlier trainer's node: settled precedes
    claimed.
    """
    if known is None or known.get("finished_at") is None:
        return True
    return answer.get("finished_at") is not None and answer["finished_at"] < known["finished_at"]


def _with_answer(command: Command, answer: dict[str, Any] | None, cancelled: dict[str, Any]) -> Command:
    if answer is not None:
        try:
            command = codec.decoded(Command, {**words_of(command), **answer})
        except (TypeError, ValueError):  # an answer of another program
            return command
    if command.status in (CommandStatus.QUEUED, CommandStatus.CLAIMED) and command.command_id in cancelled:
        cancellation = cancelled[command.command_id]
        result = str(cancellation.get("result", "")) if isinstance(cancellation, dict) else ""
        return replace(command, status=CommandStatus.CANCELLING, result=result)
    return command
