"""Mergeable statistics of how two quantities move together: correlation, slope of a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.masked import keep, masked_count, masked_sum, widen
from rlwatch.tensors.mergeable import Stat


@dataclass(frozen=True, slots=True)
class Paired(Stat):
    """Base: means and centred second moments of pairs (x, y), merged by the update of Chan, Golub and LeVeque (1979).

    ``n`` is the number of pairs; ``count`` the degrees of freedom, n - 1, or 0 where the statistic does not exist
    because a quantity it divides by does not vary beyond rounding.
    """

    n: Tensor
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, mask: Tensor) -> Self:
        """Of the pairs inside ``mask``; ``x`` and ``y`` broadcast against each other and the mask."""
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
        x, y = widen(x).expand(shape), widen(y).expand(shape)
        n = masked_count(mask, x)
        mean_x, mean_y = (masked_sum(z, mask) / n.clamp(min=1) for z in (x, y))
        dx, dy = keep(x - mean_x, mask, 0.0), keep(y - mean_y, mask, 0.0)
        return cls._from(n, (mean_x, mean_y), (dx.square().sum(), dy.square().sum(), (dx * dy).sum()))

    @override
    def merge(self, other: Self) -> Self:
        n = self.n + other.n
        gap_x, gap_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        share = other.n / n.clamp(min=1)
        moments = (
            self.xx + other.xx + gap_x.square() * self.n * share,
            self.yy + other.yy + gap_y.square() * self.n * share,
            self.xy + other.xy + gap_x * gap_y * self.n * share,
        )
        return self._from(n, (self.mean_x + gap_x * share, self.mean_y + gap_y * share), moments)

    @classmethod
    def _from(cls, n: Tensor, means: tuple[Tensor, Tensor], moments: tuple[Tensor, Tensor, Tensor]) -> Self:
        undefined = cls._undefined(_flat(moments[0], means[0], n), _flat(moments[1], means[1], n))
        return cls((n - 1).masked_fill(undefined, 0.0), n, *means, *moments)

    @classmethod
    def _undefined(cls, flat_x: Tensor, flat_y: Tensor) -> Tensor:
        """Whether the statistic does not exist, given which quantities do not vary."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Correlation(Paired):
    """Pearson's correlation, in [-1, 1]."""

    @classmethod
    @override
    def _undefined(cls, flat_x: Tensor, flat_y: Tensor) -> Tensor:
        return flat_x | flat_y

    @override
    def value(self) -> Tensor:
        return (self.xy / (self.xx.sqrt() * self.yy.sqrt())).clamp(-1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Slope(Paired):
    """Slope of the least-squares line of y on x, in units of y per unit of x; 0 where y does not vary."""

    @classmethod
    @override
    def _undefined(cls, flat_x: Tensor, flat_y: Tensor) -> Tensor:
        return flat_x

    @override
    def value(self) -> Tensor:
        return self.xy / self.xx


def _flat(squares: Tensor, mean: Tensor, n: Tensor) -> Tensor:
    """Whether what varies is rounding error only: equal floats need not equal their own rounded mean."""
    rounding = 16 * torch.finfo(squares.dtype).eps * mean
    return squares <= n * rounding.square()
