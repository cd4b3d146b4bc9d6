"""Sufficient statistics of one batch that combine exactly over micro-batches.

A mean of means is wrong as soon as the micro-batches hold different numbers of tokens. Each statistic
here keeps what is needed to be merged (sums, counts, maxima...), all as 0-d tensors on the device. ``count``
is how many things were measured: 0 means "not measured", which is not the same as NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeGuard

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.masked import masked_count, masked_max, masked_min, masked_sum, widen


@dataclass(frozen=True, slots=True)
class Stat(ABC):
    """Base: ``count`` is the number of things measured, 0-d."""

    count: Tensor

    def settle(self) -> Stat:
        """The statistic to read once nothing more will be merged: this, unless only the whole decides if it exists."""
        return self

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The statistic of both batches together."""

    def across(self, other: Self) -> Self:
        """The statistic of two ranks together, this being the lower one: as of two batches, unless all ranks measure
        the same thing.
        """
        return self.merge(other)

    def compact(self, most: int) -> Self:  # noqa: ARG002  (for those that keep values)
        """The statistic to send to another rank: this, or at most about ``most`` of the values it keeps."""
        return self

    @abstractmethod
    def value(self) -> Tensor:
        """The number to report, 0-d; meaningless where ``count`` is 0."""


@dataclass(frozen=True, slots=True)
class Single(Stat):
    """Base of those that keep, beside the count, just the number they report."""

    kept: Tensor

    @override
    def value(self) -> Tensor:
        return self.kept


@dataclass(frozen=True, slots=True)
class Total(Single):
    """Sum."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure ``x`` inside ``mask``."""
        return cls(masked_count(mask, x), masked_sum(x, mask))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.kept + other.kept)


@dataclass(frozen=True, slots=True)
class Mean(Total):
    """Arithmetic mean: kept as a sum, which merges, and divided when it is reported."""

    @override
    def value(self) -> Tensor:
        return self.kept / self.count


@dataclass(frozen=True, slots=True)
class ShareStat(Stat):
    """Share that a part holds of a sum of numbers >= 0, in [0, 1]; once settled, absent where the sum is 0."""

    part: Tensor
    whole: Tensor

    @classmethod
    def of(cls, part: Tensor, whole: Tensor, mask: Tensor) -> Self:
        """Measure the sum of ``part`` in that of ``whole`` (>= ``part`` >= 0), both inside ``mask``."""
        return cls(masked_count(mask, whole), masked_sum(part, mask), masked_sum(whole, mask))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.part + other.part, self.whole + other.whole)

    @override
    def settle(self) -> Self:
        return replace(self, count=torch.where(self.whole <= 0, 0.0, self.count))

    @override
    def value(self) -> Tensor:
        return self.part / self.whole


@dataclass(frozen=True, slots=True)
class Max(Single):
    """Largest value; NaN if one was NaN."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure ``x`` inside ``mask``."""
        return cls(masked_count(mask, x), masked_max(x, mask))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, torch.maximum(self.kept, other.kept))


@dataclass(frozen=True, slots=True)
class Min(Single):
    """Smallest value; NaN if one was NaN."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure ``x`` inside ``mask``."""
        return cls(masked_count(mask, x), masked_min(x, mask))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, torch.minimum(self.kept, other.kept))


@dataclass(frozen=True, slots=True)
class Latest(Single):
    """The last of several measurements: what is measured once a step."""

    @classmethod
    def of(cls, x: Tensor, measured: Tensor) -> Self:
        """Measure the 0-d ``x``, if the 0-d ``measured`` is set."""
        return cls(masked_count(measured, x), widen(x))

    @override
    def merge(self, other: Self) -> Self:
        return other

    @override
    def across(self, other: Self) -> Self:
        """The lower rank's, if it measured: every rank measured the same."""
        lower = self.count > 0
        return type(self)(torch.where(lower, self.count, other.count), torch.where(lower, self.kept, other.kept))


@dataclass(frozen=True, slots=True)
class RankMean(Total):
    """A sum within a rank, and the mean over the ranks: a loss that every rank scales as if it was alone."""

    ranks: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure ``x`` inside ``mask``, on this rank."""
        count = masked_count(mask, x)
        return cls(count, masked_sum(x, mask), torch.ones_like(count))

    @override
    def merge(self, other: Self) -> Self:
        return replace(self, count=self.count + other.count, kept=self.kept + other.kept)

    @override
    def across(self, other: Self) -> Self:
        both = self.merge(other)
        return replace(both, ranks=self.ranks + other.ranks)

    @override
    def value(self) -> Tensor:
        return self.kept / self.ranks


Stats = dict[str, Stat]
"""Canonical metric name -> its statistic."""


def merge(first: Mapping[str, Stat], second: Mapping[str, Stat]) -> Stats:
    """Both batches together; a metric only one of them measured is kept as it is."""
    both = dict(first)
    sums: list[tuple[str, Total, Total]] = []
    for name, stat in second.items():
        before = both.get(name)
        if _plain_sum(before) and _plain_sum(stat) and before.kept.device == stat.kept.device:
            sums.append((name, before, stat))
        else:
            both[name] = stat if before is None else before.merge(stat)
    return both | _added(sums)


def _plain_sum(stat: Stat | None) -> TypeGuard[Total]:
    """Check that adding count and sum is all there is to a merge."""
    return type(stat) in (Total, Mean)


def _added(sums: Sequence[tuple[str, Total, Total]]) -> Stats:
    """Sums and means of two batches together, in a few operations over all of them; a shared count is added once."""
    if not sums:
        return {}
    # A micro-batch has dozens of sums over one mask. Added one by one they would be as many kernel launches; so equal
    # counts (the same tensor, see counting_once) are added once, and all sums in one launch. The order of the two
    # operands is that of merge(), so that the result is the same to the last bit.
    counts = {(id(a.count), id(b.count)): (a.count, b.count) for _, a, b in sums}
    left, right = zip(*counts.values(), strict=True)
    count_of = dict(zip(counts, torch._foreach_add(left, right), strict=True))  # noqa: SLF001
    kept = torch._foreach_add([a.kept for _, a, _ in sums], [b.kept for _, _, b in sums])  # noqa: SLF001
    return {
        name: type(a)(count_of[id(a.count), id(b.count)], total) for (name, a, b), total in zip(sums, kept, strict=True)
    }


def merge_ranks(first: Mapping[str, Stat], second: Mapping[str, Stat]) -> Stats:
    """Two ranks together, ``first`` being the lower one. A metric they measure in different ways is the first's."""
    both = dict(first)
    sums: list[tuple[str, Total, Total]] = []
    for name, stat in second.items():
        before = both.get(name)
        if before is None:
            both[name] = stat
        elif type(stat) is type(before):
            if _plain_sum(before) and _plain_sum(stat):
                sums.append((name, before, stat))
            else:
                both[name] = before.across(stat)
    return both | _added(sums)


# Values that are not finite are counted where it matters: inside the mask.


def nonfinite(x: Tensor) -> Tensor:
    """1.0 where ``x`` is NaN or infinite, else 0.0; shape of ``x``, float32."""
    return (~x.isfinite()).float()


def nonfinite_stats(name: str, x: Tensor, mask: Tensor) -> Stats:
    """``nonfinite/<name>``: how many elements of ``x`` inside ``mask`` (same shape) are NaN or infinite."""
    return {f"nonfinite/{name}": Total.of(nonfinite(x), mask)}
