"""``watch(trainer)``: everything rlwatch can see and do in any ``Trainer``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlwatch.errors import ConfigError
from rlwatch.integrations.compat import installed, lacking
from rlwatch.integrations.level import Level
from rlwatch.integrations.transformers.callback import RLWatchCallback
from rlwatch.integrations.transformers.compat import LOSS, unclippable
from rlwatch.integrations.transformers.control import LoopControl
from rlwatch.integrations.transformers.crash import report_crashes
from rlwatch.integrations.transformers.stepper import StepCallback
from rlwatch.integrations.transformers.taps import TrainerTaps
from rlwatch.seam import Seam

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")


def watch(trainer: Any, *, run: Run | None = None, level: str = Level.FULL, **init_kwargs: Any) -> Run:
    """Watch a trainer and return the run it records.

    Beside the scalars of the log: the loss before the trainer's NaN filter, gradients per layer before clipping,
    commands (save a checkpoint, stop, pause, lower the learning rate), and the exception that ended training.
    Parameters come out bit-identical to training unwatched. What this trainer does not have is left out, with one
    warning. With several ranks every rank calls this, and a step is what all of them measured.

    For TRL's GRPO and RLOO :func:`rlwatch.integrations.trl.watch` sees every token too.

    Parameters
    ----------
    trainer
        A trainer that has not begun to train. Its instance is changed, its class is not.
    run
        A run to record into, which the caller ends. By default one is made now and finished with training.
    level
        ``"scalars"``, ``"tokens"``, ``"gradients"`` or ``"full"``: see :class:`~rlwatch.integrations.level.Level`.
        The raw loss comes with ``"tokens"``.
    init_kwargs
        Arguments of :func:`rlwatch.init`; source, configuration, output directory and rank come from the trainer unless
        given.

    Raises
    ------
    ConfigError
        If the trainer is watched already, or ``level`` is unknown.
    RLWatchError
        What :func:`rlwatch.init` raises, before anything was changed.
    """
    refuse_twice(trainer)
    chosen = Level.of(level)
    scalars = RLWatchCallback(run, **init_kwargs)
    recording = scalars.begin(trainer.args, trainer.model, watched=chosen.includes(Level.TOKENS))
    steps = tap(trainer, scalars.seam, chosen)
    trainer.add_callback(scalars)
    report_crashes(trainer, scalars, steps)
    return recording


def refuse_twice(trainer: Any) -> None:
    """Raise ``ConfigError`` if ``trainer`` is watched already."""
    if any(isinstance(callback, RLWatchCallback) for callback in trainer.callback_handler.callbacks):
        raise ConfigError("this trainer is watched already; leave RLWatchCallback out where watch(trainer) is called")


def tap(trainer: Any, seam: Seam, level: Level) -> StepCallback:
    """Attach what there is to attach to. The callback comes before the scalars': a step precedes its log row."""
    taps = TrainerTaps(trainer, seam, level)
    if level.includes(Level.TOKENS):
        _each(
            {
                "the raw loss": (lacking(trainer, LOSS), taps.tap_loss),
                "gradients": (unclippable(trainer), taps.tap_gradients),
            }
        )
    steps = StepCallback(taps, seam, lambda latest: LoopControl(seam, latest))
    trainer.add_callback(steps)
    return steps


def _each(wanted: Mapping[str, tuple[str | None, Callable[[], None]]]) -> None:
    """Attach what nothing is in the way of; one line names the rest, and why."""
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
