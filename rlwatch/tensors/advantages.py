"""Advantages as the loss gets them, and the two sides of a policy gradient: tokens made more and less likely."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.masked import keep, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats, nonfinite_stats
from rlwatch.tensors.spread import Std
from rlwatch.tensors.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class Sides:
    """Tokens of ``positive`` and of ``negative`` advantage inside the mask, (B, T) bool.

    A token whose advantage is NaN is in both, and :meth:`known` makes it NaN, so that no side looks whole.
    """

    positive: Tensor
    negative: Tensor
    broken: Tensor

    @classmethod
    def of(cls, advantages: Tensor, mask: Tensor) -> Sides:
        """Split ``advantages`` (B, T) or (B, 1) inside ``mask`` (B, T)."""
        broken, on = advantages.isnan(), mask.bool()
        return cls(on & ((advantages > 0) | broken), on & ((advantages < 0) | broken), broken)

    def known(self, x: Tensor) -> Tensor:
        """``x`` (B, T), NaN where the side is not known."""
        return widen(x).masked_fill(self.broken, torch.nan)


def response_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """The advantage of each response, (B,): its own, or the mean over its tokens of ``mask`` (B, T).

    ``advantages`` (B,), (B, 1) or (B, T). NaN for a response without tokens where it is a mean.
    """
    if advantages.dim() == 1:
        return widen(advantages)
    if advantages.shape != mask.shape:
        return widen(advantages).squeeze(1)
    return keep(advantages, mask, 0.0).sum(-1) / mask.bool().sum(-1)


# Advantages as the loss gets them.


def observe_advantages(batch: TokenBatch) -> Stats:
    """``adv/mean``, ``std``, ``max``, ``min``: over tokens if they differ between tokens, else over responses."""
    if batch.advantages is None:
        return {}
    a = batch.advantages
    every = batch.mask if a.shape == batch.mask.shape else torch.ones_like(a, dtype=torch.bool)
    return {
        "adv/mean": Mean.of(a, every),
        "adv/std": Std.of(a, every),
        "adv/max": Max.of(a, every),
        "adv/min": Min.of(a, every),
        **nonfinite_stats("advantage", a, every),
    }
