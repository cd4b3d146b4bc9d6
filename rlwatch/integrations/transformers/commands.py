"""Commands that every Hugging Face ``Trainer`` supports: executed at a step's end, through the callback interface
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import Controller, SaveCheckpoint, Stop
from rlwatch.integrations.held_updates import HoldUpdates, SkipStep
from rlwatch.integrations.learning_rate import LowerLR, Paced, RaiseLR
from rlwatch.integrations.ranks import Ranks, RunRanks
from rlwatch.integrations.rollback import Rollback, RollbackMeans
from rlwatch.integrations.snapshot_state import INSTEAD, Holdings
from rlwatch.integrations.snapshots import SnapshotKeeper, TakeTogether
from rlwatch.integrations.trainer_settings import Adjust, Setting, Values
from rlwatch.integrations.transformers.compat import fsdp2, sharding_engine
from rlwatch.ports import CommandHandler

Latest = Callable[[], Mapping[str, float]]
"""Function that returns the metrics measured last, by canonical name."""


class StepEndCommands(Protocol):
    """Interface of an executor of commands at the end of a trainer's step."""

    @property
    def loop(self) -> TrainerLoop:
        """Return the trainer's objects that callbacks receive."""
        ...

    def begin(self, step: int) -> None:
        """Prepare for a training that starts after ``step``."""
        ...

    def obey(self, step: int) -> None:
        """Execute waiting commands after ``step``, if that is safe."""
        ...

    def saved(self, step: int) -> None:
        """Add rlwatch's state to the checkpoint of ``step``, which the trainer has written."""
        ...


class LoopControl:
    """Executor of the commands that every trainer supports, at the end of any step: save, stop, pause, roll back,
    learning rate.

    ``error_boundary`` is the error boundary that leads to the run. ``latest`` returns the newest metrics. ``ranks`` are
    the ranks of the run (default: those of the run's link). ``snapshots`` takes snapshots (None: none are taken).
    """

    def __init__(
        self,
        error_boundary: ErrorBoundary,
        latest: Latest,
        ranks: Ranks | None = None,
        *,
        snapshots: SnapshotKeeper | None = None,
    ) -> None:
        self.loop = TrainerLoop()
        self._error_boundary = error_boundary
        self._snapshots = snapshots
        rollback = Rollback(snapshots, RollbackMeans(self.loop.step, self.loop.paced))
        handlers: list[CommandHandler] = [rollback, self.loop.clipping(), *self.loop.handlers(error_boundary, latest)]
        handlers += [] if snapshots is None else [TakeTogether(snapshots)]
        self._controller = Controller(error_boundary, handlers, ranks or RunRanks(error_boundary), latest)

    def begin(self, step: int) -> None:
        """Take the first snapshot after ``step``.

        These commands keep nothing in checkpoints, so nothing is restored.
        """
        if self._snapshots is not None:
            self._error_boundary.attempt("snapshot", self._snapshots.begin, step)
        self._controller.begin(step)

    def obey(self, step: int) -> None:
        """Execute waiting commands after ``step``, then take a snapshot if one is due.

        The end of every step is safe.
        """
        self._controller.obey(step)
        if self._snapshots is not None:
            self._error_boundary.attempt("snapshot", self._snapshots.look, step)

    def saved(self, step: int) -> None:
        """Do nothing: these commands keep nothing in checkpoints."""


# The handlers of commands: they use the callback interface alone, for every trainer of Hugging Face's family.


@dataclass(slots=True)
class TrainerLoop:
    """A trainer's objects as callbacks receive them, with the handlers of commands that act on them.

    Call :meth:`look` in ``on_step_end``, then execute commands.
    """

    args: Any = None
    state: Any = None
    control: Any = None
    optimizer: Any = None
    scheduler: Any = None

    def look(self, args: Any, state: Any, control: Any, shown: Mapping[str, Any]) -> None:
        """Keep the trainer's objects that a callback received as its arguments, for the handlers of commands.

        ``shown`` are its keyword arguments, with the optimizer and the scheduler.
        """
        self.args, self.state, self.control = args, state, control
        self.optimizer, self.scheduler = shown.get("optimizer"), shown.get("lr_scheduler")

    def handlers(self, error_boundary: ErrorBoundary, latest: Latest) -> list[CommandHandler]:
        """Return handlers of ``save-checkpoint``, ``lower-lr``, ``raise-lr``, ``hold``, ``skip-step`` and ``stop``.

        ``error_boundary`` is the error boundary that leads to the run's health; ``latest`` returns the newest metrics.
        """
        lower = LowerLR(self.paced, error_boundary)
        return [
            SaveCheckpoint(self.save, self.kept, error_boundary),
            lower,
            RaiseLR(lower, error_boundary),
            HoldUpdates(self.optimizers, error_boundary, self.step, latest),
            SkipStep(self.optimizers, error_boundary),
            Stop(self.stop),
        ]

    def clipping(self) -> Adjust:
        """Return the handler of ``set-grad-clip``, which changes the norm to which gradients are clipped."""
        return Adjust("set-grad-clip", Setting(self.grad_clip, self.set_grad_clip))

    def optimizers(self) -> list[Any]:
        """Return a list with the trainer's optimizer, empty before training has begun."""
        return [] if self.optimizer is None else [self.optimizer]

    def grad_clip(self) -> Values:
        """Return the norm to which gradients are clipped, as ``{"value": norm}``; 0 if they are not clipped.

        Raises ``RLWatchError`` before training has begun, or if DeepSpeed clips.
        """
        if self.args is None:
            raise RLWatchError("training has not begun")
        if getattr(self.args, "deepspeed", None):
            raise RLWatchError("DeepSpeed clips gradients by a setting of its own, which it read at its start")
        return {"value": float(self.args.max_grad_norm or 0.0)}

    def set_grad_clip(self, values: Values) -> None:
        """Set the norm to which gradients are clipped to ``values["value"]``; the trainer reads it at every step."""
        self.args.max_grad_norm = values["value"]

    def step(self) -> int:
        """Return the number of the optimizer step that has ended."""
        return int(self.state.global_step)

    def paced(self) -> Paced:
        """Return the trainer's optimizer and its learning-rate scheduler."""
        return Paced(self.optimizers(), [] if self.scheduler is None else [self.scheduler])

    def kept(self) -> int | None:
        """Return the number of checkpoints that the trainer keeps; None for all.

        Raises ``RLWatchError`` before training.
        """
        if self.control is None:
            raise RLWatchError("training has not begun")
        limit: int | None = self.args.save_total_limit
        return limit

    def save(self) -> str:
        """Set the flag that makes the trainer save a checkpoint when its callbacks have returned.

        Return a message with its path.
        """
        self.control.should_save = True
        return f"{self._checkpoint} is saved as soon as this step has ended"

    def stop(self, save: bool) -> str:
        """Set the flag that makes this step the last, with a checkpoint if ``save``. Return a message."""
        if save:
            self.save()
        self.control.should_training_stop = True
        return f"training ends with step {self.state.global_step}, " + (
            f"after saving {self._checkpoint}" if save else "without saving a checkpoint"
        )

    @property
    def _checkpoint(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"


# The objects of a snapshot.


def holdings(trainer: Any) -> Holdings:
    """Return the current model, optimizer, scheduler and loss scaler of ``trainer``, for a snapshot.

    Raises ``RLWatchError`` with the reason if an engine keeps them in a form that rlwatch cannot copy.
    """
    engine = sharding_engine(trainer)
    if engine is not None and not fsdp2(trainer):
        raise RLWatchError(f"weights and optimizer are sharded by {engine}; {INSTEAD} (`save_steps`)")
    optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
    schedulers = [] if trainer.lr_scheduler is None else [trainer.lr_scheduler]
    return Holdings(trainer.model, optimizers, schedulers, getattr(trainer.accelerator, "scaler", None))
