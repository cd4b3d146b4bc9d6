"""Transport of commands from the store to the training thread, and of their results back.

The training thread only pops a deque. The writer thread polls the store (at most once a second), claims queued
commands, and stores their results; a busy store is tried again at the next poll.
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
"""Seconds between two polls for commands, and between two where the store sends notifications."""
LONGEST = 10_000
"""Largest number of characters of a result that are stored."""
DIED = "the process that claimed it ended before it answered; look at the run before sending it again"
LATE = "its time was over before it could be begun; nothing was done"
ENDED = "the run ended before it could be carried out"
SEVERAL_RANKS = (
    "this run has {world_size} ranks and a command must act on all of them at the same step; its training loop "
    "does not pass commands on to the other ranks"
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Outcome of a claimed command: its final status, the step at which it was executed (if it was), and a text."""

    command: Command
    status: CommandStatus
    step: int | None
    result: str


@dataclass(slots=True)
class PendingCommand:
    """A command that the training loop has received, and that it must execute or refuse, with exactly one report.

    Call :meth:`done`, :meth:`reject`, :meth:`fail` or :meth:`expire`; further reports are ignored. ``answered``:
    whether a report was made.
    """

    command: Command
    _answer: Callable[[CommandResult], None] = field(repr=False)
    _late: Callable[[], bool] = field(default=lambda: False, repr=False)
    answered: bool = False
    begun: bool = False
    """Return whether the execution has begun: an error from then on is a failure, not a refusal."""

    @property
    def kind(self) -> str:
        """Kind of the command, for example ``reset-reference``."""
        return self.command.kind

    @property
    def args(self) -> dict[str, object]:
        """Arguments of the command by name."""
        return dict(self.command.args)

    @property
    def force(self) -> bool:
        """True if the user overrules vetoes."""
        return self.command.force

    @property
    def expired(self) -> bool:
        """True if it is too late to begin the command: then call :meth:`expire`."""
        return self._late()

    def done(self, result: str = "", *, step: int | None = None) -> None:
        """Report that the command was executed at ``step``; ``result`` describes the change."""
        self._settle(CommandStatus.DONE, step, result)

    def reject(self, reason: str, *, step: int | None = None) -> None:
        """Report that the command is refused because of ``reason``."""
        self._settle(CommandStatus.REJECTED, step, reason)

    def fail(self, reason: str, *, step: int | None = None) -> None:
        """Report that the execution of the command began and failed because of ``reason``."""
        self._settle(CommandStatus.FAILED, step, reason)

    def expire(self, *, step: int | None = None) -> None:
        """Report that the execution of the command did not begin in time."""
        self._settle(CommandStatus.EXPIRED, step, LATE)

    def _settle(self, status: CommandStatus, step: int | None, result: str) -> None:
        if not self.answered:
            self.answered = True
            self._answer(CommandResult(self.command, status, _step(step), _text(result)))


def _step(step: Any) -> int | None:
    """Return the step that a loop passed, as an integer; None if it is not one that fits 64 bits."""
    with Contained(lambda _error: None):
        return index(step) if -(2**63) <= index(step) < 2**63 else None
    return None


def _text(result: Any) -> str:
    """Return the result that a loop passed as text that a store can hold: redacted and shortened."""
    return redacted(words(result)[:LONGEST].encode("utf-8", "backslashreplace").decode("utf-8"))


@dataclass(frozen=True, slots=True)
class _Held:
    """A claimed command; ``until``: the latest time to begin it, on the monotonic clock of this process."""

    command: Command
    until: float


class Mailbox:
    """Passes commands of one run from the store to the training loop, and their results back, on the writer thread.

    It is a sink of the recorder that takes no rows and works in :meth:`tick`. Nothing is claimed before the training
    loop asks for commands for the first time: if it never does, commands remain queued and expire visibly. With
    ``world_size > 1`` commands are rejected, unless the loop promises to pass them on to all ranks. A claimed command
    waits here until the loop takes it, it expires, or a user cancels it; a lock, held briefly, orders these.

    Parameters
    ----------
    store, run_id
        Store of commands, and id of the run.
    clock
        Clock.
    world_size
        Number of ranks of the run.
    news
        Notifications of new commands; None: the store sends none.
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
        """Return the commands claimed since the last call; called on the training thread, never waits.

        The caller executes or refuses each command now. Expired commands are left out. ``for_all_ranks``: the caller
        passes them on to the other ranks.
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
        """Return whether :meth:`take` would return any command; this call does not count as a request for commands."""
        return bool(self._inbox)

    def listen(self, *, for_all_ranks: bool = False) -> None:
        """Note that the training loop will take users' commands, so that they are claimed in the store from now on.

        ``for_all_ranks``: the loop passes commands on to the other ranks.
        """
        self._reaches_all = for_all_ranks or self._world_size == 1
        self._listening = True

    def write(self, batch: object) -> None:
        """Do nothing: this sink takes no rows."""

    def tick(self) -> None:
        """Write the results of executed commands to the store at once; claim new commands at most once a second."""
        if not self._available:
            return
        try:
            self._let_go(self._is_late, lambda held: CommandResult(held.command, CommandStatus.EXPIRED, None, LATE))
            self._settle_answers()
            self._poll()
        except StoreBusyError:
            return  # another process writes: the next poll tries again
        except ControlUnavailableError:
            self._available = False

    def close(self) -> None:
        """Reject the commands that were claimed and never taken, and store the remaining results."""
        self._let_go(lambda _held: True, lambda held: CommandResult(held.command, CommandStatus.REJECTED, None, ENDED))
        self._poll_due = float("inf")
        self.tick()
        if self._news is not None:
            self._news.close()

    def _poll(self) -> None:
        now = self._clock.monotonic()
        notified = self._news is not None and self._news.arrived()
        if now < self._poll_due and not (notified and self._poll_due < inf):
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
        """Cancel the commands that a user cancelled and the loop has not taken; the loop answers those it has taken."""
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
        """Fail the commands that an earlier process claimed and never answered: their progress is unknown."""
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
