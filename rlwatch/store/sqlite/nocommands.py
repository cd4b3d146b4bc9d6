# ruff: noqa: ARG002  (the signatures are those of the port)
"""The ``CommandStore`` of a place that cannot carry commands: every method says why."""

from __future__ import annotations

from typing import NoReturn

from rlwatch.errors import ControlUnavailableError
from rlwatch.records import Command, CommandStatus


class NoCommands:
    """Raises ``ControlUnavailableError`` for whatever is asked."""

    _no_commands_because: str

    def submit(self, command: Command) -> Command:
        """Not here."""
        self._refuse()

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Not here."""
        self._refuse()

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Not here."""
        self._refuse()

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Not here."""
        self._refuse()

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Not here."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ControlUnavailableError(f"commands are not available {self._no_commands_because}")
