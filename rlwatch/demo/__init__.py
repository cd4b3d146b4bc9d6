"""``rlwatch demo``: one real GRPO run of TRL that is watched live, gets one command, and fails by its own learning
rate.

This module has the numbers of the run, all fixed before it starts; the mistake that breaks it is one of them. A
learning-rate range test (the rate grows by a fixed factor every update, arXiv 1506.01186) was left in the schedule
behind the real one. No fault is injected: the optimizer does the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TINY, SMOLLM2 = "tiny", "smollm2"
"""Models of the demo: one made for it in a moment, and SmolLM2-135M-Instruct (:mod:`rlwatch.demo.smollm2`)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of the demo's run. Steps are optimizer steps, with one rollout batch each."""

    model: str = TINY
    seed: int = 0
    steps: int = 320
    batch: int = 128
    generations: int = 8
    beta: float = 0.1
    """Weight of the KL term: it holds the policy back, and is why resetting the reference helps."""
    warm_start_steps: int = 25
    warm_up_steps: int = 4
    top_learning_rate: float = 3e-3
    settled_step: int = 60
    """The learning rate rises on a line to the top, and falls on another to the settled one, reached at this step."""
    learning_rate: float = 4e-4
    range_test_step: int = 170
    """Step at which the forgotten range test begins: late enough for a person to have acted."""
    range_test_growth: float = 1.09
    range_test_end: float = 0.5

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the update that follows ``step`` updates.

        >>> recipe = Recipe()
        >>> [f"{recipe.learning_rate_at(step):.2g}" for step in (0, 3, 60, 170, 200, 319)]
        ['0.00075', '0.003', '0.0004', '0.0004', '0.0053', '0.5']
        """
        if step < self.warm_up_steps:
            return self.top_learning_rate * (step + 1) / self.warm_up_steps
        if step < self.settled_step:
            fallen = (step - self.warm_up_steps) / (self.settled_step - self.warm_up_steps)
            return self.top_learning_rate + (self.learning_rate - self.top_learning_rate) * fallen
        return self._range_tested(max(0, step - self.range_test_step))

    def _range_tested(self, steps: int) -> float:
        """Return the learning rate after ``steps`` steps of the range test."""
        needed = math.log(self.range_test_end / self.learning_rate) / math.log(self.range_test_growth)
        return self.range_test_end if steps >= needed else self.learning_rate * self.range_test_growth**steps


REAL = Recipe(
    model=SMOLLM2,
    steps=60,
    batch=16,
    beta=0.0,
    warm_up_steps=1,
    top_learning_rate=2e-5,
    settled_step=2,
    learning_rate=2e-5,
    range_test_step=30,
    range_test_growth=2.0,
    range_test_end=1.2e-3,
)
"""The demo on SmolLM2: it learns sums in some 20 steps. Without a KL term there is no reference to reset."""


def recipe_of(model: str) -> Recipe:
    """Return the hyperparameters of the demo for a model, ``tiny`` or ``smollm2``."""
    return REAL if model == SMOLLM2 else Recipe()
