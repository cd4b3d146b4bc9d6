"""Commands to a custom loop, executed with the functions that the user gave, and their effects that must survive a
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.checkpoints import KeptReference, KeptSettings
from rlwatch.integrations.commands import Controller, SaveCheckpoint, SetKLCoef, Stop
from rlwatch.integrations.held_updates import HoldUpdates, SkipStep
from rlwatch.integrations.learning_rate import FIXED, SCALE, LowerLR, Paced, RaiseLR
from rlwatch.integrations.ranks import RunRanks
from rlwatch.integrations.reference import Anchored, ResetReference
from rlwatch.integrations.rollback import Rollback, RollbackMeans
from rlwatch.integrations.snapshot_state import Holdings
from rlwatch.integrations.snapshots import Snapshots, TakeTogether, keeper_of
from rlwatch.integrations.trainer_settings import ADJUSTABLE, Adjust, Setting, SyncWeights, Values, rates
from rlwatch.integrations.weights import REF, unwrapped
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command

BASE_IS_REFERENCE = (
    "the reference is the base model without its adapter, which cannot change; add a frozen adapter named 'ref', equal "
    "to the trained one at the start, and let the loop take it as its reference"
)


@dataclass(slots=True)
class Means:
    """Objects and functions of the loop that commands need.

    A command is refused, with the name, if one that it needs is missing.
    """

    model: nn.Module | None = None
    ref_model: nn.Module | None = None
    optimizer: Any = None
    scheduler: Any = None
    save: Callable[[], Any] | None = None
    kl_coef: float | Callable[[], float] | None = None
    set_kl_coef: Callable[[float], Any] | None = None
    scaler: Any = None
    heeds_stop: bool = False
    """True once the loop has read ``should_stop``."""
    stopped: bool = False
    on_rollback: Callable[[int], Any] | None = None
    sync_weights: Callable[[], Any] | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """The loop's own settings, by the command that changes each."""

    def read_kl_coef(self) -> float | None:
        """Return the loop's current coefficient of the KL term, or None if the user gave none."""
        return self.kl_coef() if callable(self.kl_coef) else self.kl_coef

    def rates(self) -> dict[str, float | Tensor]:
        """Return the learning rates with which the optimizer would step now.

        ``optim/lr`` is that of its first parameter group, ``optim/lr_max`` the largest of several groups. A rate that
        is a tensor stays on its device.
        """
        groups = [] if self.optimizer is None else list(self.optimizer.param_groups)
        rate = groups[0].get(FIXED, groups[0].get("lr")) if groups else None
        if rate is None:
            return {}
        # lowered by a command: with a scheduler the rate itself is, without one every step takes a share of it
        itself = self.scheduler is not None or FIXED in groups[0]
        lowered = 1.0 if itself else groups[0].get(SCALE, 1.0)
        first = rate.detach() * lowered if isinstance(rate, Tensor) else float(rate) * lowered
        known = rates(self.optimizer)
        return {"optim/lr": first} | ({"optim/lr_max": known["optim/lr_max"] * lowered} if len(known) > 1 else {})

    def anchored(self) -> Anchored:
        """Return policy, reference and optimizer, for a reset of the reference.

        Raises ``RLWatchError`` if the watcher has no model, or if the reference is the base model of an adapter.
        """
        if self.model is None:
            raise RLWatchError("Watcher was made without model=, so there is nothing to reset the reference to")
        adapters = getattr(unwrapped(self.model), "peft_config", None)
        if self.ref_model is None and adapters and REF not in adapters:
            raise RLWatchError(BASE_IS_REFERENCE)
        return Anchored(self.model, self.ref_model, [] if self.optimizer is None else [self.optimizer])

    def holdings(self) -> Holdings:
        """Return the objects that a snapshot copies. Raises ``RLWatchError`` if the watcher has no model."""
        if self.model is None:
            raise RLWatchError("Watcher was made without model=, so there is nothing to take a snapshot of")
        return Holdings(self.model, self.optimizers(), [] if self.scheduler is None else [self.scheduler], self.scaler)

    def synced(self) -> str:
        """Call the loop's function that sends the weights to the rollout engine; return a message.

        Raises ``RLWatchError`` if the user gave no such function.
        """
        if self.sync_weights is None:
            raise RLWatchError("Watcher was made without sync_weights=, so it does not know how to send the weights")
        self.sync_weights()
        return "the loop has sent the weights"

    def optimizers(self) -> list[Any]:
        """Return a list with the optimizer, empty if there is none."""
        return [] if self.optimizer is None else [self.optimizer]

    def rolled_back(self, step: int) -> str:
        """Call the loop's function for a roll-back to ``step``, which drops rollouts sampled with the undone weights.

        Returns a message, "" if the user gave no such function.
        """
        if self.on_rollback is None:
            return ""
        self.on_rollback(step)
        return "the loop was notified"

    def paced(self) -> Paced:
        """Return the optimizer and the scheduler, which set the learning rate."""
        schedulers = [] if self.scheduler is None else [self.scheduler]
        return Paced(self.optimizers(), schedulers)

    def kept(self) -> int | None:
        """Return None, because the loop is assumed to keep all its checkpoints.

        Raises ``RLWatchError`` if the user gave no function that saves a checkpoint.
        """
        if self.save is None:
            raise RLWatchError("Watcher was made without save=, so it does not know how to save a checkpoint")
        return None

    def save_now(self) -> str:
        """Save a checkpoint by the loop's own function, and return a message.

        Raises ``RLWatchError`` without such a function.
        """
        self.kept()
        where = self.save() if self.save is not None else None
        return f"saved to {where}" if where else "saved"

    def changeable_kl_coef(self) -> float:
        """Return the current coefficient of the KL term.

        Raises ``RLWatchError`` if the user gave no function that sets it.
        """
        value = self.read_kl_coef()
        if self.set_kl_coef is None or value is None:
            raise RLWatchError("Watcher was made without kl_coef= and set_kl_coef=, so the coefficient is out of reach")
        return float(value)

    def change_kl_coef(self, value: float) -> None:
        """Set the coefficient of the KL term to ``value`` by the loop's own function."""
        if self.set_kl_coef is not None:
            self.set_kl_coef(value)
            self.kl_coef = self.kl_coef if callable(self.kl_coef) else value

    def stop(self, save: bool) -> str:
        """Make the loop end at its next read of ``should_stop``, after saving a checkpoint if ``save``.

        Return a message. Raises ``RLWatchError`` if the loop has never read ``should_stop``.
        """
        if not self.heeds_stop:
            raise RLWatchError("this loop has not asked watcher.should_stop so far, so it would go on")
        saved = f"{self.save_now()}; " if save and self.save is not None else ""
        self.stopped = True
        return f"{saved}the loop ends here"


Adjustable = tuple[Callable[[], Any], Callable[..., Any]]
"""Pair of a loop's functions that read a setting and write it."""


def settings_of(adjustable: Mapping[str, Adjustable]) -> dict[str, Setting]:
    """Return command -> setting that it changes; ``adjustable`` maps a command to the loop's functions (read, write).

    Raises ``ConfigError`` for an unknown command, or for a value that is no pair of functions.
    """
    found = {}
    for kind, functions in adjustable.items():
        if kind not in ADJUSTABLE:
            raise ConfigError(f"adjustable: {kind!r} is no setting; known: {', '.join(ADJUSTABLE)}")
        if not (isinstance(functions, tuple) and len(functions) == 2 and all(map(callable, functions))):
            raise ConfigError(f"adjustable[{kind!r}] must be (read, write), two functions, got {functions!r}")
        found[kind] = Setting(partial(_values, functions[0]), partial(_set, functions[1]))
    return found


def _values(read: Callable[[], Any]) -> Values:
    value = read()
    return value if isinstance(value, Mapping) else {"value": float(value)}


def _set(write: Callable[..., Any], values: Values) -> None:
    write(**values)


# The handlers of commands, and their effects that must survive a restart.


class CommandController:
    """Executor of the run's commands in a custom loop, which saves their lasting effects in checkpoints.

    There is one executor on every rank. ``means`` are the loop's objects and functions, ``error_boundary`` is the error
    boundary that leads to the run. ``step`` returns the step that has ended, ``latest`` the newest metrics.
    ``snapshots`` are the settings of snapshots (None: off).
    """

    def __init__(
        self,
        means: Means,
        error_boundary: ErrorBoundary,
        step: Callable[[], int],
        latest: Callable[[], Mapping[str, float]],
        snapshots: Snapshots | None = None,
    ) -> None:
        coefficient = SetKLCoef(means.changeable_kl_coef, means.change_kl_coef, error_boundary)
        self._error_boundary = error_boundary
        self._step = step
        self._reference = KeptReference(means.anchored, error_boundary, self._writes)
        adjusts = [Adjust(kind, setting) for kind, setting in means.settings.items()]
        self._settings = KeptSettings([coefficient, *adjusts], error_boundary, self._writes)
        lower = LowerLR(means.paced, error_boundary)
        self.snapshots = keeper_of(snapshots, means.holdings, error_boundary)
        handlers: list[CommandHandler] = [
            ResetReference(means.anchored, error_boundary, self._reset_done),
            SaveCheckpoint(means.save_now, means.kept, error_boundary),
            lower,
            RaiseLR(lower, error_boundary),
            coefficient,
            *adjusts,
            SyncWeights(means.synced),
            HoldUpdates(means.optimizers, error_boundary, step, latest),
            SkipStep(means.optimizers, error_boundary),
            Stop(means.stop),
            Rollback(self.snapshots, RollbackMeans(step, means.paced, means.rolled_back)),
        ]
        handlers += [] if self.snapshots is None else [TakeTogether(self.snapshots)]
        self._controller = Controller(error_boundary, handlers, RunRanks(error_boundary), latest)
        if self.snapshots is not None:
            error_boundary.attempt("snapshot", self.snapshots.begin, step())
        self._controller.begin(step())

    def obey(self) -> None:
        """Execute waiting commands after the step that has ended, then take a snapshot if one is due."""
        self._controller.obey(self._step())
        if self.snapshots is not None:
            self._error_boundary.attempt("snapshot", self.snapshots.look, self._step())

    def saved(self, checkpoint: Path) -> None:
        """Add a reset reference and changed settings to ``checkpoint``, a directory that the loop has just written."""
        self._reference.save(checkpoint, self._controller, self._step())
        self._settings.save(checkpoint)

    def resumed(self, checkpoint: Path) -> None:
        """Restore the reference and the settings in ``checkpoint``, a directory that the loop has just read."""
        self._reference.restore(checkpoint, self._controller, self._step())
        self._settings.restore(checkpoint, self._controller, self._step())
        if self.snapshots is not None:
            self._error_boundary.attempt("snapshot", self.snapshots.begin, self._step())

    def _reset_done(self, command: Command, report: Mapping[str, JSON]) -> None:
        self._reference.reset_done(command, report, self._step())

    def _writes(self) -> bool:
        run = self._error_boundary.run
        return run is not None and run.rank == 0
