"""Mergeable statistics of how two quantities move together: correlation, slope of a line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.masked import keep, masked_count, masked_sum, widen
from rlwatch.tensors.mergeable import Stat


@dataclass(frozen=True, slots=True)
class Paired(Stat):
    """Base: means and centred second moments of pairs (x, y), merged by the update of Chan, Golub and LeVeque (1979).

    ``count`` is the number of pairs; once settled, 0 where a quantity that is divided by does not vary beyond rounding.
    All is float64 where the device has it: products of deviations cancel.
    """

    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, mask: Tensor) -> Self:
        """Of the pairs inside ``mask``; ``x`` and ``y`` broadcast against each other and the mask."""
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        x, y = (widen(z).to(dtype).expand(shape) for z in (x, y))
        n = masked_count(mask, x)
        mean_x, mean_y = (masked_sum(z, mask) / n.clamp(min=1) for z in (x, y))
        dx, dy = keep(x - mean_x, mask, 0.0), keep(y - mean_y, mask, 0.0)
        return cls(n, mean_x, mean_y, dx.square().sum(), dy.square().sum(), (dx * dy).sum())

    @override
    def merge(self, other: Self) -> Self:
        n = self.count + other.count
        gap_x, gap_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        share = other.count / n.clamp(min=1)
        both = self.count * share
        return type(self)(
            n,
            self.mean_x + gap_x * share,
            self.mean_y + gap_y * share,
            self.xx + other.xx + gap_x.square() * both,
            self.yy + other.yy + gap_y.square() * both,
            self.xy + other.xy + gap_x * gap_y * both,
        )


@dataclass(frozen=True, slots=True)
class Correlation(Paired):
    """Pearson's correlation, in [-1, 1]."""

    @override
    def settle(self) -> Self:
        constant = _constant(self.xx, self.mean_x, self.count) | _constant(self.yy, self.mean_y, self.count)
        return replace(self, count=torch.where(constant, 0.0, self.count))

    @override
    def value(self) -> Tensor:
        return (self.xy / (self.xx.sqrt() * self.yy.sqrt())).clamp(-1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Slope(Paired):
    """Slope of the least-squares line of y on x, in units of y per unit of x; 0 where y does not vary."""

    @override
    def settle(self) -> Self:
        return replace(self, count=torch.where(_constant(self.xx, self.mean_x, self.count), 0.0, self.count))

    @override
    def value(self) -> Tensor:
        return self.xy / self.xx


def _constant(squares: Tensor, mean: Tensor, n: Tensor) -> Tensor:
    """Whether what varies is no more than float32 rounds: equal floats need not equal their own rounded mean."""
    rounding = 16 * torch.finfo(torch.float32).eps * mean
    return squares <= n * rounding.square()
