"""Integration with AReaL: what its ``PPOTrainer`` logs, and commands between its steps.

>>> from rlwatch.integrations.areal import watch

AReaL's driver holds batches that stay in the workers, so that no token is measured. Commands are executed where the
rollouts are paused for the update of their weights, which they get right afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import Controller, Refused, SaveCheckpoint, Stop
from rlwatch.integrations.compat import Needs
from rlwatch.integrations.driven import DrivenTraining, check_trainer
from rlwatch.redaction import recordable

if TYPE_CHECKING:
    from rlwatch.error_boundary import ErrorBoundary
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

NEEDS: Needs = {"train": (), "_save_hf": ("global_step",), "_save_recover_checkpoint": ("global_step",)}
SETTINGS = (
    "stats_logger.commit",
    "saver.freq_ctl.check",
    "recover_handler.freq_ctl.check",
    "config.total_train_steps",
    "config.recover.mode",
    "config.stats_logger",
)
"""Methods and attributes of ``PPOTrainer`` that are used."""
IN_WORKERS = "AReaL's {} in its workers, which take no orders; end the run and start it again with another setting"
CANNOT = {
    "rollback": "AReaL keeps one checkpoint to recover from, and HF checkpoints without the optimizer; end the run and "
    "start it again with recover.mode=on",
    "reset-reference": "AReaL's reference is an engine of its own that loads a path; save a checkpoint and start again "
    "with it as ref.path",
    "set-kl-coef": IN_WORKERS.format("KL coefficient is"),
    "lower-lr": IN_WORKERS.format("optimizer is"),
    "raise-lr": IN_WORKERS.format("optimizer is"),
}
"""Commands that AReaL cannot execute -> the reason."""


def watch(trainer: Any, **init_kwargs: Any) -> Run:
    """Watch a ``PPOTrainer`` of AReaL from now on, and return the run that is recorded.

    Recorded are the rows that AReaL's ``StatsLogger`` commits, and the exception that ends training. The commands
    pause, resume, stop and save-checkpoint are executed. In SPMD mode (one driver on each rank) only rank 0 may call
    this, and there are no commands, because the ranks cannot agree on one.

    Parameters
    ----------
    trainer
        A ``PPOTrainer``, before ``train()``.
    init_kwargs
        Arguments of :func:`rlwatch.init`. Project, name and configuration are AReaL's unless given.

    Returns
    -------
    Run
        The run that is recorded. It ends when ``train()`` returns.

    Raises
    ------
    ConfigError
        If the trainer is watched already, is none of AReaL's, or lacks what is read.
    RLWatchError
        Errors of :func:`rlwatch.init`.
    """
    check_trainer(trainer, NEEDS, SETTINGS, of="AReaL", written_for="PPOTrainer of AReaL 1.0")
    driven = DrivenTraining(trainer, init_arguments(trainer.config, init_kwargs))

    def committed(_result: Any, epoch: int, step: int, global_step: int, data: Any) -> None:  # noqa: ARG001  (AReaL's)
        for row in [data] if isinstance(data, Mapping) else list(data):
            driven.record({name: x for name, x in row.items() if not name.endswith("__count")}, global_step)

    driven.after(trainer.stats_logger, "commit", committed)
    if getattr(trainer, "scheduler", None) is None:
        logger.warning("rlwatch executes no commands in AReaL's SPMD mode, whose ranks have a driver each")
    else:
        commands = ARealCommands(trainer, driven.error_boundary)
        driven.before(trainer, "_save_hf", commands.obey)
    driven.ends_with(trainer)
    return driven.run


def init_arguments(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of :func:`rlwatch.init` from AReaL's ``config``; those ``given`` take precedence."""
    named = config.stats_logger
    known = {
        "project": getattr(named, "experiment_name", None),
        "name": getattr(named, "trial_name", None),
        "config": recordable(config),
        "source": "areal",
    }
    return {**{name: value for name, value in known.items() if value}, **given}


class ARealCommands:
    """Executor of commands, after a step's weights were sent to the paused rollouts and before AReaL saves."""

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary) -> None:
        self._trainer = trainer
        self._step = 0
        self._saving = False
        self._controller = Controller(
            error_boundary,
            [
                SaveCheckpoint(self._save, lambda: None, error_boundary),
                Stop(self._stop),
                *[Refused(kind, reason) for kind, reason in CANNOT.items()],
            ],
        )
        for handler in (trainer.saver, trainer.recover_handler):
            self._let_save(handler.freq_ctl)

    def obey(self, *_args: Any, global_step: int, **_kwargs: Any) -> None:
        """Execute the waiting commands after ``global_step``; they may make AReaL save and stop."""
        self._step, self._saving = int(global_step), False
        self._controller.obey(self._step)

    def _let_save(self, schedule: Any) -> None:
        """Make AReaL's schedule of saving due in a step in which a command has requested it."""
        original = schedule.check

        def check(*args: Any, **kwargs: Any) -> Any:
            due = original(*args, **kwargs)
            return True if self._saving else due

        schedule.check = check

    def _save(self) -> str:
        self._saving = True
        off = str(self._trainer.config.recover.mode) in ("disabled", "off")
        return "AReaL saves the weights in this step" + ("" if off else ", and the state to recover from")

    def _stop(self, save: bool) -> str:
        if self._trainer.config.total_train_steps == self._step + 1:
            raise RLWatchError("training ends with this step already")
        self._trainer.config.total_train_steps = self._step + 1
        return f"training ends with step {self._step}" + (f"; {self._save()}" if save else "")
