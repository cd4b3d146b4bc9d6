"""A series as points to draw: thinned without hiding a spike, non-finite values apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlwatch.ports import Series

BUCKETS = 260
"""Step ranges of which the smallest and the largest value are drawn: as many as a picture has columns."""


@dataclass(frozen=True, slots=True)
class Curve:
    """``steps`` and ``values`` (N,) finite, in order; ``bad``: steps with a value that is not finite, and its name."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    bad: tuple[tuple[int, str], ...] = ()
    replaced: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps or self.bad)


def curve(series: Series, starts: Mapping[int, int]) -> Curve:
    """The newest branch of a series. ``starts``: first step of each attempt; what a later one ran again is left out."""
    ends = {a: min((first for later, first in starts.items() if later > a), default=np.inf) for a in starts}
    limits = np.array([ends.get(int(attempt), np.inf) for attempt in series.attempts], dtype=np.float64)
    kept = series.steps < limits
    steps, values = series.steps[kept], series.values[kept]
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    finite = np.isfinite(values)
    shown = _extremes(steps[finite], values[finite])
    return Curve(
        tuple(steps[finite][shown].tolist()),
        tuple(values[finite][shown].tolist()),
        _bad(steps[~finite], values[~finite]),
        int((~kept).sum()),
    )


def _extremes(steps: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places of the first, the last, and the extremes of every bucket."""
    if len(steps) <= 2 * BUCKETS:
        return np.arange(len(steps))
    edges = np.linspace(steps[0], steps[-1], BUCKETS + 1)[1:-1]
    firsts = np.unique(np.concatenate(([0], np.searchsorted(steps, edges))))
    parts = np.split(values, firsts[1:])
    low = [int(first + part.argmin()) for first, part in zip(firsts, parts, strict=True) if len(part)]
    high = [int(first + part.argmax()) for first, part in zip(firsts, parts, strict=True) if len(part)]
    return np.unique(np.array([0, len(steps) - 1, *low, *high]))


def _bad(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[tuple[int, str], ...]:
    """The first of each kind in each of ``BUCKETS`` step ranges."""
    found: dict[tuple[int, str], int] = {}
    width = max(1, (int(steps[-1]) - int(steps[0])) // BUCKETS) if len(steps) else 1
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        word = "NaN" if np.isnan(value) else "Inf" if value > 0 else "-Inf"
        found.setdefault((step // width, word), step)
    return tuple(sorted((step, word) for (_, word), step in found.items()))
