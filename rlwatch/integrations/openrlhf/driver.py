"""rlwatch in the process of OpenRLHF's trainer, which drives the policy actors.

Wrappers on the trainer instance see each step; :class:`OpenRLHFRecorder` merges and records it on a background thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import rlwatch
from rlwatch.error_boundary import ErrorBoundary, Reported, guarded
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import Controller, Refused, SaveCheckpoint, SetKLCoef, Stop
from rlwatch.integrations.crash import record_crash
from rlwatch.integrations.level import Level
from rlwatch.integrations.openrlhf.batch import response_stats
from rlwatch.integrations.openrlhf.compat import OpenRLHFSettings
from rlwatch.integrations.openrlhf.taps import PARCEL
from rlwatch.integrations.step_tally import Decode, StepTally, StepThread, merge_workers
from rlwatch.integrations.tee import scalars
from rlwatch.redaction import recordable

if TYPE_CHECKING:
    from rlwatch.run import Run


logger = logging.getLogger("rlwatch")


class OpenRLHFDriver:
    """Watcher of a ``BasePPOTrainer`` of OpenRLHF: it records logs and the actors' measurements, executes commands, and
    reports the end.

    The constructor may raise, because a requested run must be recorded. Training is not changed.
    """

    def __init__(self, trainer: Any, settings: OpenRLHFSettings) -> None:
        self.run = rlwatch.init(**init_arguments(trainer.args, settings))
        self.run.introduce()
        self.error_boundary = ErrorBoundary(self.run)
        self.step = FinishedStep()
        self._last: int | None = None
        self._trainer = trainer
        self._commands = OpenRLHFCommands(trainer, self.error_boundary)
        self.recording = OpenRLHFRecorder(
            self.error_boundary,
            int(trainer.args.rollout.n_samples_per_prompt),
            _decoder(trainer.tokenizer) if settings.text else None,
            tokens=settings.includes(Level.TOKENS),
            full=settings.includes(Level.FULL),
        )

    def attach(self) -> None:
        """Install the wrappers on the trainer."""
        trainer = self._trainer
        trainer.wandb_logger = RLWatchLogger(self.run, trainer.wandb_logger, self.close)
        self._wrap(trainer.experience_maker, "make_experience_batch", self._made)
        self._wrap(trainer, "ppo_train", self._updated)
        self._wrap(trainer, "train_step", self._stepped)
        self._wrap_saving(trainer)
        generator = getattr(trainer, "samples_generator", None)
        if generator is not None:
            self._wrap_generating(generator)
        logger.info("rlwatch records this training as %s", self.run.info.run_id)

    def _wrap(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Wrap ``owner.name``: call ``look`` with its result and arguments; an exception of the method ends the run."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = self._reporting(original, *args, **kwargs)
            self.error_boundary.attempt(name, look, result, *args, **kwargs)
            return result

        setattr(owner, name, watched)

    def _wrap_saving(self, trainer: Any) -> None:
        """Wrap saving, to execute commands before it: between the update and its saving nothing is in flight."""
        original = trainer.save_logs_and_checkpoints

        @wraps(original)
        def save_logs_and_checkpoints(global_step: int, *args: Any, **kwargs: Any) -> Any:
            self.error_boundary.attempt("commands", self._commands.obey, global_step)
            with _saving(trainer.args.ckpt, now=self._commands.saving):
                return self._reporting(original, global_step, *args, **kwargs)

        trainer.save_logs_and_checkpoints = save_logs_and_checkpoints

    def _wrap_generating(self, generator: Any) -> None:
        """Wrap the generator, so that ``stop`` reports its loader as exhausted, which ends training."""
        original = generator.generate_samples

        @wraps(original)
        def generate_samples(*args: Any, **kwargs: Any) -> Any:
            if self._commands.stopping:
                return [], None, 0, True
            return self._reporting(original, *args, **kwargs)

        generator.generate_samples = generate_samples

    def _made(self, experiences: Any, *_args: Any, **_kwargs: Any) -> None:
        self.step.experiences = list(experiences)

    def _updated(self, status: Any, *_args: Any, **_kwargs: Any) -> None:
        self.step.sent = taken_out(status)

    def _stepped(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        step, self.step = self.step, FinishedStep()
        step.numbers = {"policy/kl_coef": float(self._trainer.kl_ctl.value)}
        self._last = int(result[1])
        self.recording.submit(self._last, step)

    def close(self) -> None:
        """Wait for the statistics of the last steps, after training has ended."""
        self.error_boundary.attempt("last steps", self.recording.close)

    def _reporting(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with Reported(self._report):
            return work(*args, **kwargs)

    def _report(self, error: BaseException) -> None:
        """Report the first error only: calls lie within each other."""
        if self.run.active:
            self.close()
            record_crash(self.run, self.error_boundary, error, self._last)


@contextmanager
def _saving(checkpoints: Any, *, now: bool) -> Iterator[None]:
    """Let OpenRLHF's own code save a checkpoint during the ``with`` block, whatever step it is, if ``now``."""
    every = checkpoints.save_steps
    try:
        if now:
            checkpoints.save_steps = 1
        yield
    finally:
        checkpoints.save_steps = every


def _decoder(tokenizer: Any) -> Decode:
    return lambda ids: str(tokenizer.decode(list(ids)))


# Description of a run, from OpenRLHF's arguments: a tree of namespaces.


def init_arguments(args: Any, settings: OpenRLHFSettings) -> dict[str, Any]:
    """Return arguments of :func:`rlwatch.init` from OpenRLHF's ``args``.

    The arguments of rlwatch's command line take precedence.
    """
    wandb = getattr(args.logger, "wandb", None)
    known = {
        "project": getattr(wandb, "project", None),
        "name": getattr(wandb, "run_name", None),
        "output_dir": args.ckpt.path,
        "resume": "auto" if args.ckpt.load_enable else "never",
        "config": recordable(vars(args)),
        "source": "openrlhf",
        "rank": 0,
        "world_size": 1,
    }
    return {**{name: value for name, value in known.items() if value is not None}, **settings.init}


# rlwatch as one of OpenRLHF's loggers: the interface of its ``WandbLogger`` and ``TensorboardLogger``.


class RLWatchLogger:
    """Logger for OpenRLHF that records in rlwatch what OpenRLHF logs, and finishes the run when OpenRLHF closes its
    loggers.

    Parameters
    ----------
    run
        The run that records.
    wrapped
        The logger that this one replaces; it is called first, with the same arguments.
    closing
        Called before the run is finished, to record what is still pending.
    """

    def __init__(self, run: Run, wrapped: Any = None, closing: Callable[[], None] | None = None) -> None:
        self.error_boundary = ErrorBoundary(run)
        self._run = run
        self._wrapped = wrapped
        self._closing = closing

    def log_train(self, global_step: int, logs_dict: Mapping[str, Any]) -> None:
        """Record ``logs_dict`` as the row of the training step ``global_step``."""
        if self._wrapped is not None:
            self._wrapped.log_train(global_step, logs_dict)
        self._record(global_step, logs_dict)

    def log_eval(self, global_step: int, logs_dict: Mapping[str, Any]) -> None:
        """Record ``logs_dict`` as the row of an evaluation at ``global_step``; its names begin with ``eval_``."""
        if self._wrapped is not None:
            self._wrapped.log_eval(global_step, logs_dict)
        self._record(global_step, logs_dict)

    def close(self) -> None:
        """Finish the run, after training has ended."""
        if self._wrapped is not None:
            self._wrapped.close()
        self._finish()

    @guarded
    def _record(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log(scalars(row), step=step)

    @guarded
    def _finish(self) -> None:
        if self._closing is not None:
            self._closing()
        self._run.finish()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._wrapped is None:
            raise AttributeError(name)
        return getattr(self._wrapped, name)


# Recording of a step of OpenRLHF, on a background thread.

DEADLINE_S = 30.0
"""Longest time that the end of training waits for the statistics of the last steps, in seconds."""


@dataclass(slots=True)
class FinishedStep:
    """A step that has ended: its experiences, what policy actors sent (rank -> measurements), and further metrics."""

    experiences: Sequence[Any] = ()
    sent: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


class OpenRLHFRecorder:
    """Computation and recording of the statistics of steps, in order, on a background thread.

    ``group_size`` responses are sampled for each prompt. ``tokens`` and ``full`` select the level of detail. ``decode``
    converts token ids to text. ``latest`` are the metrics of the step recorded last.
    """

    def __init__(
        self, error_boundary: ErrorBoundary, group_size: int, decode: Decode | None, *, tokens: bool, full: bool
    ) -> None:
        self.latest: Mapping[str, float] = {}
        self._error_boundary = error_boundary
        self._group_size = group_size
        self.decode = decode
        self._tokens = tokens
        self._full = full
        self.thread = StepThread(error_boundary, "rlwatch-openrlhf")

    def submit(self, step: int, measured: FinishedStep) -> None:
        """Queue the computation and recording of ``step`` from ``measured``, what was measured in it, and return at
        once.

        If too many steps wait, the step is dropped.
        """
        if self.thread.room():
            self.thread.submit(self._guarded, step, measured)

    def close(self) -> None:
        """Wait for the queued steps, at most ``DEADLINE_S``.

        Steps that take longer are lost, and counted as dropped.
        """
        self.thread.close(DEADLINE_S)

    def _guarded(self, step: int, measured: FinishedStep) -> None:
        self._error_boundary.guard_background("statistics", self._record, step, measured)

    def _record(self, step: int, measured: FinishedStep) -> None:
        run, tally = self._error_boundary.run, StepTally()
        if run is None:
            return
        if self._tokens and measured.experiences:
            stats = self._error_boundary.attempt(
                "responses", response_stats, measured.experiences, self._group_size, full=self._full
            )
            tally.add_stats(stats or {})
        for rank, sent in measured.sent.items():
            self.thread.count_errors(f"policy actor {rank}", int(sent["errors"]))
        for numbers in (measured.numbers, *(sent["numbers"] for sent in measured.sent.values())):
            for name, value in numbers.items():
                tally.add_number(name, value)
        whole = merge_workers(step, tally, {rank: sent["parcel"] for rank, sent in measured.sent.items()}, self.decode)
        self.latest = whole.metrics
        run.log(whole.metrics, step=step)
        for spikes in whole.spikes:
            run.log_spikes(spikes)


def taken_out(status: Any) -> dict[int, Any]:
    """Remove the measurements of policy actors from ``status``, so that no other code sees them; return rank ->
    measurements.
    """
    if not isinstance(status, dict):
        return {}
    keys = [key for key in status if isinstance(key, str) and key.startswith(PARCEL)]
    return {int(key.removeprefix(PARCEL)): status.pop(key) for key in keys}


# Commands to an OpenRLHF training, executed in the process of its trainer, when a step has ended.

NO_REFERENCE = "there is no reference model: algo.kl.init_coef is 0"
ADAPTIVE = "the KL controller is adaptive (algo.kl.target): it would set the coefficient again"
CANNOT = {
    "reset-reference": "OpenRLHF's reference lives in Ray actors that only load weights from a directory; save a "
    "checkpoint and start again with it as actor.model_name_or_path: it is then policy and reference",
    "rollback": "the weights live in the DeepSpeed engines of OpenRLHF's policy actors, which rlwatch cannot write; "
    "start again with --ckpt.load_enable",
    "lower-lr": "OpenRLHF's learning rate lives in the DeepSpeed engines of its policy actors, which take no orders",
}
"""Commands that OpenRLHF cannot execute -> the reason."""


class OpenRLHFCommands:
    """Executor of commands: save a checkpoint, stop, pause, change the KL coefficient.

    Call :meth:`obey` before OpenRLHF saves a step. ``saving`` and ``stopping`` are True after a command that requests a
    checkpoint or the end of training.
    """

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary) -> None:
        self.stopping = False
        self.saving = False
        self._trainer = trainer
        self._controller = Controller(
            error_boundary,
            [
                SaveCheckpoint(self._save, self._kept, error_boundary),
                Stop(self._stop),
                SetKLCoef(self._kl_coef, self._set_kl_coef, error_boundary),
                *(Refused(kind, reason) for kind, reason in CANNOT.items()),
            ],
        )

    def obey(self, step: int) -> None:
        """Execute the waiting commands after ``step``; they may set ``saving`` and ``stopping``."""
        self.saving = False
        self._controller.obey(step)

    def _save(self) -> str:
        self.saving = True
        return f"a checkpoint is saved under {self._trainer.args.ckpt.path} as soon as this step has ended"

    def _kept(self) -> int | None:
        limit = getattr(self._trainer.args.ckpt, "max_num", None)
        return None if limit is None else int(limit)

    def _stop(self, save: bool) -> str:
        if not hasattr(self._trainer, "samples_generator"):
            raise RLWatchError("the asynchronous trainer generates in another actor, which takes no orders")
        self.stopping = True
        return "training ends before the next rollouts" + (f"; {self._save()}" if save else "")

    def _kl_coef(self) -> float:
        if self._trainer.reference_model_group is None:
            raise RLWatchError(NO_REFERENCE)
        if getattr(self._trainer.args.algo.kl, "target", None):
            raise RLWatchError(ADAPTIVE)
        return float(self._trainer.kl_ctl.value)

    def _set_kl_coef(self, value: float) -> None:
        """Set the value of the controller that the experience maker uses, too, and that actors get for every update."""
        self._trainer.kl_ctl.value = value
