"""How training ended, when it ended badly."""

from __future__ import annotations

from functools import wraps
from typing import Any, Protocol

from rlwatch.integrations.cause import cause_of, reason_of
from rlwatch.integrations.transformers.callback import RLWatchCallback
from rlwatch.records import RunState


class Steps(Protocol):
    """What holds the steps that were measured and not recorded yet."""

    def seal_unfinished(self, step: int) -> None:
        """End the step that training died within."""
        ...

    def deliver(self) -> None:
        """Record every sealed step."""
        ...


def report_crashes(trainer: Any, scalars: RLWatchCallback, steps: Steps) -> None:
    """Make ``trainer.train`` record what ends it before raising it on, unchanged.

    An exception or interrupt becomes an ``exception`` event with its cause; a run made by ``scalars`` ends as crashed.
    """
    original = trainer.train

    @wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            scalars.seam.attempt("end of training", _report, trainer, scalars, steps, error)
            raise

    trainer.train = train


def _report(trainer: Any, scalars: RLWatchCallback, steps: Steps, error: BaseException) -> None:
    seam, run, step = scalars.seam, scalars.run, int(trainer.state.global_step)
    if run is None or not run.measures:
        return
    # a dead device may refuse either of the first two; the event must be written all the same
    seam.attempt("unfinished step", steps.seal_unfinished, step + 1)
    seam.attempt("last steps", steps.deliver)
    seam.attempt("exception", run.event, "exception", step, **cause_of(error))
    seam.attempt("finish", scalars.end, RunState.CRASHED, reason_of(error))
