"""Groups of responses to one prompt, whole or spread over micro-batches and ranks.

A group's statistic exists only once all its responses are together, so these statistics keep one value a response
until the step ends. Groups are known by int64 ids; an id below 0 is known within its own batch only, so that the
groups of two batches stay apart (:func:`consecutive`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.masked import masked_count
from rlwatch.tensors.mergeable import Stat


def consecutive(n: int, size: int, device: torch.device | None = None) -> Tensor:
    """Ids (n,) of groups that lie one after the other, ``size`` responses each, whole within this batch.

    Raises ``ValueError`` if groups of ``size`` do not divide ``n`` responses.

    >>> consecutive(4, 2).tolist()
    [-1, -1, -2, -2]
    """
    if size < 1 or n % size:
        raise ValueError(f"{n} responses do not divide into groups of {size}")
    return -1 - torch.arange(n, device=device) // size


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which of N responses belong together: ``labels`` (N,) in [0, N), equal within a group."""

    labels: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> Self:
        """By the ``ids`` (N,) of their groups."""
        ordered, order = ids.sort()
        fresh = torch.ones_like(ordered, dtype=torch.bool)
        fresh[1:] = ordered[1:] != ordered[:-1]
        return cls(torch.empty_like(order).scatter_(0, order, fresh.cumsum(0) - 1))

    def total(self, x: Tensor) -> Tensor:
        """Sums of ``x`` (N, ...) within each group, (N, ...); 0 for a label that no response has."""
        return torch.zeros_like(x).index_add_(0, self.labels, x)

    def largest(self, x: Tensor) -> Tensor:
        """Maxima of the floats ``x`` (N,) within each group, (N,); -inf for a label that no response has."""
        return torch.full_like(x, -torch.inf).scatter_reduce_(0, self.labels, x, "amax")


@dataclass(frozen=True, slots=True)
class Grouped(Stat):
    """Base: keeps ``values`` (B, ...), ``groups`` (B,) and ``masks`` of every batch until they are read.

    ``count`` is the number of values kept; what could be measured of groups, :meth:`settle` tells.
    """

    values: tuple[Tensor, ...]
    groups: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]

    @classmethod
    def of(cls, values: Tensor, groups: Tensor, mask: Tensor) -> Self:
        """Of what lies inside ``mask``: (B,), or the shape of ``values``. Copied, since a trainer may reuse its own."""
        kept = (values.detach().clone(), groups.detach().clone(), mask.detach().bool().clone())
        return cls(masked_count(mask, mask.float()), *((tensor,) for tensor in kept))

    @override
    def merge(self, other: Self) -> Self:
        return replace(
            self,
            count=self.count + other.count,
            values=self.values + other.values,
            groups=self.groups + other.groups,
            masks=self.masks + other.masks,
        )

    def reduce(self) -> Stat:
        """The statistic without the values: all that is needed where no group lies in another batch too."""
        return self.over(joined(self.values), joined(self.masks), grouped_by(self.groups))

    @abstractmethod
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Stat:
        """The statistic of all values together."""

    @override
    def settle(self) -> Stat:
        return self.reduce().settle()

    @override
    def value(self) -> Tensor:
        return self.settle().value()


@lru_cache(maxsize=4)
def joined(pieces: tuple[Tensor, ...]) -> Tensor:
    """The values of all batches in one tensor (N, ...).

    Many statistics keep the very same tensors, and tensors are equal in a cache only if they are identical: so this is
    done once for all of them, and so is what follows from it.
    """
    return torch.cat(pieces)


@lru_cache(maxsize=2)
def grouped_by(pieces: tuple[Tensor, ...]) -> Grouping:
    """By the ids of all batches, where those below 0 of different batches differ."""
    apart, seen = [], 0
    for ids in pieces:
        apart.append(torch.where(ids < 0, ids - seen, ids))
        seen += ids.shape[0]
    return Grouping.of(torch.cat(apart))
