"""AdaGC: each tensor's norm against a moving average of its own clipped norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.clipping.grouping import By
from rlwatch.clipping.rule import State, positive, within_one


@dataclass(frozen=True, slots=True)
class AdaGC:
    """Adaptive gradient clipping per tensor (arXiv 2502.11034, algorithm 1).

    For step t < ``warmup``, with the global norm ||g||: h = min(absolute / ||g||, 1) for all, and
    gamma_i = min(gamma_i, ||h g_i||). After: h_i = min(relative gamma_i / ||g_i||, 1), and
    gamma_i = beta gamma_i + (1 - beta) ||h_i g_i||.

    Because the average is fed with what was clipped, it can grow by (1 - beta)(relative - 1) = 0.1 % a step at most: a
    tensor whose first gradients are tiny (the A of a LoRA adapter) stays clipped for long. A tensor first seen after
    the warm-up begins with that norm (the paper has no such tensors).

    Parameters
    ----------
    relative, absolute
        lambda_rel and lambda_abs.
    beta
        Of the average, in [0, 1).
    warmup
        Steps in which the global norm rules, >= 0.
    by
        What is clipped as one; published: each tensor.
    """

    relative: float = 1.05
    absolute: float = 1.0
    beta: float = 0.98
    warmup: int = 100
    by: By = By.TENSOR

    def __post_init__(self) -> None:
        positive("AdaGC", relative=self.relative, absolute=self.absolute)
        within_one("AdaGC", beta=self.beta)

    def start(self, like: Tensor) -> State:
        """No average yet (infinite), no steps."""
        return {"gamma": torch.full_like(like, float("inf")), "steps": like.new_zeros((), dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """See :class:`~rlwatch.clipping.rule.ClipRule`."""
        gamma, steps = state["gamma"], state["steps"]
        total = torch.where(seen, norms, 0.0).square().sum().sqrt()
        warming = steps < self.warmup
        scales = torch.where(warming, self.absolute / total, self.relative * gamma / norms).clamp(max=1.0)
        clipped = scales * norms
        average = torch.where(gamma.isinf(), clipped, self.beta * gamma + (1 - self.beta) * clipped)
        updated = torch.where(warming, torch.minimum(gamma, clipped), average)
        return scales, {"gamma": torch.where(seen, updated, gamma), "steps": steps + seen.any()}
