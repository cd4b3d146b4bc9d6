"""Sufficient statistics of one batch that combine exactly over micro-batches and ranks.

A mean of means is wrong as soon as the micro-batches hold different numbers of tokens. Each statistic here keeps the
values that a merge needs (sums, counts, maxima...), all as 0-d tensors on the device. ``count`` is the number of
measured values: 0 means "not measured", which differs from NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import ClassVar, Self, TypeGuard

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.masked import (
    keep,
    masked_count,
    masked_quantile,
    masked_sum,
    reduced,
    shared,
    sharing,
    widen,
)


@dataclass(frozen=True, slots=True)
class Stat(ABC):
    """Base of statistics that can be merged over batches and ranks.

    ``count``: number of values measured, 0-d; 0 means that there is nothing to report.
    """

    count: Tensor

    elementwise: ClassVar[bool] = False
    """True if :meth:`settle` and :meth:`value` compute from nothing but tensors, and treat alone each element of their
    first dimension when there is one more, so that many statistics of a class can be read as one; see :func:`read`.
    """

    def settle(self) -> Stat:
        """Return the statistic to read once nothing more will be merged.

        It is this statistic itself, unless only the merged data decide whether there is a value.
        """
        return self

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the statistic of this batch and of the ``other`` one together."""

    def across(self, other: Self) -> Self:
        """Return the statistic of this rank and the ``other`` one, whose rank is higher, together.

        By default values of two ranks combine as those of two batches do; a subclass differs if all ranks measure one
        quantity.
        """
        return self.merge(other)

    def compact(self, most: int) -> Self:  # noqa: ARG002  (for those that keep values)
        """Return the statistic to send to another rank: this one, or one with at most about ``most`` of the values it
        keeps.
        """
        return self

    @abstractmethod
    def value(self) -> Tensor:
        """Return the number to report, 0-d; meaningless if ``count`` is 0."""


@dataclass(frozen=True, slots=True)
class Single(Stat):
    """Base of statistics that keep only their count and one number, ``kept``, which is reported as it is by default."""

    kept: Tensor

    elementwise: ClassVar[bool] = True

    @override
    def value(self) -> Tensor:
        return self.kept


@dataclass(frozen=True, slots=True)
class Total(Single):
    """Sum of all values measured in a step."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Sum and count the values ``x`` inside ``mask``, a tensor of the same shape."""
        return cls(masked_count(mask, x), reduced("sum", x, mask))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.kept + other.kept)


@dataclass(frozen=True, slots=True)
class Mean(Total):
    """Arithmetic mean of the values: kept as a sum, which merges, and divided when it is reported."""

    @classmethod
    def each(cls, names: Sequence[str], x: Sequence[Tensor], masks: Sequence[Tensor]) -> dict[str, Self]:
        """Return name -> mean of one of ``x`` inside one of ``masks``, (N,) each, computed together."""
        values, on = torch.stack([widen(one) for one in x]), torch.stack([mask.bool() for mask in masks])
        rows = zip(on.sum(-1).to(values.dtype).unbind(), keep(values, on, 0.0).sum(-1).unbind(), strict=True)
        return {name: cls(*row) for name, row in zip(names, rows, strict=True)}

    @override
    def value(self) -> Tensor:
        return self.kept / self.count


@dataclass(frozen=True, slots=True)
class ShareStat(Stat):
    """Share that a part has in a sum of numbers >= 0, in [0, 1]; not measured if the sum is 0."""

    part: Tensor
    whole: Tensor

    elementwise: ClassVar[bool] = True

    @classmethod
    def of(cls, part: Tensor, whole: Tensor, mask: Tensor) -> Self:
        """Measure the sum of ``part`` relative to that of ``whole`` (>= ``part`` >= 0), both inside ``mask``."""
        return cls(masked_count(mask, whole), reduced("sum", part, mask), reduced("sum", whole, mask))

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
    """Largest of all values measured; NaN if one of them is NaN."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure the maximum of the values ``x`` inside ``mask``, a tensor of the same shape."""
        return cls(masked_count(mask, x), reduced("max", x, mask))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, torch.maximum(self.kept, other.kept))


@dataclass(frozen=True, slots=True)
class Min(Single):
    """Smallest of all values measured; NaN if one of them is NaN."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure the minimum of the values ``x`` inside ``mask``, a tensor of the same shape."""
        return cls(masked_count(mask, x), reduced("min", x, mask))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, torch.minimum(self.kept, other.kept))


@dataclass(frozen=True, slots=True)
class Latest(Single):
    """The last of several measurements, for quantities that are measured once in each step."""

    @classmethod
    def of(cls, x: Tensor, measured: Tensor) -> Self:
        """Measure the 0-d value ``x``, if the 0-d flag ``measured`` is set."""
        return cls(masked_count(measured, x), widen(x))

    @override
    def merge(self, other: Self) -> Self:
        return other

    @override
    def across(self, other: Self) -> Self:
        """Return the value of this rank, the lower one, if it measured, else that of ``other``: all ranks measure one
        quantity.
        """
        lower = self.count > 0
        return type(self)(torch.where(lower, self.count, other.count), torch.where(lower, self.kept, other.kept))


@dataclass(frozen=True, slots=True)
class RankMean(Total):
    """Sum of the values within a rank, averaged over ranks: for a loss that each rank scales as if it had the whole
    batch.
    """

    ranks: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure the sum of the values ``x`` inside ``mask``, a tensor of the same shape, on this rank."""
        count = masked_count(mask, x)
        return cls(count, reduced("sum", x, mask), torch.ones_like(count))

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
"""Metric name -> its statistic."""


def merge(first: Mapping[str, Stat], second: Mapping[str, Stat]) -> Stats:
    """Return the statistics of two batches together; a metric that only one of them measured is kept as it is."""
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
    """Return True if merging the statistic only adds count and sum."""
    return type(stat) in (Total, Mean)


def _added(sums: Sequence[tuple[str, Total, Total]]) -> Stats:
    """Return the merged sums and means of two batches, as few operations over all of them.

    ``sums``: name of each metric with its statistic in either batch. A count that several metrics share is added once.
    """
    if not sums:
        return {}
    # A micro-batch has dozens of sums over one mask. Added one by one they would be as many kernel launches; so equal
    # counts (the same tensor, see sharing) are added once, and all sums in one launch. The order of the two
    # operands is that of merge(), so that the result is the same to the last bit.
    counts = {(id(a.count), id(b.count)): (a.count, b.count) for _, a, b in sums}
    left, right = zip(*counts.values(), strict=True)
    count_of = dict(zip(counts, torch._foreach_add(left, right), strict=True))  # noqa: SLF001
    kept = torch._foreach_add([a.kept for _, a, _ in sums], [b.kept for _, _, b in sums])  # noqa: SLF001
    return {
        name: type(a)(count_of[id(a.count), id(b.count)], total) for (name, a, b), total in zip(sums, kept, strict=True)
    }


def merge_ranks(first: Mapping[str, Stat], second: Mapping[str, Stat]) -> Stats:
    """Return the statistics of two ranks together, ``first`` being the lower one.

    If they measure a metric by different classes, the first's is kept.
    """
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


# Reading: what a statistic computes of its sums is a few operations, and a step has some hundred statistics. So those
# of a class are stacked and read as one.


@dataclass(frozen=True, slots=True)
class Reading:
    """Values and counts of statistics that will not be merged any more, (N,) each, in the order of their ``names``."""

    names: tuple[str, ...]
    values: Tensor
    counts: Tensor


def read(stats: Mapping[str, Stat]) -> list[Reading]:
    """Settle ``stats`` and return their values and counts, in few operations, and without waiting for the device."""
    with sharing():
        alike: dict[tuple[object, ...], list[tuple[str, Stat]]] = {}
        for name, unsettled in stats.items():
            stat = unsettled if unsettled.elementwise else _alone(unsettled.settle())
            alike.setdefault(_kind(stat), []).append((name, stat))
        found: dict[tuple[object, ...], list[Reading]] = {}
        for group in alike.values():
            one = _read(*zip(*group, strict=True))
            found.setdefault((one.values.device, one.values.dtype, one.counts.device, one.counts.dtype), []).append(one)
        return [_together(readings) for readings in found.values()]


def _together(readings: Sequence[Reading]) -> Reading:
    names = tuple(name for one in readings for name in one.names)
    return Reading(names, cat([one.values for one in readings]), cat([one.counts for one in readings]))


def _alone(stat: Stat) -> Stat:
    """Return a settled statistic that is read by itself as one that is stacked with others: its count and its value."""
    return stat if stat.elementwise else Latest(stat.count, stat.value())


def _read(names: tuple[str, ...], stats: tuple[Stat, ...]) -> Reading:
    settled = _stacked(stats).settle()
    return Reading(names, settled.value(), settled.count)


def _kind(stat: Stat) -> tuple[object, ...]:
    """Return the properties that statistics must share to be read as one."""
    calculation, names = _calculation(type(stat))
    return calculation, *[getattr(getattr(stat, name), "device", None) for name in names]


@cache
def _calculation(kind: type[Stat]) -> tuple[tuple[object, ...], tuple[str, ...]]:
    """Return what is computed of a class of statistics when it is read, and the names of its fields.

    Of a sum, a maximum and a minimum the same is computed: nothing.
    """
    names = tuple(f.name for f in fields(kind))
    return (kind.settle, kind.value, names), names


def _stacked(stats: Sequence[Stat]) -> Stat:
    """Return statistics of one kind as one, whose tensors hold those of all, one after the other."""
    _, names = _calculation(type(stats[0]))
    columns = ([getattr(stat, name) for stat in stats] for name in names)
    return type(stats[0])(*[torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns])


# Values that are not finite are counted where it matters: inside the mask.


def nonfinite(x: Tensor) -> Tensor:
    """Return 1.0 where ``x`` is NaN or infinite, else 0.0; shape of ``x``, float32."""
    wide = widen(x)
    return (wide - wide != 0).float()  # a difference is NaN for NaN and infinity; isfinite is four operations


def nonfinite_stats(name: str, x: Tensor, mask: Tensor) -> Stats:
    """Return ``nonfinite/<name>``: the number of elements of ``x`` inside ``mask`` (same shape) that are NaN or
    infinite.
    """
    return {f"nonfinite/{name}": Total.of(nonfinite(x), mask)}


# Mergeable statistics of how values spread and move together: deviation, effective sample size, quantiles, slopes.


@dataclass(frozen=True, slots=True)
class Std(Stat):
    """Sample standard deviation (ddof 1), merged by the parallel update of Chan, Golub and LeVeque (1979).

    ``count`` is the degrees of freedom, n - 1: a single value has no spread.
    """

    # Sum and sum of squares would merge by plain addition, but E[x^2] - E[x]^2 cancels: of rewards near 1 that differ
    # by 1e-4 float32 leaves no digit. Deviations from each batch's own mean, and the gap between the means, do not.

    mean: Tensor
    squares: Tensor

    elementwise: ClassVar[bool] = True

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure the standard deviation of the values ``x`` inside ``mask``, a tensor of the same shape."""
        count = masked_count(mask, x)
        mean = masked_sum(x, mask) / count.clamp(min=1)
        return cls(count - 1, mean, masked_sum((widen(x) - mean) ** 2, mask))

    @override
    def merge(self, other: Self) -> Self:
        n, m = self.count + 1, other.count + 1
        both = n + m
        gap = other.mean - self.mean
        mean = self.mean + gap * m / both.clamp(min=1)
        squares = self.squares + other.squares + gap**2 * n * m / both.clamp(min=1)
        return type(self)(both - 1, mean, squares)

    @override
    def value(self) -> Tensor:
        return (self.squares / self.count).sqrt()


@dataclass(frozen=True, slots=True)
class Ess(Stat):
    """Effective sample size over n of the weights w = exp(x): (sum w)^2 / (n sum w^2), in (0, 1].

    Kish's, after Kong (1992); if the mean weight is 1 it is 1 / (1 + chi^2). Kept as log-sums, so that no weight is too
    large or too small to count: products over a response of 10^4 tokens exceed float32 in both directions.
    """

    log_sum: Tensor
    log_squares: Tensor

    elementwise: ClassVar[bool] = True

    @classmethod
    def of(cls, log_weight: Tensor, mask: Tensor) -> Self:
        """Measure the effective sample size of the raw weights ``exp(log_weight)`` inside ``mask``, a tensor of the
        same shape.
        """
        x = keep(log_weight, mask, -torch.inf).flatten()
        return cls(masked_count(mask, log_weight), *torch.stack([x, 2 * x]).logsumexp(-1).unbind())

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count,
            torch.logaddexp(self.log_sum, other.log_sum),
            torch.logaddexp(self.log_squares, other.log_squares),
        )

    @override
    def value(self) -> Tensor:
        # By Cauchy-Schwarz never above 1; equal weights come out a rounding above it.
        return (2 * self.log_sum - self.log_squares - self.count.log()).exp().clamp(max=1.0)


@shared
def pieces_of(x: Tensor, mask: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the values of one batch and which of them count, (N,) each, for statistics that keep them."""
    return (widen(x).flatten(),), (mask.bool().expand_as(x).flatten(),)


@shared
def joined(pieces: tuple[Tensor, ...]) -> Tensor:
    """Return the ``pieces`` of all batches as one tensor."""
    return cat(pieces)


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``torch.cat(tensors)``, or the only one of them itself."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


@dataclass(frozen=True, slots=True)
class Quantile(Stat):
    """The exact ``q``-quantile; keeps the values (4 bytes per token) until the step ends.

    A value of the i-th piece represents ``every[i]`` values, 1 unless it was thinned. With n values, the result of a
    thinned piece is exact for some q' within ``every / n`` of ``q``.
    """

    q: float
    values: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    every: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, x: Tensor, mask: Tensor, q: float) -> Self:
        """Measure the quantile ``q``, in [0, 1], of the values ``x`` inside ``mask``, a tensor of the same shape."""
        return cls(masked_count(mask, x), q, *pieces_of(x, mask))

    @override
    def merge(self, other: Self) -> Self:
        return replace(
            self,
            count=self.count + other.count,
            values=self.values + other.values,
            masks=self.masks + other.masks,
            every=self.every + other.every,
        )

    @override
    def compact(self, most: int) -> Self:
        """Return the statistic with at most ``most`` evenly spaced order statistics; all are NaN if a value was."""
        x, mask = torch.cat(self.values), torch.cat(self.masks)
        every = -(-len(x) // most)
        if every <= 1 or max(self.every) > 1:
            return self
        ordered, n = keep(x, mask, torch.inf).sort().values, mask.sum()
        first = torch.arange(0, len(x), every, device=x.device)
        # The middle of each run of `every` order statistics represents the run: no rank is off by more than half a run,
        # so that any quantile of the merged values is exact for some q' within every / n of q.
        middle = (first + (every - 1) // 2).minimum((n - 1).clamp(min=0))
        broken = keep(x, mask, 0.0).isnan().any()
        values = torch.where(broken, torch.nan, ordered[middle])
        return replace(self, values=(values,), masks=(first < n,), every=(every,))

    @override
    def value(self) -> Tensor:
        x, mask = joined(self.values), joined(self.masks)
        if max(self.every) == 1:
            return masked_quantile(x, mask, self.q)
        times = torch.cat([torch.full_like(v, n) for v, n in zip(self.values, self.every, strict=True)])
        return _quantile_of_repeated(x, torch.where(mask, times, 0.0), self.q)


def _quantile_of_repeated(x: Tensor, times: Tensor, q: float) -> Tensor:
    """Return the quantile ``q`` of the values ``x`` (N,), each of which counts ``times`` (N,) times, 0 included.

    Computed as :func:`masked_quantile` does.
    """
    # The cumulated counts are the ends of runs of equal values: the value at place k is that of the first run whose end
    # lies beyond k, found by bisection instead of by repeating the values.
    ordered, order = torch.where(times > 0, x, torch.inf).sort()
    ends = times[order].cumsum(0)
    place = q * (ends[-1] - 1).clamp(min=0)
    low, high = torch.searchsorted(ends, torch.stack([place.floor(), place.ceil()]), right=True).unbind()
    left, right = (ordered.gather(0, at.clamp(max=len(x) - 1).view(1)).squeeze(0) for at in (low, high))
    value = torch.where(left == right, left, left + (right - left) * (place - place.floor()))
    undefined = (ends[-1] == 0) | torch.where(times > 0, x, 0.0).isnan().any()
    return torch.where(undefined, torch.nan, value)


# Mergeable statistics of how two quantities move together: correlation, slope of a line.


@dataclass(frozen=True, slots=True)
class Paired(Stat):
    """Base of statistics of pairs (x, y): their means and centred second moments, merged as in Chan, Golub, LeVeque
    (1979).

    ``count`` is the number of pairs; once settled, 0 if a quantity that is divided by varies only by rounding. All is
    float64 where the device has it: products of deviations cancel.
    """

    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    elementwise: ClassVar[bool] = True

    @classmethod
    def of(cls, x: Tensor, y: Tensor, mask: Tensor) -> Self:
        """Measure the pairs inside ``mask``; ``x`` and ``y`` broadcast against each other and the mask."""
        return cls(*_moments(x, y, mask))

    @override
    def merge(self, other: Self) -> Self:
        n = self.count + other.count
        gap_x, gap_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        # Each batch's moments are about its own mean; moved to the common one they gain (gap)^2 n m / (n + m).
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


@shared
def _moments(x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the number of pairs inside ``mask``, the two means, and the sums of squared deviations and of their
    product.
    """
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    x, y = widen(x).to(dtype), widen(y).to(dtype)
    if x.shape != y.shape:
        x, y = torch.broadcast_tensors(x, y)  # type: ignore[no-untyped-call]
    n = masked_count(mask, x)
    # Two passes, means first: sum xy - n <x><y> of log-probs near -1 would lose what is looked for.
    both = torch.stack([x, y])
    means = keep(both, mask, 0.0).flatten(1).sum(-1) / n.clamp(min=1)
    away = keep(both - means.view(2, *[1] * x.dim()), mask, 0.0).flatten(1)
    (mean_x, mean_y), (xx, xy, _, yy) = means.unbind(), (away.unsqueeze(1) * away).sum(-1).view(-1).unbind()
    return n, mean_x, mean_y, xx, yy, xy


@dataclass(frozen=True, slots=True)
class Correlation(Paired):
    """Pearson's correlation of x and y, in [-1, 1]; not measured if one of them is constant."""

    @override
    def settle(self) -> Self:
        constant = _constant(self.xx, self.mean_x, self.count) | _constant(self.yy, self.mean_y, self.count)
        return replace(self, count=torch.where(constant, 0.0, self.count))

    @override
    def value(self) -> Tensor:
        # Two roots, not the root of the product: of tiny deviations that would be 0.
        return (self.xy / (self.xx.sqrt() * self.yy.sqrt())).clamp(-1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Slope(Paired):
    """Slope of the least-squares line of y on x, in units of y per unit of x; 0 if y is constant, not measured if x
    is.
    """

    @override
    def settle(self) -> Self:
        return replace(self, count=torch.where(_constant(self.xx, self.mean_x, self.count), 0.0, self.count))

    @override
    def value(self) -> Tensor:
        return self.xy / self.xx


def _constant(squares: Tensor, mean: Tensor, n: Tensor) -> Tensor:
    """Return True where the variance is within the rounding of float32: equal floats may differ from their mean."""
    # Inputs are float32 widened: a constant differs from its mean by a few ulp of it. 16 ulp for each of n values.
    rounding = 16 * torch.finfo(torch.float32).eps * mean
    return squares <= n * rounding.square()


# Growth of the variance of log-ratios with the length of responses.


@dataclass(frozen=True, slots=True)
class VarianceGrowth(Stat):
    """Growth of the variance of a response's log-ratio with its length, nats^2 per token.

    Per response: T tokens and S, the sum of their log-ratios. With m = sum S / sum T over responses, it is the slope of
    the least-squares line of (S - m T)^2 on T. Independent tokens of standard deviation s give s^2, and then responses
    of T tokens have an effective sample size of exp(-s^2 T). A larger value means that the deviations within a response
    are correlated. It may be negative on a sample.

    ``count`` is the number of responses with tokens; once settled, 0 if all have one length. ``sums`` (8,) over
    responses are in float64 where the device has it.
    """

    sums: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Measure the token log-ratios ``x`` (B, T), in nats, inside ``mask`` (B, T)."""
        # Third powers of lengths near 10^4 are 10^12 a response: sums of them need float64, and then merge by addition.
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        s, t = keep(x, mask, 0.0).sum(-1, dtype=dtype), mask.bool().sum(-1).to(dtype)
        tt, ss, st = t * t, s * s, s * t
        columns = t, tt, tt * t, s, ss, st, ss * t, st * t
        return cls((t > 0).sum().to(dtype), torch.stack(columns).sum(-1))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.sums + other.sums)

    @override
    def settle(self) -> Self:
        t, tt = self.sums[:2].unbind()
        return replace(self, count=torch.where(self.count * tt > t * t, self.count, 0.0))

    @override
    def value(self) -> Tensor:
        n, (t, tt, ttt, s, ss, st, sst, stt) = self.count, self.sums.unbind()
        # The drift m is known only once all batches are together, so (S - m T)^2 is multiplied out: its sum, and that
        # of its products with T, follow from sums that do not hold m. Then the slope of y on T is (n sum yT - sum T sum
        # y) / (n sum T^2 - (sum T)^2).
        m = s / t
        squares = ss - 2 * m * st + m * m * tt
        products = sst - 2 * m * stt + m * m * ttt
        return (n * products - t * squares) / (n * tt - t * t)
