"""Commands, carried out in the training thread of every rank, where that is safe. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlwatch.control.mailbox import LATE, PendingCommand
from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.hold import Hold, Pause, Resume, time_is_up
from rlwatch.integrations.ranks import OneRank, Ranks
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam

FAILED = "it failed inside the trainer; see the training log"
UNSHARED = "it could not be passed to all ranks: one of them does not answer"
STOPPED = "training was interrupted before it could be carried out"
BROKEN_OFF = "training was interrupted while it was being carried out"
RESET = "reset-reference"
KL = "policy/kl_ref_k3"
"""To the reference, nats per token; what a reset makes 0."""
ENDS_A_PAUSE = ("resume", "stop")
Told = Callable[[Mapping[str, float]], None]
Work = Callable[[Command], Mapping[str, JSON] | None]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a command on this rank: a report, or the reason for a refusal; ``begun``: all ranks went at it."""

    report: Mapping[str, JSON] | None = None
    refusal: str | None = None
    begun: bool = False


@runtime_checkable
class Timed(Protocol):
    """A handler whose commands may have a time limit."""

    def due(self, step: int) -> Command | None:
        """The command to carry out now because a limit was reached; asked at every boundary. Rank 0's counts."""
        ...


class Controller:
    """Takes the run's commands at safe boundaries and answers every one of them, once.

    Every rank makes one at set-up and calls :meth:`obey` at the same boundaries. Pause and resume work in every
    trainer and need no handler.

    Parameters
    ----------
    seam
        What the run is reached through, and what our failures end at.
    handlers
        One for each kind of command this trainer can carry out.
    ranks
        The other ranks: all carry a command out, or none.
    latest
        The metrics measured last, by canonical name; ``policy/kl_ref_k3`` is told of a reset.
    measured
        For a trainer whose step is measured after its boundary: given a step, calls back with its metrics once they are
        known, or with none. A reset is recorded then.
    hold
        Who waits while training is paused.
    """

    def __init__(
        self,
        seam: Seam,
        handlers: Sequence[CommandHandler],
        ranks: Ranks | None = None,
        latest: Callable[[], Mapping[str, float]] = dict,
        *,
        hold: Hold | None = None,
        measured: Callable[[int, Told], None] | None = None,
    ) -> None:
        self._seam = seam
        self._measured = measured
        self._ranks = ranks or OneRank()
        self._latest = latest
        self._hold = hold or Hold()
        always: list[CommandHandler] = [Pause(self._hold), Resume(self._hold)]
        self._handlers = {handler.kind: handler for handler in (*always, *handlers)}
        self._timed = [handler for handler in self._handlers.values() if isinstance(handler, Timed)]

    def obey(self, step: int) -> None:
        """Carry out what waits, at ``step``, which has ended; while training is paused, wait for more.

        With nothing to do it costs a look at a queue in memory, however many ranks there are: nobody is told or waited
        for. With commands all ranks meet, here or, where one has passed already, at the next boundary none has passed.
        """
        try:
            while True:
                due = self._due(step)
                while self._ranks.meets(step, wanted=self._wanted(due), staying=self._hold.on):
                    self._round(step, due)
                    due = []  # what could not be done is due at the next boundary, too
                if not self._held():
                    return
                self._hold.wait()
        finally:
            self._ranks.leave()

    def order(self, handler: CommandHandler, command: Command | None, step: int) -> Result | None:  # noqa: ARG002
        """Let every rank carry out with ``handler`` what rank 0 decided by itself; None if it decided nothing.

        Every rank calls it at the same place; the ``command`` of rank 0 counts.
        """
        result = None
        try:
            for shared in self._ranks.order([] if command is None or self._ranks.rank else [command]):
                result = self._result(shared, handler)
        finally:
            self._ranks.over()
        return result

    def _wanted(self, due: Sequence[Command]) -> bool:
        """Whether this rank knows of something to do here: of what people ask only rank 0, of what is due at a step
        all. (When a pause is over is for the clock of rank 0 to say.)
        """
        run = self._seam.run
        waiting = run is not None and run.has_commands(for_all_ranks=self._ranks.world_size > 1)
        return waiting or bool(due if not self._ranks.rank else [one for one in due if one.kind not in ENDS_A_PAUSE])

    def _round(self, step: int, due: Sequence[Command]) -> None:
        run = self._seam.run
        waiting = [] if run is None else run.commands(for_all_ranks=self._ranks.world_size > 1)
        pending = {waiter.command.command_id: waiter for waiter in waiting}
        asked = [waiter.command for waiter in waiting]
        asked += [] if self._ranks.rank else due
        try:
            for command in self._ranks.share(asked):
                self._carry_out(command, step, pending.get(command.command_id))
            _reject_the_unanswered(waiting, UNSHARED, step)
        finally:
            self._ranks.over()
            _reject_the_unanswered(waiting, STOPPED, step)

    def _due(self, step: int) -> list[Command]:
        """Commands nobody sent: what an earlier one set a time limit to. A pause ends with the run at the latest."""
        run = self._seam.run
        ended = run is None or not run.active
        due = [time_is_up()] if self._hold.on and (ended or self._hold.expired) else []
        for handler in self._timed:
            command = self._seam.attempt("commands that are due", handler.due, step)
            due += [] if command is None else [command]
        return due

    def _held(self) -> bool:
        """Whether training still waits: every rank was told so, and none waits for one that is gone."""
        if self._hold.forsaken:
            self._hold.end()
        return self._hold.on

    def _carry_out(self, command: Command, step: int, pending: PendingCommand | None) -> None:
        """Check on every rank, then act on every rank; rank 0 records and answers."""
        before = {} if self._measured else dict(self._latest())
        result = self._result(command, self._handlers.get(command.kind), pending)
        if result.report is not None:
            self._record(command, step, result.report, before)
        if pending is None:
            return
        if result.report is not None:
            pending.done(_words(command, result.report, before), step=step)
        elif result.refusal == LATE:
            pending.expire(step=step)
        elif result.begun and FAILED in (result.refusal or FAILED):
            pending.fail(result.refusal or FAILED, step=step)
        else:
            pending.reject(result.refusal or FAILED, step=step)

    def _result(
        self, command: Command, handler: CommandHandler | None, pending: PendingCommand | None = None
    ) -> Result:
        """What became of it. Whether it is too late to begin is asked when all ranks are ready, and rank 0 says."""
        if handler is None:
            unknown = self._unknown(command.kind)
            return Result(refusal=self._ranks.agree(unknown) or unknown)
        refusal = self._ranks.agree(self._tried(command, handler.check).refusal)
        refusal = refusal or self._ranks.agree(LATE if pending is not None and pending.expired else None)
        if refusal is not None:
            return Result(refusal=refusal)
        if pending is not None:
            pending.begun = True
        result = self._tried(command, handler)
        refusal = self._ranks.agree(result.refusal)
        return result if refusal is None else Result(refusal=refusal, begun=True)

    def _tried(self, command: Command, work: Work) -> Result:
        """What ``work`` made of the command. Its own failures end at the seam."""
        result = self._seam.attempt(f"command {command.kind}", _result_of, work, command)
        return result or Result(refusal=FAILED)

    def _unknown(self, kind: str) -> str:
        known = ", ".join(sorted(self._handlers))
        return f"this trainer cannot do {kind!r}: nothing here carries it out; it can: {known}"

    def _record(self, command: Command, step: int, report: Mapping[str, JSON], before: Mapping[str, float]) -> None:
        if command.kind in ENDS_A_PAUSE:
            self._hold.end()
        run = self._seam.run
        if run is None:
            return
        who = {"by": command.requested_by, "why": command.why, "id": command.command_id}
        if command.kind == RESET:

            def record(measured: Mapping[str, float]) -> None:
                run.event("reference_reset", step, **{**report, **who, "kl_before": measured.get(KL)})

            if self._measured is None:
                record(before)
            else:
                self._measured(step, record)
        else:
            run.event("command", step, command=command.kind, args=dict(command.args), report=dict(report), **who)


def _result_of(work: Work, command: Command) -> Result:
    try:
        return Result(report=work(command) or {})
    except RLWatchError as refusal:
        return Result(refusal=str(refusal))


def _reject_the_unanswered(waiting: Sequence[PendingCommand], reason: str, step: int) -> None:
    for waiter in waiting:
        if waiter.begun:
            waiter.fail(BROKEN_OFF, step=step)
        else:
            waiter.reject(reason, step=step)


def _words(command: Command, report: Mapping[str, JSON], before: Mapping[str, float]) -> str:
    """The answer for people: the handler's ``summary``, or else what it reported."""
    summary = str(report.get("summary", "")) or ", ".join(f"{name}: {value}" for name, value in report.items())
    kl = before.get(KL)
    return f"KL {kl:.4g} -> 0, {summary}" if command.kind == RESET and kl is not None else summary
