"""Test whether two groups of seeds differ, metric by metric, by permutation.

Runs of both groups are shuffled into two groups of the same sizes, and the largest difference over the whole curve is
computed each time. The p-value is the share of shuffles that reach the observed difference, so that it accounts for the
search over steps. The only assumption: without a difference, any run could have been in either group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rlwatch.compare.parting import Floats, MetricSeries

Flags = NDArray[np.bool_]

ALPHA = 0.05
"""Significance level: chance of reporting a false difference, for one metric."""
MOST_EXACT = 20_000
"""Number of labellings (assignments of runs to the two groups) up to which all are tried."""
SAMPLED = 10_000
"""Number of random labellings (assignments of runs to the two groups) that are tried if there are too many to try
all.
"""
MOST_PLACES = 400
"""Most places on the axis that a curve has in the test; longer curves are averaged in blocks of rows."""
WINDOW = 20
"""Number of windows in a curve: a difference shorter than a window does not count."""
AROUND = 4
"""Windows over which the spread of the seeds is averaged: three seeds at one place give a poor estimate."""
AT_ONCE = 1 << 22
"""Most numbers in one array while labellings are tried, which bounds the memory."""
LARGEST_GROUP = 100
"""Largest group of seeds that :func:`needed` considers."""


class Answer(StrEnum):
    """Answer of the permutation test to whether two groups of seeds differ in one metric."""

    DIFFERS = "differs"
    NO_DIFFERENCE = "no difference found"
    TOO_FEW = "too few seeds"


@dataclass(frozen=True, slots=True)
class Band:
    """Values of one group of seeds at the places (T,) of its :class:`SeedComparison`; NaN where no seed has a value.

    ``median``, ``low`` (least), ``high`` (largest), ``mean``, ``std`` (between seeds, ddof 1; unit of the metric):
    float64 (T,) each. ``seeds``: number of seeds with a value there, int64 (T,).
    """

    median: Floats
    low: Floats
    high: Floats
    mean: Floats
    std: Floats
    seeds: NDArray[np.int64]

    @property
    def last(self) -> float:
        """Median at the last place with a value of any seed; NaN if there is none."""
        at = np.flatnonzero(self.seeds)
        return float(self.median[at[-1]]) if len(at) else math.nan


@dataclass(frozen=True, slots=True)
class SeedComparison:
    """Result of the permutation test for one metric of two groups of seeds.

    A labelling is an assignment of the runs to the two groups.

    Attributes
    ----------
    p
        Share of labellings whose largest difference is no smaller than the observed one; NaN if no place has a value of
        every seed.
    smallest_p
        Least p that so many seeds can give.
    needed
        Seeds in each group, and in the smaller one alone (None: no number is enough), with which p can reach
        :data:`ALPHA`.
    statistic
        Largest difference, in standard deviations of a seed.
    since, until
        Place from which the groups differ, and the last such place if they meet again later, else None.
    places, bands
        Places (T,) and values of the left and right group, for charts.
    null
        Largest difference (P,) of each labelling, in the order of :func:`labellings`.
    exact
        True if these are all labellings.
    not_finite
        Number of seeds with values that are NaN or infinite, which are left out.
    """

    answer: Answer
    p: float
    smallest_p: float
    needed: tuple[int, int | None]
    statistic: float
    since: float | None
    until: float | None
    places: Floats
    bands: tuple[Band, Band]
    null: Floats
    exact: bool
    not_finite: int = 0


def smallest_p(left: int, right: int) -> float:
    """Return the least p that a comparison of ``left`` seeds with ``right`` seeds can give.

    Of two groups of one size every labelling has a mirror image that differs as much.

    >>> smallest_p(3, 3), round(smallest_p(4, 4), 3), round(smallest_p(3, 4), 3)
    (0.1, 0.029, 0.029)
    """
    count = math.comb(left + right, left)
    return (2 if left == right else 1) / count


def needed(left: int, right: int) -> tuple[int, int | None]:
    """Return the seeds with which p can reach :data:`ALPHA`: in each group, and in the smaller group alone.

    The second number leaves the other group as it is; None if no number is enough.

    >>> needed(2, 2), needed(3, 2)
    ((4, 5), (4, 4))
    """
    each = next(n for n in range(max(2, left, right), LARGEST_GROUP) if smallest_p(n, n) <= ALPHA)
    few, many = sorted((left, right))
    alone = (n for n in range(few, LARGEST_GROUP) if smallest_p(n, many) <= ALPHA)
    return each, next(alone, None)


def labellings(left: int, right: int, seed: int = 0) -> tuple[Flags, bool]:
    """Return the labellings (assignments of runs to two groups), the actual one first, and whether these are all.

    Parameters
    ----------
    left, right
        Number of runs in each group.
    seed
        Seed of the random labellings, used above :data:`MOST_EXACT`.

    Returns
    -------
    chosen
        bool (P, left + right): True for the runs of the left group. With random labellings P is :data:`SAMPLED` + 1.
    exact
        True if ``chosen`` holds all labellings.
    """
    runs = left + right
    count = math.comb(runs, left)
    if count <= MOST_EXACT:
        chosen = np.zeros((count, runs), dtype=np.bool_)
        for row, places in enumerate(combinations(range(runs), left)):
            chosen[row, list(places)] = True
        return chosen, True
    rng, own = np.random.default_rng(seed), np.arange(runs) < left
    drawn = rng.permuted(np.tile(own, (SAMPLED, 1)), axis=1)
    return np.concatenate([own[None], drawn]), False


def compare_seeds(left: Sequence[MetricSeries], right: Sequence[MetricSeries], *, seed: int = 0) -> SeedComparison:
    """Test whether two groups of seeds differ in a metric, and from which place on.

    Parameters
    ----------
    left, right
        The metric of each run of either group: places ascending and distinct, values in any unit. Values that are not
        finite are left out. Curves end where the shortest does. If few places are common to all, rows are averaged
        in bins as wide as the rows of the sparsest run are apart.
    seed
        Seed of the random labellings, used if there are too many to try all.

    Raises
    ------
    ValueError
        If a group has fewer than two seeds: one has no spread.
    """
    for name, group in (("left", left), ("right", right)):
        if len(group) < 2:
            raise ValueError(f"a group of seeds needs two runs, {name} has {len(group)}")
    runs = [*left, *right]
    n, m = len(left), len(right)
    least, enough = smallest_p(n, m), needed(n, m)
    broken = sum(not np.isfinite(run.values).all() for run in runs)
    places, values = _aligned(runs)
    smooth = _smoothed(values, max(1, round(len(places) / WINDOW)))
    known = np.isfinite(smooth).all(axis=0)
    places, values, smooth = places[known], values[:, known], smooth[:, known]
    bands = (_band(values[:n]), _band(values[n:]))
    chosen, exact = labellings(n, m, seed)
    if not len(places):
        nothing = np.empty(0)
        answer = Answer.TOO_FEW if least > ALPHA else Answer.NO_DIFFERENCE
        return SeedComparison(
            answer, math.nan, least, enough, math.nan, None, None, places, bands, nothing, exact, broken
        )
    found, null, envelope = _tried(smooth, chosen)
    statistic = float(null[0])
    p = float((null >= _rounded(statistic)).mean())
    answer = Answer.TOO_FEW if least > ALPHA else Answer.DIFFERS if p <= ALPHA else Answer.NO_DIFFERENCE
    since = until = None
    if answer is Answer.DIFFERS:
        since, until = _stretch(places, found, float(_upper(null)), envelope)
    return SeedComparison(answer, p, least, enough, statistic, since, until, places, bands, null, exact, broken)


def corrected(found: Sequence[SeedComparison]) -> list[float]:
    """Return the p of each metric, corrected for the search over all metrics (Westfall and Young's maxT).

    All comparisons must have the same runs in the same order. The result is NaN where p is.
    """
    nulls = [one.null for one in found if len(one.null)]
    if not nulls:
        return [math.nan] * len(found)
    largest = np.max(nulls, axis=0)
    return [float((largest >= _rounded(one.statistic)).mean()) if len(one.null) else math.nan for one in found]


def _rounded(statistic: float) -> float:
    """Lower a statistic by more than the rounding of float32, so that mirrored labellings count as equal."""
    return statistic * (1 - 1e-6)


# From series to a table of runs by places.


def _aligned(runs: Sequence[MetricSeries]) -> tuple[Floats, Floats]:
    """Return places (T,) that all runs reach, and the values (runs, T) there; NaN where a run has none."""
    kept = [MetricSeries(run.x[fine], run.values[fine]) for run in runs for fine in [np.isfinite(run.values)]]
    empty = np.empty(0), np.empty((len(runs), 0))
    if not all(len(run) for run in kept):
        return empty
    low, high = max(run.x[0] for run in kept), min(run.x[-1] for run in kept)
    inside = [MetricSeries(r.x[w], r.values[w]) for r in kept for w in [(r.x >= low) & (r.x <= high)]]
    if not all(len(run) for run in inside):
        return empty
    cadence = max(_cadence(run.x) for run in kept)
    places, seen = np.unique(np.concatenate([run.x for run in inside]), return_counts=True)
    shared = places[seen == len(runs)]
    if 2 * len(shared) >= min(len(run) for run in inside):
        block = -(-len(shared) // MOST_PLACES)
        first = shared[::block]
        bins = [np.searchsorted(first, run.x, side="right") - 1 for run in inside]
    else:
        width = max(cadence, (high - low) / MOST_PLACES)
        first = low + width * np.arange(int((high - low) // width) + 1)
        bins = [((run.x - low) // width).astype(np.int64) for run in inside]
    values = np.full((len(runs), len(first)), np.nan)
    for row, run, bin_of in zip(values, inside, bins, strict=True):
        count = np.bincount(bin_of, minlength=len(first))
        total = np.bincount(bin_of, weights=run.values, minlength=len(first))
        row[count > 0] = total[count > 0] / count[count > 0]
    return first, values


def _cadence(x: Floats) -> float:
    return float(np.median(np.diff(x))) if len(x) > 1 else 1.0


def _smoothed(values: Floats, window: int) -> Floats:
    """Return the mean (runs, T) of the values over ``window`` places around each; at the ends over fewer."""
    present = np.isfinite(values)
    total = _moving(np.where(present, values, 0.0), window)
    count = _moving(present.astype(np.float64), window)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0.5, total / count, np.nan)


def _moving(values: Floats, window: int) -> Floats:
    """Return sums (..., T) over the ``window`` places around each; over fewer at the ends."""
    size = values.shape[-1]
    begin = np.clip(np.arange(size) - (window - 1) // 2, 0, size)
    end = np.clip(np.arange(size) + window // 2 + 1, 0, size)
    summed = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
    return np.asarray(summed[..., end] - summed[..., begin])


def _band(values: Floats) -> Band:
    present = np.isfinite(values)
    count = present.sum(axis=0)
    measured = np.where(present, values, np.nan)
    nothing = np.full(values.shape[1], np.nan)
    some = count > 0
    of = {name: nothing.copy() for name in ("median", "low", "high", "mean", "std")}
    if some.any():
        for name, function in (("median", np.nanmedian), ("low", np.nanmin), ("high", np.nanmax), ("mean", np.nanmean)):
            of[name][some] = function(measured[:, some], axis=0)
        several = count > 1
        if several.any():
            of["std"][several] = np.nanstd(measured[:, several], axis=0, ddof=1)
    return Band(**of, seeds=count.astype(np.int64))


# Differences under every labelling.


def differences(values: Floats, chosen: Flags) -> Floats:
    """Return differences (P, T) of the means of two groups, in standard deviations of seeds within their group.

    ``values`` (runs, T) has no gaps; ``chosen`` (P, runs) is True for the runs of the left group. The spread is
    averaged over some windows around each place. Without any spread a difference is infinite, and no difference is 0.
    """
    left = chosen.astype(np.float64)
    n = left.sum(axis=1, keepdims=True)
    m = values.shape[0] - n
    centre = values.mean(axis=0)
    x = values - centre  # sums of squares of what is small
    size = np.abs(x).max(axis=0)
    a, total = left @ x, x.sum(axis=0)
    mean_a, mean_b = a / n, (total - a) / m
    within = (x * x).sum(axis=0) - n * mean_a**2 - m * mean_b**2
    rounding = 1e-12 * (size + 1e-3 * np.abs(centre)) ** 2
    within = np.where(within > rounding, within, 0.0) / max(1, values.shape[0] - 2)
    around = max(1, round(AROUND * values.shape[1] / WINDOW))
    width = _moving(np.ones(values.shape[1]), around)
    spread = np.sqrt(np.maximum(_moving(within, around) / width, 0.0))
    apart = np.abs(mean_a - mean_b)
    apart = np.where(apart > np.sqrt(rounding), apart, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(apart > 0, apart / spread, 0.0)


def _tried(smooth: Floats, chosen: Flags) -> tuple[Floats, Floats, Floats]:
    """Return the actual difference (T,), the largest one (P,) of every labelling, and the envelope (T,) of them all."""
    parts = max(1, -(-len(chosen) * smooth.shape[1] // AT_ONCE))
    every = [differences(smooth, some).astype(np.float32) for some in np.array_split(chosen, parts)]
    own = differences(smooth, chosen[:1])[0]
    null = np.concatenate([one.max(axis=1) for one in every]).astype(np.float64)
    null[0] = own.astype(np.float32).max()
    envelope = np.empty(smooth.shape[1])
    for places in np.array_split(np.arange(smooth.shape[1]), max(1, parts)):
        envelope[places] = _upper(np.concatenate([one[:, places] for one in every]))
    return own.astype(np.float32).astype(np.float64), null, envelope


def _upper(values: Floats) -> Floats:
    """Return the value (...) that a share of at most :data:`ALPHA` of ``values`` (P, ...) exceeds."""
    return np.asarray(np.sort(values, axis=0)[math.ceil((1 - ALPHA) * len(values) - 1e-9) - 1])


def _stretch(places: Floats, found: Floats, beyond_all: float, envelope: Floats) -> tuple[float, float | None]:
    """Return the place where the difference leaves the envelope, and the last place beyond it if it returns for good.

    What proves the difference is the largest one; a stretch begins where the difference left the narrower envelope of
    each place, before it grew so large.
    """
    proof = np.flatnonzero(found > beyond_all)
    first = int(proof[0]) if len(proof) else int(found.argmax())
    beyond = found > envelope
    while first > 0 and beyond[first - 1]:
        first -= 1
    last = int(np.flatnonzero(beyond | (np.arange(len(found)) == first))[-1])
    window = max(1, round(len(places) / WINDOW))
    return float(places[first]), None if last + window >= len(places) else float(places[last])
