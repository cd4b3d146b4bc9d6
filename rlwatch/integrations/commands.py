"""Execution of commands to a live run, in the training thread of every rank, at safe boundaries between steps.

The :class:`Controller` takes the run's commands at safe boundaries and answers each once. Below it are the handlers
that every trainer shares: pause and resume, ``undo``, ``stop``, ``save-checkpoint``, ``set-kl-coef``. Handlers with a
mechanism of their own have a module each, such as :mod:`rlwatch.integrations.reference` and
:mod:`rlwatch.integrations.learning_rate`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.commands import COMMAND_KINDS, ROLLBACK, SKIP_STEP, TAKE_SNAPSHOT, UNDO_LAST, handlers_of_plugins
from rlwatch.control.mailbox import LATE, PendingCommand
from rlwatch.control.policy import veto_save_checkpoint, veto_set_kl_coef
from rlwatch.control.rescue import RESCUE_EVENT, RescueCourse
from rlwatch.error_boundary import ErrorBoundary, call_or, described, log_message
from rlwatch.errors import RLWatchError
from rlwatch.integrations.ranks import OneRank, Ranks
from rlwatch.integrations.stages import clock_of
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command
from rlwatch.run.stages import PAUSED, StageClock

if TYPE_CHECKING:
    from rlwatch.run import Run

FAILED = "it failed inside the trainer; see the training log"
UNSHARED = "it could not be passed to all ranks: one of them does not answer"
STOPPED = "training was interrupted before it could be carried out"
BROKEN_OFF = "training was interrupted while it was being carried out"
RESET = "reset-reference"
REWARD = "reward/mean"
KL = "policy/kl_ref_k3"
"""KL divergence of the policy from the reference, nats per token; a reset of the reference makes it 0."""
ENDS_A_PAUSE = ("resume", "stop")
OnMetrics = Callable[[Mapping[str, float]], None]
Work = Callable[[Command], Mapping[str, JSON] | None]


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a command on this rank: the report of its handler, or the reason for a refusal.

    ``begun`` is True if all ranks accepted the command and started it.
    """

    report: Mapping[str, JSON] | None = None
    refusal: str | None = None
    begun: bool = False


@runtime_checkable
class Timed(Protocol):
    """Handler of commands that may have a limit, such as a step, at which another command has to end their effect."""

    def due(self, step: int) -> Command | None:
        """Return the command to execute after ``step`` because a limit was reached, else None.

        Every rank calls it at every boundary (point of training at which commands may be executed); rank 0's result is
        executed.
        """
        ...


@runtime_checkable
class Settled(Protocol):
    """Handler that learns the outcome of a command on all ranks, so that it can undo one that failed on another
    rank.
    """

    def settled(self, command: Command, refusal: str | None) -> None:
        """Keep the effect of ``command`` if all ranks executed it (``refusal`` is None).

        Undo it if a rank refused or failed.
        """
        ...


@runtime_checkable
class Resolving(Protocol):
    """Handler of commands with arguments that only rank 0 can resolve, such as "the last good snapshot"."""

    def resolved(self, command: Command) -> Command:
        """Return ``command`` with arguments such as ``"last-good"`` replaced by what they mean, such as the step of a
        snapshot.

        Rank 0 calls it before it shares the command with other ranks.
        """
        ...


class Controller:
    """Executor of the run's commands at safe boundaries (points of training at which commands may be executed), which
    answers every command exactly once.

    Every rank makes one at set-up and calls :meth:`obey` at the same boundaries. Pause, resume and undo work in every
    trainer and need no handler.

    Parameters
    ----------
    error_boundary
        Error boundary of the run: leads to the run, and contains rlwatch's own errors.
    handlers
        One handler for each kind of command that this trainer supports.
    ranks
        The ranks of the run: all execute a command, or none. None: one process.
    latest
        Returns the metrics measured last, by canonical name; ``policy/kl_ref_k3`` is recorded with a reset of the
        reference.
    hold
        State of a pause, which also waits while training is paused.
    measured
        For a trainer whose step is measured after its boundary: receives a step and a callback, and calls it with the
        metrics of that step once they are known, or with none. A reset of the reference is recorded then.
    """

    def __init__(
        self,
        error_boundary: ErrorBoundary,
        handlers: Sequence[CommandHandler],
        ranks: Ranks | None = None,
        latest: Callable[[], Mapping[str, float]] = dict,
        *,
        hold: PauseState | None = None,
        measured: Callable[[int, OnMetrics], None] | None = None,
    ) -> None:
        self._error_boundary = error_boundary
        self._measured = measured
        self._ranks = ranks or OneRank()
        self._latest = latest
        self._hold = hold or PauseState()
        self._undo = UndoLast(self._handler)
        always: list[CommandHandler] = [PauseCommand(self._hold), Resume(self._hold), self._undo]
        self._handlers = {handler.kind: handler for handler in (*_of_plugins(), *always, *handlers)}
        self._timed = [handler for handler in self._handlers.values() if isinstance(handler, Timed)]
        self._course: RescueCourse | None = None

    def obey(self, step: int) -> None:
        """Execute the waiting commands after ``step``. While training is paused, wait for more.

        Without commands the call only checks a queue in memory, with any number of ranks: no rank is notified or waited
        for. With commands all ranks meet in this call. If a rank has passed this step already, they meet at the next
        call that no rank has passed.
        """
        try:
            while True:
                due = self._due(step)
                while self._ranks.meets(step, wanted=self._wanted(due), staying=self._hold.on):
                    self._round(step, due)
                    due = []  # a command that failed is due again at the next boundary
                if not self._held():
                    return
                with (clock_of(self._error_boundary.run) or StageClock()).stage(PAUSED):
                    self._hold.wait()
        finally:
            self._ranks.leave()

    def begin(self, step: int) -> None:
        """Execute, before the first update after ``step``, the command that a permitted rescue policy (permission to
        save a failing run) requires from the start.

        That is the command to leave out updates whose gradient is not finite. In a run of several ranks it is executed
        at the first call of :meth:`obey` instead, because the ranks meet only there.
        """
        if self._ranks.world_size == 1:
            command = self._error_boundary.attempt("rescue", self._rescue, step)
            if command is not None:
                self._carry_out(command, step, None)

    def order(self, handler: CommandHandler, command: Command | None, step: int) -> Result | None:  # noqa: ARG002
        """Execute ``command`` of rank 0 with ``handler`` on every rank.

        Return the result, or None if rank 0 passed None. Every rank calls it at the same place, for instance when
        training starts; commands of other ranks are ignored.
        """
        result = None
        try:
            for shared in self._ranks.order([] if command is None or self._ranks.rank else [command]):
                result = self._result(shared, handler)
        finally:
            self._ranks.over()
        return result

    def _wanted(self, due: Sequence[Command]) -> bool:
        """Return True if this rank has commands to execute here: requested ones on rank 0 only, due ones on all ranks.
        (The clock of rank 0 decides when a pause is over.)
        """
        run = self._error_boundary.run
        waiting = run is not None and run.has_commands(for_all_ranks=self._ranks.world_size > 1)
        return waiting or bool(due if not self._ranks.rank else [one for one in due if one.kind not in ENDS_A_PAUSE])

    def _round(self, step: int, due: Sequence[Command]) -> None:
        run = self._error_boundary.run
        waiting = [] if run is None else run.commands(for_all_ranks=self._ranks.world_size > 1)
        pending = {waiter.command.command_id: waiter for waiter in waiting}
        asked = [waiter.command for waiter in waiting]
        asked += [] if self._ranks.rank else due
        if self._ranks.world_size > 1 and not self._ranks.rank:
            asked = [self._resolved(command) for command in asked]
        try:
            for command in self._ranks.share(asked):
                self._carry_out(command, step, pending.get(command.command_id))
            _reject_the_unanswered(waiting, UNSHARED, step)
        finally:
            self._ranks.over()
            _reject_the_unanswered(waiting, STOPPED, step)

    def _resolved(self, command: Command) -> Command:
        handler: object = self._handlers.get(command.kind)
        if not isinstance(handler, Resolving):
            return command
        return self._error_boundary.attempt(f"command {command.kind}", handler.resolved, command) or command

    def _due(self, step: int) -> list[Command]:
        """Return commands that end earlier ones with a time limit. A pause ends with the run at the latest."""
        run = self._error_boundary.run
        ended = run is None or not run.active
        due = [time_is_up()] if self._hold.on and (ended or self._hold.expired) else []
        for handler in self._timed:
            command = self._error_boundary.attempt("commands that are due", handler.due, step)
            due += [] if command is None else [command]
        command = self._error_boundary.attempt("rescue", self._rescue, step)
        return due if command is None else [*due, command]

    def _rescue(self, step: int) -> Command | None:
        """Return the next command of a permitted rescue policy, if any. Only on rank 0."""
        run = self._error_boundary.run
        policy = None if run is None else getattr(run, "rescue", None)
        if run is None or policy is None or self._ranks.rank:
            return None
        if self._course is None:
            good = getattr(self._handlers.get(ROLLBACK), "last_good", lambda: None)
            self._course = RescueCourse(policy, good, values=self._values, skipped=self._skipped)
        course = self._course
        latest = self._latest() if course.listens else {}
        command = course.next(step, run.health(), latest.get(REWARD), latest)
        self._ledger(run, course)
        return command

    def _values(self, kind: str) -> Mapping[str, JSON]:
        """Return the arguments that a command would set, as they are now; none where they cannot be read."""
        read = getattr(self._handlers.get(kind), "values", None)
        return {} if read is None else self._error_boundary.attempt(f"command {kind}", _read_or_none, read) or {}

    def _skipped(self) -> int:
        return int(getattr(self._handlers.get(SKIP_STEP), "skipped", 0))

    @staticmethod
    def _ledger(run: Run, course: RescueCourse) -> None:
        while course.notes:
            note = course.notes.popleft()
            outcome = "dry run" if course.policy.dry_run else "acts"
            body = {"policy": course.policy.name, "stage": note.stage.value, "why": note.why, "outcome": outcome}
            run.event(RESCUE_EVENT, note.step, **body, evidence=dict(note.evidence))

    def _held(self) -> bool:
        """Return True while training waits: all ranks hold, and none waits for one that is gone."""
        if self._hold.forsaken:
            self._hold.end()
        return self._hold.on

    def _carry_out(self, command: Command, step: int, pending: PendingCommand | None) -> None:
        """Check on every rank, then act on every rank; rank 0 records and answers."""
        before = {} if self._measured else dict(self._latest())
        result = self._result(command, self._handlers.get(command.kind), pending)
        if self._course is not None:
            self._course.answered(command, None if result.report is not None else result.refusal or FAILED)
        if result.report is not None:
            self._record(command, step, result.report, before)
        if pending is None:
            return
        if result.report is not None:
            pending.done(_answer(command, result.report, before), step=step)
        elif result.refusal == LATE:
            pending.expire(step=step)
        elif result.begun and FAILED in (result.refusal or FAILED):
            pending.fail(result.refusal or FAILED, step=step)
        else:
            pending.reject(result.refusal or FAILED, step=step)

    def _result(
        self, command: Command, handler: CommandHandler | None, pending: PendingCommand | None = None
    ) -> Result:
        """Check and execute on all ranks. Rank 0 decides, once all are ready, if it is too late to start."""
        if handler is None:
            unknown = self._unknown(command.kind)
            return Result(refusal=self._ranks.agree(unknown) or unknown)
        result = self._agreed(command, handler, pending)
        if isinstance(handler, Settled):
            self._error_boundary.attempt(f"command {command.kind}", handler.settled, command, result.refusal)
        if result.report is not None:
            self._undo.done(command, result.report)
        return result

    def _agreed(self, command: Command, handler: CommandHandler, pending: PendingCommand | None) -> Result:
        refusal = self._ranks.agree(self._tried(command, handler.check).refusal)
        refusal = refusal or self._ranks.agree(LATE if pending is not None and pending.expired else None)
        if refusal is not None:
            return Result(refusal=refusal)
        if pending is not None:
            pending.begun = True
        result = self._tried(command, handler)
        refusal = self._ranks.agree(result.refusal)
        return result if refusal is None else Result(refusal=refusal, begun=True)

    def _handler(self, kind: str) -> CommandHandler | None:
        return self._handlers.get(kind)

    def _tried(self, command: Command, work: Work) -> Result:
        """Return the outcome of ``work`` on the command. The error boundary contains its errors."""
        result = self._error_boundary.attempt(f"command {command.kind}", _result_of, work, command)
        return result or Result(refusal=FAILED)

    def _unknown(self, kind: str) -> str:
        known = ", ".join(sorted(kind for kind in self._handlers if kind != TAKE_SNAPSHOT))
        return f"this trainer cannot do {kind!r}: nothing here carries it out; it can: {known}"

    def _record(self, command: Command, step: int, report: Mapping[str, JSON], before: Mapping[str, float]) -> None:
        if command.kind in ENDS_A_PAUSE:
            self._hold.end()
        run = self._error_boundary.run
        if run is None or command.kind == TAKE_SNAPSHOT:
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


def _of_plugins() -> list[CommandHandler]:
    """Return handlers of plugin packages; one that cannot be created is reported and left out."""
    made = (call_or(plugin, partial(_left_out, kind)) for kind, plugin in handlers_of_plugins().items())
    return [handler for handler in made if handler is not None]


def _left_out(kind: str, error: Exception) -> CommandHandler | None:
    log_message(logging.WARNING, "rlwatch: command %r of a plugin left out: %s", kind, described(error))
    return None


def _result_of(work: Work, command: Command) -> Result:
    try:
        return Result(report=work(command) or {})
    except RLWatchError as refusal:
        return Result(refusal=str(refusal))


def _read_or_none(read: Callable[[], Mapping[str, JSON]]) -> Mapping[str, JSON]:
    try:
        return read()
    except RLWatchError:
        return {}


def _reject_the_unanswered(waiting: Sequence[PendingCommand], reason: str, step: int) -> None:
    for waiter in waiting:
        if waiter.begun:
            waiter.fail(BROKEN_OFF, step=step)
        else:
            waiter.reject(reason, step=step)


def _answer(command: Command, report: Mapping[str, JSON], before: Mapping[str, float]) -> str:
    """Word the answer: the handler's ``summary``, or else what it reported."""
    summary = str(report.get("summary", "")) or ", ".join(f"{name}: {value}" for name, value in report.items())
    kl = before.get(KL)
    return f"KL {kl:.4g} -> 0, {summary}" if command.kind == RESET and kl is not None else summary


# Pause and resume: the training thread waits at a safe boundary until a command or the time limit resumes it.

ROUND_S = 0.5
"""Seconds that a paused trainer waits between two polls for commands."""
GRACE_S = 30.0
"""Seconds after the planned end of a pause at which a rank without contact to rank 0 continues by itself."""


class PauseState:
    """State of a pause of training on one rank: its start and its latest end.

    ``clock`` and ``sleep`` replace the system's clock and ``time.sleep`` in tests.
    """

    def __init__(self, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._since: float | None = None
        self._until = 0.0

    @property
    def on(self) -> bool:
        """Return True while training is paused."""
        return self._since is not None

    @property
    def expired(self) -> bool:
        """Return True once the time limit of the pause has passed; rank 0 then resumes all ranks."""
        return self.on and self._clock.monotonic() >= self._until

    @property
    def forsaken(self) -> bool:
        """Return True if the pause should have ended ``GRACE_S`` ago, so that rank 0 must be gone or unreachable."""
        return self.on and self._clock.monotonic() >= self._until + GRACE_S

    def begin(self, minutes: float) -> None:
        """Begin a pause of at most ``minutes`` from now."""
        self._since = self._clock.monotonic()
        self._until = self._since + 60.0 * minutes

    def end(self) -> float:
        """End the pause and return how many seconds it lasted, 0 if there was none."""
        held = 0.0 if self._since is None else self._clock.monotonic() - self._since
        self._since = None
        return held

    def wait(self) -> None:
        """Sleep for one polling interval (``ROUND_S`` seconds)."""
        self._sleep(ROUND_S)


@dataclass(slots=True)
class PauseCommand:
    """Handler of the command ``pause`` with ``{"minutes": m}``, the longest pause. The controller does the waiting."""

    hold: PauseState
    kind: str = "pause"

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if training is paused already."""
        COMMAND_KINDS[self.kind].read(command.args)
        if self.hold.on:
            raise RLWatchError("training is paused already")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin the pause and return a report with the ``minutes`` and a ``summary``."""
        minutes = float(COMMAND_KINDS[self.kind].read(command.args)["minutes"])
        self.hold.begin(minutes)
        return {"minutes": minutes, "summary": f"paused for at most {minutes:g} minutes; resume or stop ends it"}


@dataclass(slots=True)
class Resume:
    """Handler of the command ``resume``, which ends a pause of training."""

    hold: PauseState
    kind: str = "resume"

    def check(self, command: Command) -> None:  # noqa: ARG002  (the signature of the port)
        """Raise ``RLWatchError`` if training is not paused."""
        if not self.hold.on:
            raise RLWatchError("training is not paused")

    def __call__(self, command: Command) -> Mapping[str, JSON]:  # noqa: ARG002  (the signature of the port)
        """End the pause and return a report with the seconds that it lasted (``held_s``) and a ``summary``."""
        held = round(self.hold.end(), 1)
        return {"held_s": held, "summary": f"resumed after {held:g} s"}


def time_is_up() -> Command:
    """Return the ``resume`` command that rank 0 sends to all ranks when a pause has reached its time limit."""
    return Command(uuid.uuid4().hex[:16], "", "resume", requested_by="rlwatch", why="the pause reached its time limit")


# Undoing the last command.

UNDO_MINUTES = 60.0
"""Minutes after a command during which it can be undone."""
PASSING = frozenset({"pause", "resume", "save-checkpoint", "sync-weights", TAKE_SNAPSHOT})
"""Kinds of commands that cannot be undone, and that do not prevent undoing an earlier command."""


class UndoLast:
    """Handler of the command ``undo``: it executes the command that reverts the last one.

    The handler of a command reports the command that reverts it under ``undo``, with its ``kind`` and ``args``. An
    undone command cannot be undone again. ``handler`` returns the handler of a kind of command, or None.
    """

    kind: str = UNDO_LAST

    def __init__(self, handler: Callable[[str], CommandHandler | None], clock: Clock | None = None) -> None:
        self._handler = handler
        self._clock = clock or SystemClock()
        self._last: Command | None = None
        self._back: Command | None = None
        self._at = 0.0
        self._done_by: tuple[CommandHandler, Command] | None = None

    def done(self, command: Command, report: Mapping[str, JSON]) -> None:
        """Remember ``command``, which was executed, and the command in its ``report`` that reverts it."""
        if command.kind in PASSING:
            return
        self._last, self._back, self._at = command, None, self._clock.monotonic()
        back = report.get("undo")
        if command.kind == self.kind or not isinstance(back, Mapping):
            return
        args = back.get("args")
        self._back = replace(
            command,
            command_id=f"{command.command_id}-undo",
            kind=str(back["kind"]),
            args=args if isinstance(args, Mapping) else {},
        )

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is nothing to undo, if it is too old, or if the command that reverts it is
        refused.
        """
        handler, back = self._found()
        handler.check(replace(back, force=command.force))

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Execute the command that reverts the last one.

        Return its handler's report, with the kind of the undone command as ``undid``.
        """
        handler, found = self._found()
        back = replace(found, force=command.force)
        undid = "" if self._last is None else self._last.kind
        self._done_by = handler, back
        report = {name: value for name, value in handler(back).items() if name != "undo"}
        return {**report, "undid": undid, "summary": f"{undid} taken back: {report.get('summary', 'done')}"}

    def settled(self, command: Command, refusal: str | None) -> None:  # noqa: ARG002  (the signature of the port)
        """Pass the outcome on all ranks (``refusal``, None for success) to the handler that executed the reverting
        command.
        """
        done_by, self._done_by = self._done_by, None
        if done_by is not None and isinstance(done_by[0], Settled):
            done_by[0].settled(done_by[1], refusal)

    def _found(self) -> tuple[CommandHandler, Command]:
        if self._last is None:
            raise RLWatchError("there is nothing to undo: no command was carried out")
        handler = None if self._back is None else self._handler(self._back.kind)
        if handler is None or self._back is None:
            raise RLWatchError(f"the last command, {self._last.kind}, cannot be taken back")
        if self._clock.monotonic() > self._at + 60.0 * UNDO_MINUTES:
            raise RLWatchError(f"the last command, {self._last.kind}, is more than {UNDO_MINUTES:g} minutes old")
        return handler, self._back


# Refusing a command that a trainer cannot execute.


@dataclass(slots=True)
class Refused:
    """Handler of a kind of command that a trainer cannot execute; it refuses with the ``reason``."""

    kind: str
    reason: str

    def check(self, command: Command) -> None:  # noqa: ARG002  (the signature of the port)
        """Raise ``RLWatchError`` with the reason why the command cannot be executed."""
        raise RLWatchError(self.reason)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Refuse like :meth:`check`; never called, because the check fails first."""
        self.check(command)
        return {}


# Stopping a training before its last step.


class Stop:
    """Handler of the command ``stop`` with ``{"save": "yes" | "no"}``.

    It is never vetoed: a person may always stop a run. ``end`` makes the trainer end after this step, with a checkpoint
    if its argument is True, and returns a message. It raises ``RLWatchError`` if the trainer cannot.
    """

    kind: str = "stop"

    def __init__(self, end: Callable[[bool], str]) -> None:
        self._end = end

    def check(self, command: Command) -> None:
        """Raise ``ConfigError`` if the command's arguments are not valid."""
        COMMAND_KINDS[self.kind].read(command.args)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Stop the training and return a report with a ``summary``."""
        saved = COMMAND_KINDS[self.kind].read(command.args)["save"]
        return {"save": saved, "summary": self._end(saved == "yes")}


# Asking a trainer for a checkpoint.


class SaveCheckpoint:
    """Handler of the command ``save-checkpoint``.

    Parameters
    ----------
    save
        Saves a checkpoint, or makes the trainer save one; returns a message, e.g. the path.
    kept
        Returns how many checkpoints the trainer keeps, None for all. Raises ``RLWatchError`` if the trainer cannot
        save.
    error_boundary
        Error boundary that leads to the run and its health. While the run collapses, a save may be vetoed.
    """

    kind: str = "save-checkpoint"

    def __init__(self, save: Callable[[], str], kept: Callable[[], int | None], error_boundary: ErrorBoundary) -> None:
        self._save = save
        self._kept = kept
        self._error_boundary = error_boundary

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if a save would delete an older checkpoint while the run collapses, unless ``command``
        is forced.
        """
        kept, run = self._kept(), self._error_boundary.run
        veto = None if run is None else veto_save_checkpoint(run.health(), kept=kept, force=command.force)
        if veto is not None:
            raise RLWatchError(veto)

    def __call__(self, command: Command) -> Mapping[str, JSON]:  # noqa: ARG002  (the signature of the port)
        """Save a checkpoint and return a report with a ``summary``."""
        return {"summary": self._save()}


# Changing the coefficient of the KL term of a live run.


class SetKLCoef:
    """Handler of the command ``set-kl-coef`` with ``{"value": v}``, v >= 0: change the coefficient of the KL term.

    Parameters
    ----------
    read
        Returns the current coefficient. Raises ``RLWatchError`` with the reason why it cannot be changed.
    write
        Sets the coefficient, which the trainer uses from then on.
    error_boundary
        Error boundary that leads to the run and its health. While the run collapses, a lower coefficient is vetoed.

    ``kept`` is the value set last, as ``{"value": v}``; None while the trainer's own configuration is in force.
    """

    kind: str = "set-kl-coef"

    def __init__(
        self, read: Callable[[], float], write: Callable[[float], None], error_boundary: ErrorBoundary
    ) -> None:
        self._read = read
        self._write = write
        self._error_boundary = error_boundary
        self.kept: Mapping[str, JSON] | None = None

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is no KL coefficient, or if the new one would weaken the KL penalty during a
        collapse.
        """
        new, old, run = (
            float(COMMAND_KINDS[self.kind].read(command.args)["value"]),
            self._read(),
            self._error_boundary.run,
        )
        veto = None if run is None else veto_set_kl_coef(run.health(), old=old, new=new, force=command.force)
        if veto is not None:
            raise RLWatchError(veto)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Set the coefficient.

        Return a report with the value ``before`` and ``after`` and the command that reverts the change.
        """
        new, old = float(COMMAND_KINDS[self.kind].read(command.args)["value"]), self._read()
        self._write(new)
        self.kept = {"value": new}
        summary, undo = f"KL coefficient {old:g} -> {new:g}", {"kind": self.kind, "args": {"value": old}}
        return {"before": old, "after": new, "summary": summary, "undo": undo}
