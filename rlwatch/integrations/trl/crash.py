"""How training ended, when it ended badly."""

from __future__ import annotations

from functools import wraps
from typing import Any

from rlwatch.integrations.cause import cause_of, reason_of
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.trl.stepper import StepCallback
from rlwatch.records import RunState

DEADLINE_S = 10.0
"""Longest we hold up an exception on its way out."""


def report_crashes(trainer: Any, seam: Seam, steps: StepCallback | None, *, ours: bool) -> None:
    """Make ``trainer.train`` record what ends it before raising it on, unchanged.

    An exception or interrupt becomes an ``exception`` event with its cause; a run of ours (``ours``) ends as crashed.
    """
    original = trainer.train

    @wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            _report(trainer, seam, steps, error, ours=ours)
            raise

    trainer.train = train


def _report(trainer: Any, seam: Seam, steps: StepCallback | None, error: BaseException, *, ours: bool) -> None:
    run, step = seam.run, int(trainer.state.global_step)
    if run is None or not run.active:
        return
    if steps is not None:  # a dead device may refuse either; the event must be written all the same
        seam.attempt("unfinished step", steps.seal_unfinished, step + 1)
        seam.attempt("last steps", steps.deliver)
    seam.attempt("exception", run.event, "exception", step, **cause_of(error))
    if ours:
        seam.attempt("finish", run.finish, RunState.CRASHED, reason_of(error), DEADLINE_S)
