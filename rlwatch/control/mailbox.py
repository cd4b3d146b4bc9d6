"""Commands on their way to the training thread, and its answers on their way back.

The training thread only pops a deque. The writer thread polls the store (at most once a second), claims
what is queued, and settles what was answered; a busy store is tried again at the next poll.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import index
from threading import Lock
from typing import Any

from rlwatch.clock import Clock
from rlwatch.error_boundary import Contained, words
from rlwatch.errors import ControlUnavailableError, StoreBusyError
from rlwatch.ports import CommandStore, News
from rlwatch.records import Command, CommandStatus
from rlwatch.redaction import redacted

POLL_S, PUSHED_POLL_S = 1.0, 5.0
"""Seconds between two looks for commands, and where the store tells of them."""
LONGEST = 10_000
"""Characters of an answer that are kept."""
DIED = "the process that claimed it ended before it answered; look at the run before sending it again"
LATE = "its time was over before it could be begun; nothing was done"
ENDED = "the run ended before it could be carried out"
SEVERAL_RANKS = (
    "this run has {world_size} ranks and a command must act on all of them at the same step; its training loop "
    "does not pass commands on to the other ranks"
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Outcome of a claimed command."""

    command: Command
    status: CommandStatus
    step: int | None
    result: str


@dataclass(slots=True)
class PendingCommand:
    """A claimed command in the hands of the training loop: carry it out, then say so, once."""

    command: Command
    _answer: Callable[[CommandResult], None] = field(repr=False)
    _late: Callable[[], bool] = field(default=lambda: False, repr=False)
    answered: bool = False
    begun: bool = False
    """Whether the loop went at it: what ends it from then on is a failure, and no refusal."""

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
        """True if the person overrules vetoes."""
        return self.command.force

    @property
    def expired(self) -> bool:
        """True if it is too late to begin it: then :meth:`expire` is the only answer."""
        return self._late()

    def done(self, result: str = "", *, step: int | None = None) -> None:
        """It was carried out at ``step``; ``result`` says what changed."""
        self._settle(CommandStatus.DONE, step, result)

    def reject(self, reason: str, *, step: int | None = None) -> None:
        """It will not be carried out, because of ``reason``."""
        self._settle(CommandStatus.REJECTED, step, reason)

    def fail(self, reason: str, *, step: int | None = None) -> None:
        """It was begun, and ended because of ``reason``."""
        self._settle(CommandStatus.FAILED, step, reason)

    def expire(self, *, step: int | None = None) -> None:
        """It was not begun in its time."""
        self._settle(CommandStatus.EXPIRED, step, LATE)

    def _settle(self, status: CommandStatus, step: int | None, result: str) -> None:
        if not self.answered:
            self.answered = True
            self._answer(CommandResult(self.command, status, _step(step), _text(result)))


def _step(step: Any) -> int | None:
    """A loop's own step; None for what counts nothing."""
    with Contained(lambda _error: None):
        return index(step) if -(2**63) <= index(step) < 2**63 else None
    return None


def _text(result: Any) -> str:
    """A loop's own words, as a store can keep them."""
    return redacted(words(result)[:LONGEST].encode("utf-8", "backslashreplace").decode("utf-8"))


@dataclass(frozen=True, slots=True)
class _Held:
    """A claimed command; ``until``: when it must have been begun, by the monotonic clock of this process."""

    command: Command
    until: float


class Mailbox:
    """A sink that takes no records: it lives on the writer thread's ticks.

    Nothing is claimed before the training loop asked for commands once, so a loop that never does leaves
    commands queued, to expire visibly. With ``world_size > 1`` a command is rejected with the reason, unless
    the loop says that it passes them on to all ranks. What was claimed waits here until the loop takes it or its time
    is over, or somebody cancels it: a lock, held only to look, decides which comes first.
    """

    def __init__(
        self, store: CommandStore, run_id: str, clock: Clock, *, world_size: int = 1, news: News | None = None
    ) -> None:
        self._store = store
        self._news = news
        self._run_id = run_id
        self._clock = clock
        self._world_size = world_size
        self._inbox: list[_Held] = []
        self._inbox_lock = Lock()
        self._answers: deque[CommandResult] = deque()
        self._unsettled: list[CommandResult] = []
        self._listening = False
        self._reaches_all = world_size == 1
        self._available = True
        self._swept = False
        self._poll_due = 0.0

    def take(self, *, for_all_ranks: bool = False) -> list[PendingCommand]:
        """Commands claimed since the last call; called on the training thread, never waits.

        Each is begun now or answered. One that is too late is not given. ``for_all_ranks``: the caller passes them on
        to the other ranks.
        """
        self.listen(for_all_ranks=for_all_ranks)
        if not self._inbox:
            return []
        with self._inbox_lock:
            held, self._inbox = self._inbox, []
        pending = [PendingCommand(each.command, self._answers.append, partial(self._is_late, each)) for each in held]
        for waiter in pending:
            if waiter.expired:
                waiter.expire()
        return [waiter for waiter in pending if not waiter.answered]

    def waiting(self) -> bool:
        """True if :meth:`take` would return any; they stay, and it does not count as asking for them."""
        return bool(self._inbox)

    def listen(self, *, for_all_ranks: bool = False) -> None:
        """The training loop asks for commands, and will take what waits; see :meth:`take`."""
        self._reaches_all = for_all_ranks or self._world_size == 1
        self._listening = True

    def write(self, batch: object) -> None:
        """Records do not concern the mailbox."""

    def tick(self) -> None:
        """Settle answers at once; claim new commands at most once a second."""
        if not self._available:
            return
        try:
            self._let_go(self._is_late, lambda held: CommandResult(held.command, CommandStatus.EXPIRED, None, LATE))
            self._settle_answers()
            self._poll()
        except StoreBusyError:
            return  # somebody else writes: the next poll will do
        except ControlUnavailableError:
            self._available = False

    def close(self) -> None:
        """Reject what was claimed and never taken, and settle what is left."""
        self._let_go(lambda _held: True, lambda held: CommandResult(held.command, CommandStatus.REJECTED, None, ENDED))
        self._poll_due = float("inf")
        self.tick()
        if self._news is not None:
            self._news.close()

    def _poll(self) -> None:
        now = self._clock.monotonic()
        told = self._news is not None and self._news.arrived()
        if now < self._poll_due and not (told and self._poll_due < inf):
            return
        self._poll_due = now + (POLL_S if self._news is None else PUSHED_POLL_S)
        if not self._swept:
            self._sweep()
        if self._inbox:
            self._cancel()
        if self._listening:
            for command in self._store.claim(self._run_id, self._clock.now()):
                self._receive(command)

    def _receive(self, command: Command) -> None:
        if not self._reaches_all:
            reason = SEVERAL_RANKS.format(world_size=self._world_size)
            self._answers.append(CommandResult(command, CommandStatus.REJECTED, None, reason))
        else:
            left = command.expires_at - self._clock.now() if command.expires_at > 0 else inf
            with self._inbox_lock:
                self._inbox.append(_Held(replace(command), self._clock.monotonic() + left))

    def _is_late(self, held: _Held) -> bool:
        return self._clock.monotonic() >= held.until

    def _cancel(self) -> None:
        """Let go of what somebody wants back and the loop has not taken; what it has taken, it answers."""
        wanted = {each.command_id: each for each in self._store.commands(self._run_id, CommandStatus.CANCELLING)}
        self._let_go(
            lambda held: held.command.command_id in wanted,
            lambda held: CommandResult(
                held.command, CommandStatus.CANCELLED, None, wanted[held.command.command_id].result
            ),
        )
        self._settle_answers()

    def _let_go(self, which: Callable[[_Held], bool], answer: Callable[[_Held], CommandResult]) -> None:
        if not self._inbox:
            return
        with self._inbox_lock:
            gone = [held for held in self._inbox if which(held)]
            self._inbox = [held for held in self._inbox if held not in gone]
        self._answers.extend(answer(held) for held in gone)

    def _sweep(self) -> None:
        """Commands an earlier process claimed and never answered are answered now: nobody knows how far it came."""
        for status in (CommandStatus.CLAIMED, CommandStatus.CANCELLING):
            for command in self._store.commands(self._run_id, status):
                self._answers.append(CommandResult(command, CommandStatus.FAILED, None, DIED))
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
