"""What one clip did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.mergeable import Latest, Stats


@dataclass(frozen=True, slots=True)
class Clipped:
    """One step's gradients, before and after. Tensors on the device, float32 (L groups): nothing here was waited for.

    Parameters
    ----------
    groups
        Names of the L groups (layers, unless clipped by something else). None where clipping them failed: then only
        the global clip, if one was asked for, was done.
    total
        0-d L2 norm of all gradients before clipping: what ``clip_grad_norm_`` returns.
    before
        (L,) norms before clipping; 0 where there is no gradient.
    scales
        (L,) factors the rule chose; 1 where it chose none.
    coefficient
        0-d factor of the global clip that came after it; 1 where there was none.
    """

    groups: tuple[str, ...]
    total: Tensor
    before: Tensor
    scales: Tensor
    coefficient: Tensor

    @property
    def after(self) -> Tensor:
        """(L,) norms after clipping; NaN or Inf where they were that before and were left so."""
        return torch.where(self.scales == 0, 0.0, self.before * self.scales * self.coefficient)

    @property
    def layers_clipped(self) -> Tensor:
        """0-d number of groups that the rule scaled down."""
        return (self.scales < 1).sum()

    @property
    def scale_min(self) -> Tensor:
        """0-d smallest factor of the rule, in [0, 1]: 1 where it scaled none down."""
        return self.scales.min().clamp(max=1.0) if self.groups else torch.ones_like(self.total)

    @property
    def nonfinite(self) -> Tensor:
        """0-d number of groups with a NaN or Inf in their gradients (or a norm beyond float32)."""
        return (~self.before.isfinite()).sum()

    def metrics(self) -> dict[str, Tensor]:
        """For ``watcher.step(step, **clipped.metrics())``: canonical names, 0-d tensors."""
        if not self.groups:
            return {"optim/grad_norm": self.total}
        return {
            "optim/grad_norm": self.total,
            "optim/layers_clipped": self.layers_clipped.float(),
            "optim/clip_scale_min": self.scale_min,
        }

    def stats(self) -> Stats:
        """The same without the norm, as statistics of a step; every rank has the same."""
        one = torch.ones_like(self.total)
        return {name: Latest.of(x, one) for name, x in self.metrics().items() if name != "optim/grad_norm"}
