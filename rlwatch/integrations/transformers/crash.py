"""How training ended, when it ended badly."""

from __future__ import annotations

from functools import wraps
from typing import Any, Protocol

from rlwatch.integrations.cause import cause_of, reason_of
from rlwatch.integrations.seam import Seam
from rlwatch.records import RunState

DEADLINE_S = 10.0
"""Longest we hold up an exception on its way out."""


class Steps(Protocol):
    """What holds the steps that were measured and not recorded yet."""

    def seal_unfinished(self, step: int) -> None:
        """End the step that training died within."""
        ...

    def deliver(self) -> None:
        """Record every sealed step."""
        ...


def report_crashes(trainer: Any, seam: Seam, steps: Steps | None, *, ours: bool) -> None:
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


def _report(trainer: Any, seam: Seam, steps: Steps | None, error: BaseException, *, ours: bool) -> None:
    run, step = seam.run, int(trainer.state.global_step)
    if run is None or not run.active:
        return
    if steps is not None:  # a dead device may refuse either; the event must be written all the same
        seam.attempt("unfinished step", steps.seal_unfinished, step + 1)
        seam.attempt("last steps", steps.deliver)
    seam.attempt("exception", run.event, "exception", step, **cause_of(error))
    if ours:
        seam.attempt("finish", run.finish, RunState.CRASHED, reason_of(error), DEADLINE_S)
