"""Waiting for what becomes of a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlwatch.clock import Clock
from rlwatch.errors import StoreBusyError
from rlwatch.ports import CommandStore
from rlwatch.records import Command, CommandStatus

POLL_S = 0.5


def wait_until_settled(
    store: CommandStore, command: Command, clock: Clock, sleep: Callable[[float], None], wait_s: float
) -> Command:
    """The command as it stands once it is settled, or after ``wait_s`` seconds.

    One that nobody claimed in its time counts as expired, though its row is marked only by the next claim.
    """
    deadline = clock.monotonic() + wait_s
    while command.status.open and clock.monotonic() < deadline:
        sleep(min(POLL_S, max(0.0, deadline - clock.monotonic())))
        command = _again(store, command)
        if command.status is CommandStatus.QUEUED and 0 < command.expires_at <= clock.now():
            return replace(command, status=CommandStatus.EXPIRED, result="no trainer claimed it in time")
    return command


def _again(store: CommandStore, command: Command) -> Command:
    try:
        rows = store.commands(command.run_id)
    except StoreBusyError:
        return command
    return next((row for row in rows if row.command_id == command.command_id), command)
