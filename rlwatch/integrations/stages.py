"""Seconds that a trainer spends in each stage of a step (sampling, rewards, update and others).

Methods of the trainer are wrapped on the instance and timed. The update is timed between two callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlwatch.error_boundary import ErrorBoundary, Tapped
from rlwatch.run.stages import Opened, StageClock, batch_of_spans, seconds_of

if TYPE_CHECKING:
    from rlwatch.run import Run

METHODS = {
    "_generate_and_score_completions": "sampling",
    "_calculate_rewards": "reward",
    "_get_per_token_logps_and_entropies": "logprobs",
    "_move_model_to_vllm": "weight_sync",
    "_save_checkpoint": "checkpoint",
    "evaluate": "evaluation",
}
"""Name of a method of transformers' or TRL's ``Trainer`` -> name of the stage in which the time of its calls counts."""
WITHIN = {"logprobs": "sampling"}
"""Stage -> the only enclosing stage in which its time counts. Log-probs that are computed during the update count as
update.
"""
VLLM = {"sync_weights": "weight_sync"}
"""Name of a method of TRL's client of vLLM -> stage in which the time of its calls counts."""


def clock_of(run: Run | None) -> StageClock | None:
    """Return the clock that times the stages of ``run``; None if ``run`` is None or has no such clock."""
    clock = getattr(run, "stages", None)
    return clock if isinstance(clock, StageClock) else None


def tap_stages(trainer: Any, error_boundary: ErrorBoundary) -> None:
    """Wrap the methods of ``trainer`` and of its vLLM client that are stages of a step, so that their calls are timed.

    ``error_boundary`` is the error boundary that leads to the run and its clock.
    """
    tap_methods(trainer, METHODS, error_boundary, WITHIN)
    tap_methods(getattr(trainer, "vllm_generation", None), VLLM, error_boundary)


_NOWHERE: Mapping[str, str] = {}


def tap_methods(
    owner: object, methods: Mapping[str, str], error_boundary: ErrorBoundary, within: Mapping[str, str] = _NOWHERE
) -> None:
    """Wrap methods of ``owner``, so that the time of their calls counts in a stage. Missing methods are skipped.

    ``methods`` maps the name of a method to a stage. ``within`` maps a stage to the only enclosing stage in which it
    counts. ``error_boundary`` is the error boundary that leads to the run and its clock.
    """
    for method, stage in methods.items():
        if callable(getattr(owner, method, None)):
            _tap(owner, method, stage, error_boundary, within.get(stage))


def _tap(owner: object, method: str, stage: str, error_boundary: ErrorBoundary, within: str | None) -> None:
    original = getattr(owner, method)

    def tapped(*args: Any, **kwargs: Any) -> Any:
        clock = clock_of(error_boundary.run)
        if clock is None or (within is not None and not clock.within(within)):
            return original(*args, **kwargs)
        with clock.stage(stage):
            return original(*args, **kwargs)

    setattr(owner, method, Tapped(original, tapped))


class StepStages:
    """Timer of stages that a trainer's callbacks mark: the update, from the beginning of a step to its end, and
    evaluations.
    """

    def __init__(self, error_boundary: ErrorBoundary) -> None:
        self._error_boundary = error_boundary
        self._open: Opened | None = None
        self._steps = 0

    def begin(self, stage: str) -> None:
        """Start the timing of ``stage``. If another stage is still open, it ends first."""
        clock = clock_of(self._error_boundary.run)
        if clock is not None:
            clock.leave(self._open)
            self._open = clock.enter(stage)

    def end(self) -> None:
        """End the timing of the stage that :meth:`begin` started; does nothing if none is open."""
        clock, opened = clock_of(self._error_boundary.run), self._open
        self._open = None
        if clock is not None:
            clock.leave(opened)

    def evaluates(self) -> None:
        """Start the timing of an evaluation, for a trainer whose methods are not timed.

        Nothing happens while a stage is open.
        """
        clock = clock_of(self._error_boundary.run)
        if clock is not None and not clock.tapped and self._open is None:
            self.begin("evaluation")

    def step_ended(self, step: int) -> None:
        """Count ``step`` as ended, so that seconds can be divided by the number of steps."""
        clock = clock_of(self._error_boundary.run)
        if clock is not None:
            self._steps += 1
            clock.ended(step)

    def taken(self, run: Run, step: int) -> Mapping[str, float]:
        """Return the seconds per step of each stage since the last call, and record the single spans of time in
        ``run``.

        Empty if methods of the trainer are timed, because the times are then recorded elsewhere.
        """
        clock, steps = clock_of(run), max(1, self._steps)
        if clock is None or clock.tapped:
            return {}
        self._steps, spans = 0, clock.take()
        batch = batch_of_spans(step, spans)
        if batch is not None:
            run.log_spikes(batch)
        return {name: seconds / steps for name, seconds in seconds_of(spans).items()}
