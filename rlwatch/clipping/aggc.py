"""AGGC: the norm of all modules of one kind against an interval around its moving average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.clipping.grouping import By
from rlwatch.clipping.rule import State, positive, within_one
from rlwatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AGGC:
    """Adaptive group-wise gradient clipping (arXiv 2601.11864; settings named after ZhiyuanLi218/AGGC).

    With E_j the moving average of the norms of group j after clipping, a norm above ``high`` E_j is clipped to it; one
    below ``low`` E_j is raised to it, if ``low`` is given. Both multipliers go linearly to their late values, between
    ``switch`` and ``switch + ramp`` of ``total_steps``. Then E_j = beta E_j + (1 - beta) norm after clipping.

    Two things to know. With ``high`` = 1, the default of the released code, the average can only fall; its script for
    verl uses high 0.7, high_late 0.999, low 0.98, beta 0.99, switch 0.6, most_up 1.1, most_down 0.9. And that code
    starts the average at 0, so that the second step is clipped to (1 - beta) of the first; here it starts at the first
    norm.

    Parameters
    ----------
    high, low
        Multipliers of the average; ``low`` None: small norms are left alone.
    high_late, low_late
        Their late values; None: as before.
    total_steps
        Length of training, in steps; needed where there is a late value.
    switch, ramp
        When the multipliers change, as shares of the training.
    most_up, most_down
        Bounds of the factor: the largest, and the smallest (for clipping at most so far); None: none.
    beta
        Of the average, in [0, 1).
    by
        What is clipped as one; published: all modules of one kind.
    """

    high: float = 1.0
    low: float | None = None
    high_late: float | None = None
    low_late: float | None = None
    total_steps: int | None = None
    switch: float = 0.5
    ramp: float = 0.2
    most_up: float | None = None
    most_down: float | None = None
    beta: float = 0.98
    by: By = By.MODULE

    def __post_init__(self) -> None:
        positive("AGGC", high=self.high, low=self.low, high_late=self.high_late, low_late=self.low_late)
        positive("AGGC", ramp=self.ramp, most_up=self.most_up, most_down=self.most_down, total_steps=self.total_steps)
        within_one("AGGC", beta=self.beta, switch=self.switch)
        if (self.high_late is not None or self.low_late is not None) and self.total_steps is None:
            raise ConfigError("AGGC: high_late and low_late need total_steps, the length of training")

    def start(self, like: Tensor) -> State:
        """No average yet (infinite), no steps."""
        return {"average": torch.full_like(like, float("inf")), "steps": like.new_zeros((), dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """See :class:`~rlwatch.clipping.rule.ClipRule`."""
        average, steps = state["average"], state["steps"]
        known = average.isfinite()
        base = torch.where(known, average, norms)
        late = self._lateness(steps)
        bounded = torch.minimum(norms, _between(self.high, self.high_late, late) * base)
        if self.low is not None:
            bounded = torch.maximum(bounded, _between(self.low, self.low_late, late) * base)
        scales = torch.where(known, bounded / norms, 1.0).clamp(self.most_down, self.most_up or float("inf"))
        updated = torch.where(known, self.beta * base + (1 - self.beta) * scales * norms, norms)
        return scales, {"average": torch.where(seen, updated, average), "steps": steps + seen.any()}

    def _lateness(self, steps: Tensor) -> Tensor:
        """0 before the switch, 1 after the ramp, 0-d."""
        if self.total_steps is None:
            return torch.zeros_like(steps, dtype=torch.float32)
        return ((steps / self.total_steps - self.switch) / self.ramp).clamp(0.0, 1.0)


def _between(early: float, late: float | None, lateness: Tensor) -> Tensor:
    return early + ((early if late is None else late) - early) * lateness
