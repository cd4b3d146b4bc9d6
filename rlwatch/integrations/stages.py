"""Stages of a trainer: timed methods, wrapped on the instance, and the update, timed between callbacks."""

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
"""Method of a ``Trainer``, or of TRL's trainers -> its stage."""
WITHIN = {"logprobs": "sampling"}
"""Stage -> the only enclosing stage in which it counts: log-probs computed in the update belong to the update."""
VLLM = {"sync_weights": "weight_sync"}
"""The same for TRL's client of vLLM."""


def clock_of(run: Run | None) -> StageClock | None:
    """Return the clock of a run, or None without a run, or for an object that is not rlwatch's."""
    clock = getattr(run, "stages", None)
    return clock if isinstance(clock, StageClock) else None


def tap_stages(trainer: Any, seam: ErrorBoundary) -> None:
    """Time the methods of ``trainer`` that are stages."""
    tap_methods(trainer, METHODS, seam, WITHIN)
    tap_methods(getattr(trainer, "vllm_generation", None), VLLM, seam)


_NOWHERE: Mapping[str, str] = {}


def tap_methods(
    owner: object, methods: Mapping[str, str], seam: ErrorBoundary, within: Mapping[str, str] = _NOWHERE
) -> None:
    """Time the existing ``methods`` of ``owner``: method -> stage; ``within``: stage -> its only enclosing stage."""
    for method, stage in methods.items():
        if callable(getattr(owner, method, None)):
            _tap(owner, method, stage, seam, within.get(stage))


def _tap(owner: object, method: str, stage: str, seam: ErrorBoundary, within: str | None) -> None:
    original = getattr(owner, method)

    def tapped(*args: Any, **kwargs: Any) -> Any:
        clock = clock_of(seam.run)
        if clock is None or (within is not None and not clock.within(within)):
            return original(*args, **kwargs)
        with clock.stage(stage):
            return original(*args, **kwargs)

    setattr(owner, method, Tapped(original, tapped))


class StepStages:
    """Stages timed by a trainer's callbacks: the update from the beginning of a step to its end, and evaluations."""

    def __init__(self, seam: ErrorBoundary) -> None:
        self._seam = seam
        self._open: Opened | None = None
        self._steps = 0

    def begin(self, stage: str) -> None:
        """Enter ``stage``, after leaving one that is still open."""
        clock = clock_of(self._seam.run)
        if clock is not None:
            clock.leave(self._open)
            self._open = clock.enter(stage)

    def end(self) -> None:
        """Leave the current stage."""
        clock, opened = clock_of(self._seam.run), self._open
        self._open = None
        if clock is not None:
            clock.leave(opened)

    def evaluates(self) -> None:
        """Enter the evaluation, for a trainer whose methods are not timed."""
        clock = clock_of(self._seam.run)
        if clock is not None and not clock.tapped and self._open is None:
            self.begin("evaluation")

    def step_ended(self, step: int) -> None:
        """Note the end of a step, which other code may not report."""
        clock = clock_of(self._seam.run)
        if clock is not None:
            self._steps += 1
            clock.ended(step)

    def taken(self, run: Run, step: int) -> Mapping[str, float]:
        """Return the seconds per step of each stage since the last log, if no other code records them."""
        clock, steps = clock_of(run), max(1, self._steps)
        if clock is None or clock.tapped:
            return {}
        self._steps, spans = 0, clock.take()
        batch = batch_of_spans(step, spans)
        if batch is not None:
            run.log_spikes(batch)
        return {name: seconds / steps for name, seconds in seconds_of(spans).items()}
