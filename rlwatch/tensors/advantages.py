"""Advantages as the loss gets them."""

from __future__ import annotations

import torch

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.spread import Std
from rlwatch.tensors.tokens import TokenBatch


def core(batch: TokenBatch) -> Stats:
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
