"""verl makes several optimizer steps in one of its global steps: what is kept of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.gradnorm import GradNorms, Marked
from rlwatch.tensors.mergeable import Latest, Max, Mean, Stats


@dataclass(frozen=True, slots=True)
class EverMarked(Marked):
    """How many of P tensors were marked at any of several times."""

    @override
    def merge(self, other: Self) -> Self:
        return replace(other, kept=self.together(other.kept))


def gradient_stats(norms: GradNorms, total: Tensor, *, scaled: bool) -> Stats:
    """Per-layer norms of the last step, and how many parameters were not finite in any of them.

    ``total`` is the norm of all layers and ranks, 0-d; ``scaled`` gradients still carry a loss scale.
    """
    stats = norms.unscaled_stats(total) if scaled else norms.stats()
    marked = stats.get("nonfinite/grad")
    if isinstance(marked, Marked):
        stats["nonfinite/grad"] = EverMarked(marked.count, marked.kept, marked.held, marked.size)
    return {name: stat for name, stat in stats.items() if name not in ("optim/grad_norm", "optim/step_skipped")}


def step_stats(total: Tensor) -> Stats:
    """Of a step whose gradient norm over all ranks was ``total``, 0-d: verl skips it if that is not finite."""
    one, skipped = torch.ones_like(total, dtype=torch.bool), (~total.isfinite()).float()
    return {
        "optim/grad_norm": Latest.of(total, one),
        "optim/grad_norm_max": Max.of(total, one),
        "optim/step_skipped": Mean.of(skipped, one),
    }
