"""Thinning a series for the screen without ever hiding a spike, a NaN or a gap (numpy only).

Every point that is drawn was measured: a bucket keeps its smallest and its largest value at their own
steps. Non-finite values are never thinned into nothing: each bucket that holds one reports one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlwatch.compare.alignment import counts
from rlwatch.ports import Series

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one line: finite ones in order, and the places where it is not finite.

    ``steps`` (N,) and ``values`` (N,) finite; ``breaks`` (N,) is True where the line must not be joined
    to the point before; ``bad`` holds (step, ``"NaN"`` | ``"Inf"`` | ``"−Inf"``).
    """

    steps: Ints
    values: Floats
    breaks: NDArray[np.bool_]
    bad: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Branches:
    """One metric over all attempts: the line that counts, and the stretches a later attempt replaced."""

    current: Curve
    replaced: tuple[Curve, ...] = field(default=())


def branches(one: Series, starts: dict[int, int], window: tuple[int, int], buckets: int) -> Branches:
    """Split ``one`` into the newest branch and what later attempts replaced; thin each to ``buckets``."""
    inside = (one.steps >= window[0]) & (one.steps <= window[1])
    kept = counts(one, starts)
    old = [
        thin(one.steps[mask], one.values[mask], buckets)
        for attempt in sorted(starts)
        if (mask := inside & ~kept & (one.attempts == attempt)).any()
    ]
    return Branches(thin(one.steps[inside & kept], one.values[inside & kept], buckets), tuple(old))


def thin(steps: Ints, values: Floats, buckets: int) -> Curve:
    """At most ``2 * buckets + 2`` of the points, the extremes of every bucket and both ends among them.

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
    return Curve(steps[chosen], values[chosen], breaks, bad)


def _extremes(steps: Ints, values: Floats, buckets: int) -> Ints:
    """Indices (sorted) of the smallest and largest value of each of ``buckets`` equal step ranges."""
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
    """The first non-finite value of each kind in each bucket."""
    found: list[tuple[int, str]] = []
    for word, mask in (("NaN", np.isnan(values)), ("Inf", values == np.inf), ("−Inf", values == -np.inf)):
        at = steps[mask]
        if len(at) > buckets:
            edges = np.linspace(at[0], at[-1], buckets + 1)[:-1]
            at = np.unique(at[np.searchsorted(at, edges, side="left")])
        found += [(int(step), word) for step in at]
    return tuple(sorted(found))


def sparkline(one: Series, starts: dict[int, int], points: int = 30) -> tuple[list[list[float]], list[float]]:
    """``one`` drawn into the unit square: points ``[x, y]`` (y up), and the x of non-finite values."""
    if not len(one.steps):
        return [], []
    curve = branches(one, starts, (int(one.steps.min()), int(one.steps.max())), points).current
    everywhere = [*curve.steps.tolist(), *(step for step, _ in curve.bad)]
    first, width = min(everywhere, default=0), (max(everywhere, default=0) - min(everywhere, default=0)) or 1
    low, height = (curve.values.min(), np.ptp(curve.values)) if len(curve) else (0.0, 0.0)
    drawn = [
        [round((step - first) / width, 4), round(float((value - low) / height), 4) if height else 0.5]
        for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True)
    ]
    return drawn, [round((step - first) / width, 4) for step, _ in curve.bad]


def trend(values: Floats) -> str:
    """``↑``, ``→`` or ``↓``: the median of the last tenth against the tenth before, beyond their noise.

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
