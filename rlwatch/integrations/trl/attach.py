"""``watch(trainer)``: everything rlwatch can see and do in a TRL trainer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlwatch.errors import ConfigError
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.transformers.callback import RLWatchCallback
from rlwatch.integrations.trl.compat import obstacle
from rlwatch.integrations.transformers.crash import report_crashes
from rlwatch.integrations.trl.stepper import StepCallback
from rlwatch.integrations.trl.taps import Taps

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")


def watch(trainer: Any, *, run: Run | None = None, text: bool = False, **init_kwargs: Any) -> Run:
    """Watch a TRL trainer and return the run it records.

    Beside the scalars of the log: statistics per token, gradients per layer, non-finite counts and the most
    extreme tokens, every step; commands; and the exception that ended training. Parameters come out
    bit-identical to training unwatched. A trainer whose internals are not known is watched by its scalars, with
    one warning. With several ranks the per-token statistics are those of rank 0's share of the batch.

    Parameters
    ----------
    trainer
        A trainer that has not begun to train. Its instance is changed, its class is not.
    run
        A run to record into, which the caller ends. By default one is made now and finished with training.
    text
        Whether to keep the text of the extreme tokens beside their ids. Off: no text leaves the trainer.
    init_kwargs
        Arguments of :func:`rlwatch.init`; source, configuration, output directory and rank come from the trainer unless
        given.

    Raises
    ------
    ConfigError
        If the trainer is watched already.
    RLWatchError
        What :func:`rlwatch.init` raises, before anything was changed.
    """
    if any(isinstance(callback, RLWatchCallback) for callback in trainer.callback_handler.callbacks):
        raise ConfigError("this trainer is watched already; leave RLWatchCallback out where watch(trainer) is called")
    scalars = RLWatchCallback(run, **init_kwargs)
    recording = scalars.begin(trainer.args, trainer.model, watched=True)
    seam = scalars.seam
    steps = None
    reason = obstacle(trainer)
    if reason is None:
        steps = _tap(trainer, seam, text=text)
    else:
        logger.warning("rlwatch records scalars only: %s", reason)
    trainer.add_callback(scalars)
    report_crashes(trainer, seam, steps, ours=scalars.ours)
    return recording


def _tap(trainer: Any, seam: Seam, *, text: bool) -> StepCallback:
    """Attach the taps. Their callback comes before the scalars', so that a step's tensors precede its log row."""
    taps = Taps(trainer, seam)
    taps.attach()
    decode = _decoder(trainer.processing_class) if text else None
    steps = StepCallback(trainer, taps, seam, decode)
    trainer.add_callback(steps)
    if trainer.args.logging_nan_inf_filter:
        logger.info("the trainer hides NaN losses from its log (logging_nan_inf_filter); loss/raw is read from the tap")
    return steps


def _decoder(processing_class: Any) -> Any:
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return lambda token: str(tokenizer.decode([token]))
