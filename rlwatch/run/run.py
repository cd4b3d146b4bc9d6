"""The run object to which a training loop logs. After set-up nothing here raises, blocks or waits."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from rlwatch.control.mailbox import Mailbox, PendingCommand
from rlwatch.control.policy import RunHealth
from rlwatch.control.rescue import RescuePolicy
from rlwatch.error_boundary import (
    call_or,
    copied,
    described,
    log_message,
    quick_way,
    seconds,
    sheltered,
    shown,
    suppress_errors,
    words,
)
from rlwatch.errors import FirstStepError
from rlwatch.ports import PendingRecord
from rlwatch.recorder.intake import LARGEST, Intake, Queued, a_batch, admit, step_index
from rlwatch.recorder.losses import Counters, spans_in_words
from rlwatch.recorder.writer import Writer
from rlwatch.records import Command, CompletionBatch, Event, RunInfo, RunState, SpikeBatch
from rlwatch.redaction import clean_name, plain, redacted
from rlwatch.run.stages import Span, Stage, StageClock, batch_of_spans, seconds_of

if TYPE_CHECKING:
    from rlwatch.monitor.step_judge import MonitorOutcome
    from rlwatch.run.machine import MachineThread


DEADLINE_S = 10.0
MOST_EARLY = 1000
"""Largest number of records without a step that are kept until it is known which run they belong to."""
FORKED = (
    "what a forked child logs is lost: only the process that called rlwatch.init records its run; log there, or begin "
    "a run of the child's own with rlwatch.init"
)
UNJUDGED = "the run ended before all its rows were judged: its next attempt, or `rlwatch watch STORE`, judges the rest"


class Stoppable(Protocol):
    """Interface of a thread that can be asked to end within a deadline."""

    def stop(self, deadline_s: float) -> object:
        """End within ``deadline_s`` seconds."""
        ...


class Link(Protocol):
    """Interface of one rank's connection to the other ranks.

    All but :meth:`close` is called on the training thread, at the same steps on every rank. ``latest`` has the last
    value of each metric of a whole step; it remains empty on ranks other than 0. A *boundary* is a point of the
    training loop at which commands may be executed.
    """

    latest: dict[str, float]

    @property
    def live(self) -> bool:
        """True while measurements of this rank are used, or may be soon."""
        ...

    def settled(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until it is known whether this rank is connected; return whether it is."""
        ...

    def send(self, parcel: PendingRecord) -> None:
        """Send this rank's measurements of a step.

        ``parcel``: the measurements, which may still be on their way from a device.
        """
        ...

    def meets(self, step: int, *, wanted: bool, staying: bool) -> bool:
        """Return whether all ranks meet at this boundary (point of training at which commands may be executed).

        ``step``: the optimizer step. ``wanted``: this rank knows that a command is due here. ``staying``: this rank
        remains here (it is paused). See :class:`rlwatch.integrations.ranks.Ranks`.
        """
        ...

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Return, on every rank, the users' commands that rank 0 has, at a point of training where all ranks meet.

        ``commands``: on rank 0, these commands; on other ranks not used.
        """
        ...

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Return, on every rank, the users' commands that rank 0 has, at a point where only rank 0 knows whether there
        are any.

        ``commands``: on rank 0, these commands; on other ranks not used.
        """
        ...

    def agree(self, refusal: str | None) -> str | None:
        """Vote on a command and return the verdict: None if no rank refuses, else the reason of one that does.

        ``refusal``: reason why this rank refuses; None: it agrees.
        """
        ...

    def over(self) -> None:
        """End the round of votes on the commands that were sent last."""
        ...

    def leave(self) -> None:
        """Note that this rank leaves the boundary (point at which commands may be executed) and trains on."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Disconnect; return False if ``deadline_s`` seconds were not enough to send the waiting steps."""
        ...

    def forked(self) -> None:
        """Close the copies of the parent's connections in a forked child process."""
        ...


class RunEngine:
    """The parts of a run that records; a run on ranks other than 0 has none.

    Parameters
    ----------
    intake
        Takes rows and events on the training thread.
    writer
        Thread that stores them.
    mailbox
        Passes commands to the training loop.
    finish
        Records the end of the run: state and reason.
    delivery
        Thread that sends alerts; None without channels.
    note_end
        Keeps the end of the run in the journal, in case the writer does not get to it.
    renamed
        Renames the metrics of a row by the user's ``[map]``; None: no renaming.
    """

    def __init__(
        self,
        intake: Intake,
        writer: Writer,
        mailbox: Mailbox,
        finish: Callable[[RunState, str], object],
        delivery: Stoppable | None = None,
        *,
        note_end: Callable[[RunState, str], object] = lambda state, reason: None,  # noqa: ARG005
        renamed: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self.intake = intake
        self.renamed = renamed
        """Renames the metrics of a row by the user's ``[map]``."""
        self.writer = writer
        self.mailbox = mailbox
        self.finish = finish
        self.delivery = delivery
        self.note_end = note_end


class Run:
    """One training run that is being recorded, as :func:`rlwatch.init` returns it.

    Usable as a context manager: its end finishes the run, as ``crashed`` if an exception passed.

    Parameters
    ----------
    info
        Description of the run.
    counters
        Counts lost and invalid records, and errors.
    rank, world_size
        Rank of this process, and number of ranks.

    >>> import rlwatch
    >>> with rlwatch.init(store="memory://run-doctest") as run:
    ...     run.log({"policy/entropy": 0.7}, step=1)
    """

    def __init__(self, info: RunInfo, counters: Counters, *, rank: int = 0, world_size: int = 1) -> None:
        self.info = info
        self.counters = counters
        self.rank = rank
        self.world_size = world_size
        self._engine: RunEngine | None = None
        self._link: Link | None = None
        self._health = RunHealth()
        self._ended = self._forked = False
        self._logs = False
        """Whether :meth:`log` was called."""
        self._quick: Callable[[Mapping[str, Any], int], bool] | None = None
        """Fast path of the intake for rows, set after a first row took the slow path and needed nothing else."""
        self.rescue: RescuePolicy | None = None
        """Permission to save the run without asking a person; None where no file gives it."""
        self._listeners: list[Callable[[MonitorOutcome], None]] = []
        self._machine: MachineThread | None = None
        self._undecided: Callable[[bool | None, int | None], None] | None = None
        self._deciding = threading.Lock()
        self._early: list[Queued] = []
        self._introduce = False
        self.stages = StageClock()
        """The stages of this process: see :meth:`stage`."""
        self.where = ""
        """Store for ``--store`` of a command; empty if commands cannot reach it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the identity of the run: a copy records nothing."""
        copied("run", "rlwatch.init begins one where it is wanted")
        return _inert, (self.info, self.rank, self.world_size)

    def attach(self, engine: RunEngine) -> None:
        """Begin to record with the parts in ``engine``; a run without them ignores all calls."""
        self._engine = engine

    def await_training(self, decide: Callable[[bool | None, int | None], None]) -> None:
        """Delay recording until it is known whether this training continues an earlier run.

        ``decide`` is called once, with whether training was resumed, if that is known, else with the first step. It
        then attaches the parts that record.
        """
        self._undecided = decide

    def decide(self, *, resumed: bool | None = None, step: int | None = None) -> None:
        """Decide, before the first record, whether this training continues an earlier run. Without effect if that is
        decided.

        Training waits only until the store is open. ``resumed``: whether it continues; None: decided by the first
        ``step``.
        """
        with self._deciding:
            decide, self._undecided = self._undecided, None
            if decide is None or self._ended:
                return
            call_or(
                lambda: decide(resumed, step),
                lambda error: self.counters.warn("errors", f"this run is not recorded: {described(error)}"),
            )
            early, self._early = self._early, []
        for item in early:
            self.offer(item)
        self._print_where()

    def introduce(self) -> None:
        """Print one line, once: the run, where it is recorded and how to view it."""
        self._introduce = True
        self._print_where()

    def _print_where(self) -> None:
        if not self._introduce or self._engine is None:
            return
        self._introduce = False
        attempt = f", attempt {self.info.attempt}" if self.info.attempt > 1 else ""
        next_ = f"; rlwatch show {self.info.run_id} --store {self.where}" if self.where else ""
        line = f"rlwatch: run {self.info.run_id}{attempt}, recorded in {self.where or 'memory'}{next_}"
        sheltered(lambda: print(line, file=sys.stderr), lambda _error: None)  # noqa: T201  (the user is to see it)

    def measure(self, machine: MachineThread) -> None:
        """Start to measure the machine: its metrics are added to each row, or to each step that is sent to rank 0."""
        self._machine = machine
        machine.start()

    def machine_found(self) -> Mapping[str, float]:
        """Return the mean of the machine's samples since the last call (metric -> value); empty if there is none."""
        return {} if self._machine is None else self._machine.taken()

    @property
    def active(self) -> bool:
        """True while this run records. False on ranks other than 0, in forked children and after the end: calls do
        nothing.
        """
        return (self._engine is not None or self._undecided is not None) and not self._ended

    def link(self, link: Link) -> None:
        """Use ``link`` as this rank's connection to the other ranks; see :func:`rlwatch.run.ranks.join`."""
        self._link = link

    @property
    def linked(self) -> bool:
        """True while each step is merged from several ranks: each rank must :meth:`send` its measurements."""
        return self._link is not None and not self._ended and self._link.live

    @property
    def measures(self) -> bool:
        """True while measurements of this process are used: it records them, or sends them to rank 0."""
        return self.active or self.linked

    @property
    def ranks(self) -> Link | None:
        """Connection to the other ranks; None without one, and after the end of the run."""
        return None if self._ended else self._link

    def send(self, parcel: PendingRecord) -> None:
        """Send this rank's measurements of a step to rank 0, while :attr:`linked`; every rank must do so for each step.

        ``parcel``: the measurements, which may still be on their way from a device.
        """
        if self._link is not None and not self._ended:
            self._link.send(parcel)
        else:
            self.lose_forked()

    def offer(self, item: Queued) -> None:
        """Queue a row, event or batch for the writer thread, if this run records."""
        if self._undecided is not None:
            at = getattr(item, "step", None)
            if at is None and len(self._early) < MOST_EARLY:
                self._early.append(item)
                return
            self.decide(step=at)
        if self._engine is not None and not self._ended:
            self._engine.intake.put(item)
        else:
            self.lose_forked()

    def _log_quickly(self, metrics: Mapping[str, Any], step: float) -> bool:
        """Take a row like the last ones by the fast path; return whether it was taken."""
        quick = self._quick
        if quick is None or self._ended or type(step) is not int or not 0 <= step <= LARGEST:
            return False
        self.stages.ended(step)
        return quick(metrics, step)

    @quick_way(_log_quickly)
    @suppress_errors("bad_records", passing=FirstStepError)
    def log(self, metrics: Mapping[str, Any], step: float) -> None:
        """Record ``metrics`` at the global step ``step`` (an integer >= 0, also as ``12.0``).

        Values are floats, ints, numpy scalars or 0-d tensors (no device is waited for). NaN and infinite values are
        recorded as such. Steps may come in any order, and repeatedly. Values that cannot be recorded are counted in
        :attr:`counters` and warned of once; their errors are not raised. Only errors of your signal handlers,
        ``KeyboardInterrupt`` and ``SystemExit`` are raised.

        Raises
        ------
        FirstStepError
            At the first call only, for an invalid step, with which nothing of the run would be recorded.
        """
        if not self._logs:
            self._check_first(step)
        if self._undecided is not None:
            self.decide(step=step_index(step))
        engine = self._engine
        if engine is None or self._ended:
            self.lose_forked()
            return
        row = metrics if engine.renamed is None else engine.renamed(metrics)
        at = step_index(step)
        if self.stages.by_rows and self.stages.begins(at):
            spans = self.stages.end_step(at)
            row = {**seconds_of(spans), **row}
            self._put_spans(at, spans)
        else:
            self.stages.ended(at)
        engine.intake.put(admit(row, at, time.time()))
        self._quick = None if self.stages.by_rows or engine.renamed is not None else engine.intake.quick

    def _check_first(self, step: Any) -> None:
        """Check the first step on every rank: if only rank 0 raised, the other ranks would wait for it."""
        if (not self.active and self.rank == 0) or self._ended:
            return
        self._logs = True
        try:
            step_index(step)
        except ValueError as error:
            reason = redacted(str(error))
            raise FirstStepError(f"run.log: {reason}; give the trainer's global step, a whole number") from None

    def stage(self, name: str) -> Stage:
        """Return a context manager for a stage of a training step, whose time is recorded and which is shown while it
        runs.

        ``name`` is one of ``sampling``, ``reward``, ``logprobs``, ``update``, ``weight_sync``, ``checkpoint`` and
        ``evaluation``, or a word of your own. Stages may nest: the inner one counts. It takes a few microseconds and
        raises nothing.

        >>> import rlwatch
        >>> with rlwatch.init(store="memory://stage-doctest") as run:
        ...     with run.stage("sampling"):
        ...         pass
        ...     run.log({"loss": 0.5}, step=1)
        """
        self.stages.by_rows, self._quick = True, None
        return self.stages.stage(name)

    def _put_spans(self, step: int, spans: Sequence[Span]) -> None:
        batch = batch_of_spans(step, spans)
        if batch is not None:
            self.log_spikes(batch)

    def tell_stall(self, kind: str, step: int | None, body: Mapping[str, Any]) -> None:
        """Record an event about a stall: this process or another rank makes no progress, or makes progress again.

        ``kind``: kind of the event. ``step``: last step, or None. ``body``: details. Called on a background thread.
        """
        self.event(kind, step, **body)

    @suppress_errors("bad_records")
    def log_spikes(self, spikes: SpikeBatch) -> None:
        """Record data on single tokens of one step; see :class:`rlwatch.records.SpikeBatch`."""
        batch = a_batch(spikes, SpikeBatch)
        if self._engine is None or self._engine.intake.wants(batch):
            self.offer(batch)

    @suppress_errors("bad_records")
    def log_completions(self, completions: CompletionBatch) -> None:
        """Record some completions of one step as text; see :class:`rlwatch.records.CompletionBatch`."""
        self.offer(a_batch(completions, CompletionBatch))

    @suppress_errors("bad_records")
    def event(self, kind: str, step: int | None = None, **body: Any) -> None:
        """Record an event of the run, such as ``reference_reset`` or ``note``, with details; values JSON lacks become
        text.
        """
        at = None if step is None else step_index(step)
        self.offer(Event(clean_name(str(kind)), at, plain(body), time.time()))

    @suppress_errors("errors", list)
    def commands(self, *, for_all_ranks: bool = False) -> list[PendingCommand]:
        """Return users' commands for this run since the last call; call it where commands can be executed safely.

        Each must be answered with ``done()`` or ``reject(reason)``. It only pops a queue in memory. In a run of several
        ranks, commands are returned only with ``for_all_ranks``: the caller must pass them on to the other ranks.
        """
        if self._engine is None or self._ended:
            return []
        return self._engine.mailbox.take(for_all_ranks=for_all_ranks)

    def has_commands(self, *, for_all_ranks: bool | None = None) -> bool:
        """Return whether :meth:`commands` would return any; they remain queued.

        ``for_all_ranks``: as in :meth:`commands`, if the caller will take them; None if it only checks.
        """
        if self._engine is None or self._ended:
            return False
        if for_all_ranks is not None:
            self._engine.mailbox.listen(for_all_ranks=for_all_ranks)
        return self._engine.mailbox.waiting()

    def health(self) -> RunHealth:
        """Return the health of the run as of the last judged step (a step is judged when the next one begins)."""
        return self._health

    @suppress_errors("bad_calls", lambda: False)
    def flush(self, deadline_s: float = DEADLINE_S) -> bool:
        """Wait until everything logged so far is stored and judged; return False if ``deadline_s`` seconds were not
        enough.
        """
        if self._engine is None or self._ended:
            return True
        return self._engine.writer.flush(deadline_s)

    def finish(
        self, state: RunState | str = RunState.FINISHED, reason: str = "", deadline_s: float = DEADLINE_S
    ) -> bool:
        """End the run: store and judge what is queued, deliver alerts, release the files.

        It takes at most about ``deadline_s`` seconds. Returns False if that was not enough, or if not everything could
        be stored: lost records are counted in :attr:`counters`. ``state``: ``finished`` or another
        :class:`~rlwatch.records.RunState`; ``reason``: text. Raises ``ValueError`` only for an unknown ``state``.
        Idempotent.
        """
        if self._ended:
            return True
        ended_as, reason, deadline_s = RunState(state), words(reason), seconds(deadline_s, DEADLINE_S)
        if self._undecided is not None and (self._early or ended_as is not RunState.FINISHED):
            self.decide(resumed=False)
        self._ended = True
        end = time.monotonic() + deadline_s
        engine, link = self._engine, self._link
        if self._machine is not None:
            self._machine.stop()
        stopped = engine is None or self._safely(lambda: self._finish(engine, ended_as, reason, deadline_s))
        if link is not None:
            stopped &= self._safely(lambda: link.close(max(0.1, end - time.monotonic())))
        return stopped

    def _finish(self, engine: RunEngine, state: RunState, reason: str, deadline_s: float) -> bool:
        end = time.monotonic() + deadline_s
        lost = self.counters["dropped"] + self.counters["errors"]
        call_or(lambda: engine.note_end(state, reason), lambda _error: None)  # the writer may not come to it in time
        stopped = engine.writer.stop(deadline_s, lambda: engine.finish(state, reason))
        if not stopped:
            self.counters.warn("errors", f"the run's last records were not stored within {deadline_s:g} s")
        elif not engine.writer.judged_all:
            stopped = False
            self.counters.warn("unjudged", UNJUDGED)
        call_or(lambda: self._log_lost(engine.writer, stopped=engine.writer.ended), lambda _error: None)
        if engine.delivery is not None:
            engine.delivery.stop(max(0.0, end - time.monotonic()))
        return stopped and self.counters["dropped"] + self.counters["errors"] == lost

    def _log_lost(self, writer: Writer, *, stopped: bool) -> None:
        """Log the number of lost records, once, at the end."""
        if not stopped:
            writer.give_up_unkept()
        lost = self.counters.lost()
        if lost:
            why = f"the store took nothing: {writer.trouble}" if writer.trouble else "there was no room for them"
            log_message(
                logging.WARNING,
                "run %s ends without %s, which are lost (%s)",
                self.info.run_id,
                spans_in_words(lost),
                why,
            )

    def _safely(self, call: Callable[[], bool]) -> bool:
        """Call, and suppress errors: an error at the end must not replace the program's error, or cause one."""

        def failed(error: Exception) -> bool:
            self.counters.warn("errors", f"rlwatch could not end the run: {described(error)}")
            return False

        return call_or(call, failed)

    def end(self, state: str, reason: str, deadline_s: float = 5.0) -> None:
        """End the run together with its process: call :meth:`finish` with ``state`` and ``reason``, and a short
        deadline in seconds.
        """
        self.finish(state, reason, deadline_s=deadline_s)

    def forked(self) -> None:
        """Stop recording in a forked child process, which must not write the parent's run."""
        self._forked = self._forked or (not self._ended and (self._engine is not None or self._link is not None))
        self._engine = self._machine = self._undecided = self._quick = None
        self._logs = True
        if self._link is not None:
            self._link.forked()
            self._link = None

    def lose_forked(self) -> None:
        """Count as lost a record that a forked child process logs to its parent's run; warn once."""
        if self._forked and not self._ended:
            self.counters.warn("forked", FORKED)

    @suppress_errors("bad_calls")
    def listen(self, listener: Callable[[MonitorOutcome], None]) -> None:
        """Call ``listener`` with every published finding and changed alert, on the writer thread.

        It must be quick, since judging waits for it. Its errors are counted, and logged once.
        """
        if not callable(listener):
            raise TypeError(f"a listener is called with what was found; got {shown(listener)}")
        self._listeners.append(listener)

    def announce(self, outcome: MonitorOutcome) -> None:
        """Pass the findings and alerts in ``outcome`` to the listeners; called on the writer thread."""
        for listener in self._listeners:  # an error of one must not stop the others, or the judging
            sheltered(partial(listener, outcome), self._listener_failed)

    def _listener_failed(self, error: BaseException) -> None:
        self.counters.warn("errors", f"what listens to this run failed: {described(error)}")

    def publish_health(self, health: RunHealth) -> None:
        """Store the health of the run after a step was judged; called on the writer thread."""
        self._health = health

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        reason = described(error)
        self.event("exception", error=reason)
        self.finish(RunState.CRASHED, reason)


def _inert(info: RunInfo, rank: int, world_size: int) -> Run:
    return Run(info, Counters(), rank=rank, world_size=world_size)


# The ends of a process: exit, SIGTERM, fork. A run handles them all by itself.

END_S = 5.0
"""Largest number of seconds that one run takes to end with its process."""
ALL_S = 9.0
"""Largest number of seconds that all runs of a process take together."""
SIGNAL_S = 12.0
"""Seconds after which a SIGTERM is passed on in any case: the main thread may be inside a call that hangs."""


_runs: weakref.WeakSet[Run] = weakref.WeakSet()
_installed = False


def watch_over(run: Run, *, sigterm: bool = True) -> None:
    """Finish ``run`` at exit and on SIGTERM, and make its copy in a forked child process inert.

    A SIGTERM handler is installed only with ``sigterm``, in the main thread, and only if there is no other. It never
    raises into the code it interrupts, and the signal is passed on when the runs have ended, after :data:`SIGNAL_S`
    seconds at the latest.
    """
    _runs.add(run)
    _install()
    untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if sigterm and untouched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
        _insist()


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    """Finish all runs at exit; a script that died of an exception left it in ``sys.last_value``."""
    error = getattr(sys, "last_value", None)
    if error is None:
        _end_all("finished", "the process exited")
    else:
        _end_all("crashed", described(error))


def _end_all(state: str, reason: str) -> None:
    until = time.monotonic() + ALL_S
    for run in list(_runs):
        with suppress(Exception):
            run.end(state, reason, min(END_S, max(0.5, until - time.monotonic())))


_terminating: list[float] = []
"""Times at which the main thread came to run the handler below."""


def _on_sigterm(*_: object) -> None:
    _terminating.append(time.monotonic())
    try:
        _end_all("crashed", "killed by SIGTERM")
    finally:  # die as the sender expects, with the right exit status, even if an exception (Ctrl-C) was raised
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _insist() -> None:
    """Pass SIGTERM on in time even if the main thread never gets to run the handler.

    Python runs handlers between two instructions of the main thread; one that waits inside a collective or a kernel has
    none, and the default action, which would have ended it at once, is gone. The interpreter writes each signal's
    number to the wake-up descriptor at the moment it arrives. Nothing is done if other code uses that descriptor, or if
    the program has installed its own SIGTERM handler meanwhile, perhaps to save and go on.
    """
    global _wakes
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(read, True)
    taken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)
        os.close(read)
        os.close(write)
        return
    _wakes = write
    threading.Thread(target=_wait_for_sigterm, args=(read, os.getpid()), name="rlwatch-sigterm", daemon=True).start()


_wakes = -1
"""The wake-up descriptor, if this module set it."""


def _wait_for_sigterm(read: int, pid: int) -> None:
    while True:
        if signal.SIGTERM in os.read(read, 64) and _handles_sigterm():
            comes_to = _asked_main_thread()
            time.sleep(SIGNAL_S)
            if _handles_sigterm() and (_terminating or not comes_to):
                break
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL; Python allows its own call in the main thread only
    os.kill(pid, signal.SIGTERM)


def _asked_main_thread() -> list[bool]:
    """Return a list to which the main thread appends as soon as it runs: after the handlers of pending signals.

    If it does so and this module's handler has not run, another handler took the signal and has been removed since.
    """
    came: list[bool] = []

    def come(_: object) -> int:
        came.append(True)
        return 0

    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(come)
    _asked.append(call)  # it may be called at any later time
    ctypes.pythonapi.Py_AddPendingCall(call, None)
    return came


_asked: list[object] = []


def _handles_sigterm() -> bool:
    return signal.getsignal(signal.SIGTERM) is _on_sigterm


def _after_fork() -> None:
    """Reset the wake-up descriptor in a forked child.

    The parent shares it, and would take the SIGTERM of a child (of a pool, of a loader's worker) for its own, and end a
    training whose main thread is in a long call.
    """
    global _wakes
    for run in list(_runs):
        run.forked()
    _runs.clear()
    if _handles_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _wakes != -1:
        theirs = signal.set_wakeup_fd(-1)
        if theirs not in (-1, _wakes):
            signal.set_wakeup_fd(theirs)
        _wakes = -1
