"""``watch(trainer)`` for any Hugging Face ``Trainer``: the scalars that it logs, measurements of each step, and crash
reports.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

import rlwatch
from rlwatch.error_boundary import Contained, ErrorBoundary, Reported, Tapped, copied, guarded
from rlwatch.errors import ConfigError
from rlwatch.integrations.compat import installed, lacking
from rlwatch.integrations.crash import cause_of, reason_of
from rlwatch.integrations.level import Level
from rlwatch.integrations.ranks import begin_together
from rlwatch.integrations.snapshots import Snapshots, checked, keeper_of
from rlwatch.integrations.stages import StepStages, tap_stages
from rlwatch.integrations.step_tally import Decode, SealedStep, StepTally
from rlwatch.integrations.trainer_settings import rates
from rlwatch.integrations.transformers.commands import Latest, LoopControl, StepEndCommands, holdings
from rlwatch.integrations.transformers.compat import LOSS, init_arguments, unclippable
from rlwatch.integrations.transformers.taps import TrainerTaps
from rlwatch.records import RunState

if TYPE_CHECKING:
    from rlwatch.run import Run


logger = logging.getLogger("rlwatch")


def watch(
    trainer: Any,
    *,
    run: Run | None = None,
    level: str = Level.FULL,
    snapshots: bool | Snapshots = False,
    **init_kwargs: Any,
) -> Run:
    """Watch a trainer from now on, and return the run that is recorded.

    Recorded are the scalars that the trainer logs, the loss before the trainer's NaN filter, gradients per layer before
    clipping, and the exception that ends training. Commands are executed (save a checkpoint, stop, pause, lower the
    learning rate). Training is bit-identical with and without it. Measurements that this trainer does not support are
    left out, with one warning. With several ranks every rank calls this, and their measurements are merged.

    For TRL's GRPO and RLOO :func:`rlwatch.integrations.trl.watch` measures every token, too.

    Parameters
    ----------
    trainer
        A trainer that has not begun to train. Its instance is changed, its class is not.
    run
        A run to record into, which the caller ends. By default one is created now and finished with training.
    level
        ``"scalars"``, ``"tokens"``, ``"gradients"`` or ``"full"``: see :class:`~rlwatch.integrations.level.Level`. The
        raw loss is recorded from ``"tokens"`` on.
    snapshots
        Snapshots of the trained weights and the optimizer, to which a command can return: True, False, or settings
        (:class:`~rlwatch.integrations.snapshots.Snapshots`).
    init_kwargs
        Arguments of :func:`rlwatch.init`. Source, configuration, output directory and rank come from the trainer unless
        given.

    Returns
    -------
    Run
        The run that is recorded.

    Raises
    ------
    ConfigError
        If the trainer is watched already, ``level`` is unknown, or snapshots are not possible.
    RLWatchError
        Errors of :func:`rlwatch.init`, before anything was changed.
    """
    refuse_twice(trainer)
    chosen, wanted = Level.of(level), Snapshots.of(snapshots)
    checked(wanted, partial(holdings, trainer))
    scalars = RLWatchCallback(run, **init_kwargs)
    recording = scalars.begin(trainer.args, trainer.model, watched=chosen.includes(Level.TOKENS))
    steps = tap(trainer, scalars.error_boundary, chosen, wanted)
    tap_stages(trainer, scalars.error_boundary)
    trainer.add_callback(scalars)
    report_crashes(trainer, scalars, steps)
    return recording


def refuse_twice(trainer: Any) -> None:
    """Raise ``ConfigError`` if ``trainer`` is watched already."""
    if any(isinstance(callback, RLWatchCallback) for callback in trainer.callback_handler.callbacks):
        raise ConfigError(
            'this trainer is watched already; leave RLWatchCallback and report_to="rlwatch" out where watch(trainer) '
            "is called, which records more"
        )


def tap(trainer: Any, error_boundary: ErrorBoundary, level: Level, snapshots: Snapshots | None = None) -> StepCallback:
    """Attach the hooks that measure steps of ``trainer``, and return the callback that records the steps.

    ``error_boundary`` is the error boundary that leads to the run. ``snapshots`` are the settings of snapshots (None:
    none are taken). The callback precedes that of the logged scalars, because a step is recorded before its log row.
    """
    taps = TrainerTaps(trainer, error_boundary, level)
    if level.includes(Level.TOKENS):
        _each(
            {
                "the raw loss": (lacking(trainer, LOSS), taps.tap_loss),
                "gradients": (unclippable(trainer), taps.tap_gradients),
            }
        )
    keeper = keeper_of(snapshots, partial(holdings, trainer), error_boundary)
    steps = StepCallback(taps, error_boundary, lambda latest: LoopControl(error_boundary, latest, snapshots=keeper))
    trainer.add_callback(steps)
    return steps


def _each(wanted: Mapping[str, tuple[str | None, Callable[[], None]]]) -> None:
    """Attach the supported hooks; one log line lists the others with the reasons."""
    for reason, attach in wanted.values():
        if reason is None:
            attach()
    absent = {name: reason for name, (reason, _) in wanted.items() if reason is not None}
    if absent:
        version = installed("transformers")
        logger.warning(
            "rlwatch does not record %s (transformers %s; the rest is recorded): %s",
            " and ".join(absent), version, "; ".join(absent.values()),
        )  # fmt: skip


# The scalars of the log, through the callback interface alone.

DEADLINE_S = 10.0
"""Longest time that the end of a run delays the trainer or a propagating exception, in seconds."""
WATCH_COPIES = (
    "call watch for the copy where it trains, or give the trainer RLWatchCallback(...): until it has begun a run, each "
    "of its copies begins one of its own (Ray Tune, hyperparameter_search)"
)
FILTERED = (
    "logging_nan_inf_filter is on: the logged loss hides NaN and Inf; pass logging_nan_inf_filter=False, or use "
    "watch(trainer), which reads the raw loss"
)


class RLWatchCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that records everything the trainer logs, in training and evaluation, at its global step.

    Parameters
    ----------
    run
        A run to record into, which the caller ends. By default one is created when training begins and finished when
        training ends.
    link
        With several ranks, the address at which rank 0 listens: ``HOST:PORT``, ``HOST`` or ``:PORT``. For the default
        see :func:`rlwatch.run.ranks.join`.
    init_kwargs
        Arguments of :func:`rlwatch.init` for the run created here. Source, configuration, output directory and rank
        come from the trainer unless given.
    """

    def __init__(self, run: Run | None = None, *, link: str | None = None, **init_kwargs: Any) -> None:
        self.run = run
        self._link = link
        self.error_boundary = ErrorBoundary(run)
        self._given = init_kwargs
        self._owned = run is None
        self._over = False
        self._linked = False
        self._watched = False
        self._rates: dict[str, float] = {}
        self._stages = StepStages(self.error_boundary)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to a callback that begins its own run, as in trials of a search; once a run began, to an inert one."""
        if self.run is None:
            return partial(type(self), link=self._link, **self._given), ()
        copied("watched trainer", WATCH_COPIES)
        return TrainerCallback, ()

    def begin(self, args: TrainingArguments, model: Any, *, watched: bool = False) -> Run:
        """Return the run, and create it if there is no active one. Raises what :func:`rlwatch.init` raises.

        ``args`` are the training arguments and ``model`` the trained model, for the run's configuration. ``watched``:
        the raw loss is recorded elsewhere, so that a warning about the trainer's NaN filter is not needed.
        """
        self._watched = self._watched or watched
        if self.run is None or (self._owned and self._over):
            self._over, self._linked = False, True
            self.run = begin_together(lambda: rlwatch.init(**init_arguments(args, model, self._given)), link=self._link)
            self.error_boundary.attempt("introduction", self.run.introduce)
        elif not self._linked:
            self._linked, given = True, self.run
            begin_together(lambda: given, link=self._link)
        self.error_boundary.run = self.run
        return self.run

    def end(self, state: RunState = RunState.FINISHED, reason: str = "") -> None:
        """Finish the run with ``state`` and ``reason`` if this callback created it.

        If training begins again, another run begins, or the next attempt of this one if training resumes.
        """
        if self.run is not None and self._owned:
            self._over = True
            self.run.finish(state, reason, DEADLINE_S)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Create the run. Configuration errors are raised here, before training starts."""
        run = self.begin(args, kwargs.get("model"))
        self.error_boundary.attempt("which run this is", partial(run.decide, resumed=state.global_step > 0))
        if args.logging_nan_inf_filter and not self._watched:
            logger.warning("%s", FILTERED)

    @override
    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to time the update; stages within it are timed separately."""
        self._stages.begin("update")

    @override
    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the timing of the update."""
        self._stages.end()
        self._stages.step_ended(state.global_step)

    @override
    @guarded
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to time an evaluation."""
        self._stages.evaluates()

    @override
    @guarded
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the timing of an evaluation."""
        self._stages.end()

    @override
    @guarded
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the learning rates that the step uses; the trainer logs those that the scheduler sets afterwards."""
        self._rates = rates(kwargs.get("optimizer"))

    @override
    @guarded
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the logged row, except the summary at the end of training."""
        if self.run is not None and logs and "train_runtime" not in logs:
            row = scalars(logs)
            if getattr(kwargs.get("optimizer"), "scaler", None) is not None:
                row = without_overflow(row)
            if "learning_rate" in row:
                row |= self._rates
            if "loss" in row:
                row |= self._stages.taken(self.run, state.global_step)
            self.run.log(row, step=state.global_step)

    @override
    @guarded
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish the run if this callback created it."""
        self.end()


def without_overflow(row: dict[str, float]) -> dict[str, float]:
    """Return ``row`` without ``grad_norm`` if it is not finite, which a float16 loss scaler causes while it searches
    for its scale.
    """
    return {name: value for name, value in row.items() if name != "grad_norm" or math.isfinite(value)}


def scalars(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a logged row. None becomes NaN, because TRL writes None if every value was NaN."""
    row = {}
    for name, value in logs.items():
        with Contained(lambda _error: None):  # another callback may have added values of any type
            if value is None or hasattr(value, "__float__"):
                row[name] = math.nan if value is None else float(value)
    return row


# The end of a step: seal the measurements, deliver them, and execute commands.


class TrainerReaders(Protocol):
    """Interface to the hooks that measure a trainer during a step.

    ``tally`` collects the measurements of the current step.
    """

    tally: StepTally

    def take(self) -> StepTally:
        """Return the measurements of the step that ended, and begin an empty collection."""
        ...

    def discard(self) -> None:
        """Drop the measurements so far, at the start of training."""
        ...

    def gradients_if_unclipped(self) -> None:
        """Read the gradients if the trainer did not clip them in this step, so that they have not been read yet."""
        ...

    def read_rates(self, optimizer: Any) -> None:
        """Read the learning rates with which ``optimizer`` is about to step."""
        ...


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that ends the measurements of a step and records them before anything of the next step.

    The measurements are copied from the device when the step ends, and recorded as soon as the copy has arrived:
    usually when the step is logged, at the latest when the next one begins. That is the only wait for the device, once
    a step.

    ``taps`` are the hooks that measure the trainer, ``error_boundary`` is the error boundary that leads to the run.
    ``control`` creates the executor of commands, from a function that returns the newest metrics. ``decode`` converts
    token ids to text.
    """

    def __init__(
        self,
        taps: TrainerReaders,
        error_boundary: ErrorBoundary,
        control: Callable[[Latest], StepEndCommands],
        decode: Decode | None = None,
    ) -> None:
        self.error_boundary = error_boundary
        self.latest: dict[str, float] = {}
        self.taps = taps
        self._decode = decode
        self._sealed: deque[SealedStep] = deque()
        self._control = control(self.newest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return an inert callback for a copy of the trainer, which is not watched."""
        copied("watched trainer", WATCH_COPIES)
        return TrainerCallback, ()

    @override
    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop measurements of an earlier training, and restore the state saved in a checkpoint."""
        self.taps.discard()
        self._control.loop.look(args, state, control, kwargs)
        self._control.begin(state.global_step)

    @override
    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the measurements of the last step."""
        self.deliver()

    @override
    @guarded
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the learning rates of the step, and its gradients if they were not clipped."""
        self.error_boundary.attempt("learning rate", self.taps.read_rates, kwargs.get("optimizer"))
        self.taps.gradients_if_unclipped()

    @override
    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the measurements of the step, then execute waiting commands."""
        self.seal(state.global_step)
        self.deliver(wait=False)
        self.noticed(args, state.global_step)
        self._control.loop.look(args, state, control, kwargs)
        self._control.obey(state.global_step)

    @override
    @guarded
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save with the trainer's checkpoint the state of rlwatch that it does not include."""
        self._control.saved(state.global_step)

    @override
    @guarded
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step if its copy has arrived. The trainer has just waited for the device, so usually it has."""
        self.deliver(wait=False)

    @override
    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the last step."""
        self.deliver()

    def noticed(self, args: Any, step: int) -> None:
        """Record further events at the end of ``step``; a hook for subclasses, which does nothing here."""

    def seal(self, step: int) -> None:
        """End the current measurements as those of ``step``, and start copying them from the device."""
        tally, run = self.taps.take(), self.error_boundary.run
        if run is not None and run.measures:
            tally.end_stages(step, run)
            self.error_boundary.attempt("tokens", tally.measure)
            self._sealed.append(tally.seal(step, shared=run.linked))

    def seal_unfinished(self, step: int) -> None:
        """End the measurements of ``step``, in which training crashed, if there are any."""
        if not self.taps.tally.empty:
            self.seal(step)

    def deliver(self, *, wait: bool = True) -> None:
        """Record the measured steps in order; without ``wait`` only those whose copy from the device has arrived."""
        while self._sealed and (wait or self._sealed[0].ready()):
            sealed = self._sealed.popleft()
            if self.error_boundary.run is not None:
                self.latest = self.newest_after(sealed.deliver(self.error_boundary.run, self._decode))

    def newest_after(self, measured: dict[str, float]) -> dict[str, float]:
        """Return what :attr:`latest` becomes after a step with the metrics ``measured``."""
        return measured

    def newest(self) -> Mapping[str, float]:
        """Return the metrics of the last step, for commands that report the values before them.

        This may wait for the device.
        """
        self.deliver()
        return self.latest


# Crashes of a training.


class PendingSteps(Protocol):
    """Interface to steps that were measured and are not recorded yet."""

    def seal_unfinished(self, step: int) -> None:
        """End the measurements of ``step``, in which training crashed."""
        ...

    def deliver(self) -> None:
        """Record every measured step."""
        ...


def report_crashes(trainer: Any, scalars: RLWatchCallback, steps: PendingSteps) -> None:
    """Wrap ``trainer.train``, so that an exception that ends it is recorded and then raised unchanged.

    An exception or interrupt becomes an ``exception`` event with its cause. A run created by the callback ``scalars``
    ends as crashed. ``steps`` holds measured steps, which are recorded first.
    """
    original = trainer.train

    def train(*args: Any, **kwargs: Any) -> Any:
        with Reported(
            lambda error: scalars.error_boundary.attempt("end of training", _report, trainer, scalars, steps, error)
        ):
            return original(*args, **kwargs)

    trainer.train = Tapped(original, train)


def _report(trainer: Any, scalars: RLWatchCallback, steps: PendingSteps, error: BaseException) -> None:
    error_boundary, run, step = scalars.error_boundary, scalars.run, int(trainer.state.global_step)
    if run is None or not run.measures:
        return
    # a failed device may make either of the first two raise; the event must be written all the same
    error_boundary.attempt("unfinished step", steps.seal_unfinished, step + 1)
    error_boundary.attempt("last steps", steps.deliver)
    error_boundary.attempt("exception", run.event, "exception", step, **cause_of(error))
    error_boundary.attempt("finish", scalars.end, RunState.CRASHED, reason_of(error))
