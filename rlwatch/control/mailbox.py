"""Commands on their way to the training thread, and its answers on their way back.

The training thread only pops a deque. The writer thread polls the store (at most once a second), claims
what is queued, and settles what was answered; a busy store is tried again at the next poll.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from rlwatch.clock import Clock
from rlwatch.errors import ControlUnavailableError, StoreBusyError
from rlwatch.ports import CommandStore
from rlwatch.records import Command, CommandStatus
from rlwatch.redaction import redacted
from rlwatch.seam import Contained, words

POLL_S = 1.0
LONGEST = 10_000
"""Characters of an answer that are kept."""
DIED = "the process that claimed it ended before carrying it out; send it again if it is still wanted"
ENDED = "the run ended before it could be carried out"
SEVERAL_RANKS = (
    "this run has {world_size} ranks and a command must act on all of them at the same step; its training loop "
    "does not pass commands on to the other ranks"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a claimed command."""

    command: Command
    status: CommandStatus
    step: int | None
    result: str


@dataclass(slots=True)
class PendingCommand:
    """A claimed command in the hands of the training loop: carry it out, then say so, once."""

    command: Command
    _answer: Callable[[Answer], None] = field(repr=False)
    answered: bool = False

    @property
    def kind(self) -> str:
        """For example ``reset-reference``."""
        return self.command.kind

    @property
    def args(self) -> dict[str, object]:
        """The command's arguments."""
        return dict(self.command.args)

    @property
    def force(self) -> bool:
        """Whether the person overrules vetoes."""
        return self.command.force

    def done(self, result: str = "", *, step: int | None = None) -> None:
        """It was carried out at ``step``; ``result`` says what changed."""
        self._settle(CommandStatus.DONE, step, result)

    def reject(self, reason: str, *, step: int | None = None) -> None:
        """It will not be carried out, because of ``reason``."""
        self._settle(CommandStatus.REJECTED, step, reason)

    def _settle(self, status: CommandStatus, step: int | None, result: str) -> None:
        if not self.answered:
            self.answered = True
            self._answer(Answer(self.command, status, _step(step), _text(result)))


def _step(step: Any) -> int | None:
    """A loop's own step; None for what counts nothing."""
    with Contained(lambda _error: None):
        return index(step) if -(2**63) <= index(step) < 2**63 else None
    return None


def _text(result: Any) -> str:
    """A loop's own words, as a store can keep them."""
    return redacted(words(result)[:LONGEST].encode("utf-8", "backslashreplace").decode("utf-8"))


class Mailbox:
    """A sink that takes no records: it lives on the writer thread's ticks.

    Nothing is claimed before the training loop asked for commands once, so a loop that never does leaves
    commands queued, to expire visibly. With ``world_size > 1`` a command is rejected with the reason, unless
    the loop says that it passes them on to all ranks.
    """

    def __init__(self, store: CommandStore, run_id: str, clock: Clock, *, world_size: int = 1) -> None:
        self._store = store
        self._run_id = run_id
        self._clock = clock
        self._world_size = world_size
        self._inbox: deque[Command] = deque()
        self._answers: deque[Answer] = deque()
        self._unsettled: list[Answer] = []
        self._listening = False
        self._reaches_all = world_size == 1
        self._available = True
        self._swept = False
        self._poll_due = 0.0

    def take(self, *, for_all_ranks: bool = False) -> list[PendingCommand]:
        """Commands claimed since the last call; called on the training thread, never waits.

        ``for_all_ranks``: the caller passes them on to the other ranks.
        """
        self._reaches_all = for_all_ranks or self._world_size == 1
        self._listening = True
        taken = []
        while self._inbox:
            taken.append(PendingCommand(self._inbox.popleft(), self._answers.append))
        return taken

    def write(self, batch: object) -> None:
        """Records do not concern the mailbox."""

    def tick(self) -> None:
        """Settle answers at once; claim new commands at most once a second."""
        if not self._available:
            return
        try:
            self._settle_answers()
            self._poll()
        except StoreBusyError:
            return  # somebody else writes: the next poll will do
        except ControlUnavailableError:
            self._available = False

    def close(self) -> None:
        """Reject what was claimed and never taken, and settle what is left."""
        while self._inbox:
            self._answers.append(Answer(self._inbox.popleft(), CommandStatus.REJECTED, None, ENDED))
        self._poll_due = float("inf")
        self.tick()

    def _poll(self) -> None:
        now = self._clock.monotonic()
        if now < self._poll_due:
            return
        self._poll_due = now + POLL_S
        if not self._swept:
            self._sweep()
        if self._listening:
            for command in self._store.claim(self._run_id, self._clock.now()):
                self._receive(command)

    def _receive(self, command: Command) -> None:
        if not self._reaches_all:
            reason = SEVERAL_RANKS.format(world_size=self._world_size)
            self._answers.append(Answer(command, CommandStatus.REJECTED, None, reason))
        else:
            self._inbox.append(replace(command))

    def _sweep(self) -> None:
        """Commands an earlier process claimed and never answered are answered now."""
        for command in self._store.commands(self._run_id, CommandStatus.CLAIMED):
            self._answers.append(Answer(command, CommandStatus.REJECTED, None, DIED))
        self._swept = True

    def _settle_answers(self) -> None:
        while self._answers:
            self._unsettled.append(self._answers.popleft())
        while self._unsettled:
            answer = self._unsettled[0]
            self._store.settle(
                self._run_id,
                answer.command.command_id,
                answer.status,
                self._clock.now(),
                step=answer.step,
                result=answer.result,
            )
            del self._unsettled[0]
