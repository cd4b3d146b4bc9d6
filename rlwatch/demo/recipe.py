"""The numbers of the run, all fixed before it starts. The slip that kills it is one of them.

The learning rate settles, holds, and at ``restart_step`` begins a second warm-up, meant for 5e-4 and written
5e-2. Nothing is injected: the optimizer does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyper-parameters of the demo. Steps are optimizer steps, one rollout batch each."""

    seed: int = 0
    steps: int = 300
    batch: int = 128
    generations: int = 8
    beta: float = 0.05
    """Weight of the KL term: it holds the policy back, and is why resetting the reference helps."""
    warm_start_steps: int = 25
    first_learning_rate: float = 1.5e-3
    learning_rate: float = 4.5e-4
    settle_steps: int = 60
    restart_step: int = 190
    """No command can be too late as long as it comes before this step."""
    restart_ramp: int = 30
    restart_learning_rate: float = 5e-2

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of the update that follows ``step`` updates.

        >>> recipe = Recipe()
        >>> [recipe.learning_rate_at(step) for step in (0, 60, 190, 220)]
        [0.0015, 0.00045, 0.00045, 0.05]
        """
        if step < self.restart_step:
            return _line(step, self.settle_steps, self.first_learning_rate, self.learning_rate)
        return _line(step - self.restart_step, self.restart_ramp, self.learning_rate, self.restart_learning_rate)


def _line(at: int, over: int, first: float, last: float) -> float:
    """From ``first`` at 0 to ``last`` at ``over`` and beyond."""
    return last if at >= over else first + (last - first) * at / over
