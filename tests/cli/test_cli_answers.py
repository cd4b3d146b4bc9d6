"""Waiting for what becomes of a command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlwatch.cli.command import POLL_S, wait_until_settled
from rlwatch.clock import ManualClock
from rlwatch.errors import StoreBusyError
from rlwatch.records import Command, CommandStatus

SENT = Command("c", "r", "reset-reference", created_at=100.0, expires_at=130.0)


class Desk:
    """A command store whose answers are given in turn; the last one stays."""

    def __init__(self, *answers: CommandStatus | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if answer is None:
            raise StoreBusyError("busy")
        return [replace(SENT, command_id="other"), replace(SENT, status=answer)]


def _wait(desk: Desk, wait_s: float, command: Command = SENT) -> tuple[Command, float]:
    clock = ManualClock(100.0)
    return wait_until_settled(desk, command, clock, clock.advance, wait_s), clock.now() - 100.0  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [CommandStatus.DONE, CommandStatus.REJECTED, CommandStatus.EXPIRED])
def test_the_answer_ends_the_wait(end: CommandStatus) -> None:
    """As soon as it is there."""
    command, waited = _wait(Desk(CommandStatus.QUEUED, CommandStatus.CLAIMED, end), 60.0)

    assert command.status is end
    assert waited == 3 * POLL_S


def test_without_waiting_the_store_is_not_asked() -> None:
    """Fire and forget."""
    desk = Desk(CommandStatus.DONE)

    assert _wait(desk, 0.0) == (SENT, 0.0)
    assert desk.asked == 0


def test_the_wait_ends_in_time_with_the_command_as_it_stands() -> None:
    """A claimed command may take longer than anybody waits."""
    command, waited = _wait(Desk(CommandStatus.CLAIMED), 2.2)

    assert command.status is CommandStatus.CLAIMED
    assert waited == pytest.approx(2.2)


def test_a_command_nobody_claimed_in_its_time_counts_as_expired() -> None:
    """Only the next claim would mark the row, and no trainer may ever come."""
    command, waited = _wait(Desk(CommandStatus.QUEUED), 60.0)

    assert command.status is CommandStatus.EXPIRED
    assert "no trainer" in command.result
    assert waited == 30.0


def test_a_busy_store_is_asked_again() -> None:
    """A lock held for a moment is no answer."""
    command, _ = _wait(Desk(None, None, CommandStatus.DONE), 60.0)

    assert command.status is CommandStatus.DONE


def test_a_settled_command_is_returned_at_once() -> None:
    """Submitting twice may find it done."""
    done = replace(SENT, status=CommandStatus.DONE)

    assert _wait(Desk(CommandStatus.QUEUED), 60.0, done) == (done, 0.0)
