"""Thinning of a series for the screen that keeps every spike, NaN and gap (numpy only).

Every point that is drawn was measured: a bucket keeps its smallest and its largest value at their own steps. Each
bucket with non-finite values keeps one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlwatch.compare.alignment import counts
from rlwatch.ports import Series

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ThinnedCurve:
    """Points of one line: finite values in order, and the steps of values that are not finite.

    ``steps`` (N,) and ``values`` (N,) finite; ``breaks`` (N,) is True where the line must not be joined to the point
    before; ``bad`` holds (step, ``"NaN"`` | ``"Inf"`` | ``"-Inf"``).
    """

    steps: Ints
    values: Floats
    breaks: NDArray[np.bool_]
    bad: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Branches:
    """One metric over all attempts of a run: the current line, and the parts that a later attempt replaced."""

    current: ThinnedCurve
    replaced: tuple[ThinnedCurve, ...] = field(default=())


def branches(one: Series, starts: dict[int, int], window: tuple[int, int], buckets: int) -> Branches:
    """Split the metric ``one`` into the current line and the parts that a later attempt replaced; thin each to
    ``buckets``.

    ``starts``: first step of each attempt; ``window``: first and last step to keep.
    """
    inside = (one.steps >= window[0]) & (one.steps <= window[1])
    kept = counts(one, starts)
    old = [
        thin(one.steps[mask], one.values[mask], buckets)
        for attempt in sorted(starts)
        if (mask := inside & ~kept & (one.attempts == attempt)).any()
    ]
    return Branches(thin(one.steps[inside & kept], one.values[inside & kept], buckets), tuple(old))


def thin(steps: Ints, values: Floats, buckets: int) -> ThinnedCurve:
    """Return at most ``2 * buckets + 2`` of the points, including the extremes of every bucket and both ends.

    Steps need not be sorted nor distinct; points of one step keep their order of arrival.
    """
    if (np.diff(steps) < 0).any():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    finite = np.isfinite(values)
    bad = _bad(steps[~finite], values[~finite], buckets)
    places = np.flatnonzero(finite)
    chosen = places[_extremes(steps[finite], values[finite], buckets)]
    # A line is broken where at least one non-finite value lay between two drawn points.
    holes = np.cumsum(~finite)[chosen]
    breaks = np.diff(holes, prepend=holes[:1]) > 0
    return ThinnedCurve(steps[chosen], values[chosen], breaks, bad)


def reduced(one: Series, starts: Mapping[int, int], buckets: int) -> Series:
    """Return a thinned copy of a series, rows in order of arrival.

    Each of ``buckets`` ranges of steps keeps its smallest and largest finite value and the first NaN, +Inf and -Inf;
    both ends are kept. Rows that a later attempt replaced are thinned separately from current ones. ``starts``: first
    step of each attempt.
    """
    if len(one.steps) <= 2 * buckets + 2:
        return one
    kept, found = counts(one, dict(starts)), []
    for mask in (kept, *(~kept & (one.attempts == attempt) for attempt in sorted(starts))):
        places = np.flatnonzero(mask)
        places = places[np.argsort(one.steps[places], kind="stable")]
        finite = places[np.isfinite(one.values[places])]
        found.append(finite[_extremes(one.steps[finite], one.values[finite], buckets)])
        for kind in (np.isnan, np.isposinf, np.isneginf):
            odd = places[kind(one.values[places])]
            if len(odd) > buckets:
                edges = np.linspace(one.steps[odd[0]], one.steps[odd[-1]], buckets + 1)[:-1]
                odd = odd[np.unique(np.searchsorted(one.steps[odd], edges, side="left"))]
            found.append(odd)
    at = np.sort(np.concatenate(found))
    return Series(one.name, one.steps[at], one.values[at], one.attempts[at], one.seqs[at])


@dataclass(frozen=True, slots=True)
class BucketMeans:
    """Means of one metric over ranges of steps of equal ``width``, for ranges that have rows.

    ``starts`` (B,): first step of each range, a multiple of ``width``; ``values`` (B,): mean of its finite values, NaN
    where it has none; ``counts`` (B,): number of its finite values; ``through``: last step that is included.
    """

    width: int
    starts: Ints
    values: Floats
    counts: Ints
    through: int


def bucket_means(one: Series, starts: Mapping[int, int], window: tuple[int, int], buckets: int) -> BucketMeans:
    """Return the mean of each of at most ``buckets + 1`` step ranges, over every row that no later attempt replaced.

    Parameters
    ----------
    one
        The metric, all of its rows.
    starts
        First step of each attempt.
    window
        First and last step, both included.
    buckets
        Number of ranges, about.
    """
    inside = counts(one, dict(starts)) & (one.steps >= window[0]) & (one.steps <= window[1])
    steps, values = one.steps[inside], one.values[inside]
    width = max(1, -(-(window[1] - window[0] + 1) // buckets))
    if not len(steps):
        none = np.empty(0, dtype=np.int64)
        return BucketMeans(width, none, np.empty(0), none, window[1])
    if (np.diff(steps) < 0).any():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    bucket = steps // width
    firsts = np.flatnonzero(np.diff(bucket, prepend=bucket[0] - 1))
    finite = np.isfinite(values)
    held = np.add.reduceat(finite.astype(np.int64), firsts)
    shown, most = np.where(finite, values, 0.0), np.maximum(held, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        means = np.add.reduceat(shown, firsts) / most
    if not np.isfinite(means).all():  # the sum of some range is larger than a float64
        means = np.add.reduceat(shown / np.repeat(most, np.diff(firsts, append=len(steps))), firsts)
    means[held == 0] = np.nan
    return BucketMeans(width, bucket[firsts] * width, means, held, int(steps[-1]))


def _extremes(steps: Ints, values: Floats, buckets: int) -> Ints:
    """Return sorted indices of the smallest and largest value of each of ``buckets`` equal step ranges."""
    if len(steps) <= 2 * buckets + 2:
        return np.arange(len(steps))
    edges = np.linspace(steps[0], steps[-1], buckets + 1)[1:-1]
    firsts = np.concatenate(([0], np.searchsorted(steps, edges, side="left")))
    firsts = firsts[(np.diff(firsts, prepend=-1) > 0) & (firsts < len(steps))]
    bucket = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(steps)))
    low, high = np.minimum.reduceat(values, firsts), np.maximum.reduceat(values, firsts)
    extremes = [_first_in_bucket(values == extreme[bucket], bucket) for extreme in (low, high)]
    chosen = np.sort(np.concatenate((*extremes, [0, len(steps) - 1])))
    return chosen[np.diff(chosen, prepend=-1) > 0]


def _first_in_bucket(hit: NDArray[np.bool_], bucket: Ints) -> Ints:
    places = np.flatnonzero(hit)
    return places[np.diff(bucket[places], prepend=-1) > 0]


def _bad(steps: Ints, values: Floats, buckets: int) -> tuple[tuple[int, str], ...]:
    """Return the first non-finite value of each kind in each bucket."""
    found: list[tuple[int, str]] = []
    for word, mask in (("NaN", np.isnan(values)), ("Inf", values == np.inf), ("-Inf", values == -np.inf)):
        at = steps[mask]
        if len(at) > buckets:
            edges = np.linspace(at[0], at[-1], buckets + 1)[:-1]
            at = np.unique(at[np.searchsorted(at, edges, side="left")])
        found += [(int(step), word) for step in at]
    return tuple(sorted(found))


def sparkline(one: Series, starts: dict[int, int], points: int = 30) -> tuple[list[list[float]], list[float]]:
    """Return a small curve of a series in the unit square: points ``[x, y]`` (y up), and the x of non-finite values.

    ``starts``: first step of each attempt. ``points``: largest number of points, about.
    """
    return in_unit_square(small(one, starts, points))


def small(one: Series, starts: dict[int, int], points: int = 30) -> ThinnedCurve:
    """Return the current line of the series ``one``, thinned to about ``points`` points for a small curve in a table.

    ``starts``: first step of each attempt.
    """
    if not len(one.steps):
        return ThinnedCurve(one.steps, one.values, np.empty(0, np.bool_))
    return branches(one, starts, (int(one.steps.min()), int(one.steps.max())), points).current


def mean_of(curves: Sequence[ThinnedCurve], points: int = 40) -> tuple[ThinnedCurve, NDArray[np.float64]]:
    """Return the mean of several lines over the steps of all, and the mean ± standard deviation (2, N).

    Each line counts only over its own steps; steps that are not finite in one of them are marked.
    """
    drawn = [curve for curve in curves if len(curve)]
    bad = tuple(sorted({item for curve in curves for item in curve.bad}))
    if not drawn:
        return ThinnedCurve(np.empty(0, np.int64), np.empty(0), np.empty(0, np.bool_), bad), np.empty((2, 0))
    grid = np.linspace(min(c.steps[0] for c in drawn), max(c.steps[-1] for c in drawn), points)
    rows = np.array([np.interp(grid, c.steps, c.values, left=np.nan, right=np.nan) for c in drawn])
    held = np.isfinite(rows).sum(axis=0)
    grid, rows, held = grid[held > 0], rows[:, held > 0], held[held > 0]
    middle = np.nanmean(rows, axis=0)
    spread = np.sqrt(np.nansum((rows - middle) ** 2, axis=0) / np.maximum(held - 1, 1))
    line = ThinnedCurve(grid.astype(np.int64), middle, np.zeros(len(grid), np.bool_), bad)
    return line, np.stack((middle - spread, middle + spread))


def in_unit_square(curve: ThinnedCurve, band: Floats | None = None) -> tuple[list[list[float]], list[float]]:
    """Return the points ``[x, y]`` (y up) of a line scaled to the unit square, and the x of values that are not finite.

    With a ``band`` (2, N), points are ``[x, y, low, high]``, and line and band together fill the square.
    """
    everywhere = [*curve.steps.tolist(), *(step for step, _ in curve.bad)]
    first, width = min(everywhere, default=0), (max(everywhere, default=0) - min(everywhere, default=0)) or 1
    shown = curve.values if band is None else band
    # Of halves, because the difference of two numbers may be beyond a float; a band may be beyond it as well.
    low, high = (float(shown.min()) / 2, float(shown.max()) / 2) if len(curve) else (0.0, 0.0)
    height = high - low

    def up(value: float) -> float:
        return round((float(value) / 2 - low) / height, 4) if 0 < height < math.inf else 0.5

    columns = (curve.values,) if band is None else (curve.values, band[0], band[1])
    drawn = [
        [round((step - first) / width, 4), *map(up, values)]
        for step, *values in zip(curve.steps.tolist(), *(column.tolist() for column in columns), strict=True)
    ]
    return drawn, [round((step - first) / width, 4) for step, _ in curve.bad]


def trend(values: Floats) -> str:
    """Return ``↑``, ``→`` or ``↓``: the median of the last tenth against the tenth before, beyond their noise.

    Fewer than 8 finite values have no trend (``""``).
    """
    finite = values[np.isfinite(values)]
    width = max(4, min(50, len(finite) // 10))
    if len(finite) < 2 * width:
        return ""
    before, after = finite[-2 * width : -width], finite[-width:]
    moved = float(np.median(after) - np.median(before))
    noise = float(np.median(np.abs(before - np.median(before)))) * 1.4826
    if abs(moved) <= max(noise, 1e-12 + 0.005 * abs(float(np.median(before)))):
        return "→"
    return "↑" if moved > 0 else "↓"
