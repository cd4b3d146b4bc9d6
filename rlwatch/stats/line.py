"""A straight line through noisy points, some of which are wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlwatch.stats.robust import mad

HUBER = 1.345
"""Deviations beyond which a point counts less (95 % as efficient as least squares on normal noise)."""
ROUNDS = 8
"""Re-weightings: more change the third digit at most."""
LARGEST = 1e100
"""Numbers beyond it would overflow when squared."""


@dataclass(frozen=True, slots=True)
class Line:
    """y = ``slope`` x + ``intercept``; ``error`` is the standard error of the slope, ``explained`` in [0, 1] the share
    of the (weighted) variance of y that the line takes up.
    """

    slope: float
    intercept: float
    error: float
    explained: float

    def at(self, x: float) -> float:
        """The line's y."""
        return self.slope * x + self.intercept


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Least squares of ``y`` on ``x`` (finite, equally many), re-weighted after Huber so that outliers weigh little.

    None for fewer than three points, for points without spread in x, and for numbers too large to square. The standard
    error is that of Huber's estimator for independent noise (Huber 1973).

    >>> line = fit_line([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    >>> round(line.slope, 9), round(line.intercept, 9)
    (2.0, 1.0)
    """
    if len(x) < 3 or max(map(abs, (*x, *y))) > LARGEST:
        return None
    weights = [1.0] * len(x)
    line = _weighted(x, y, weights)
    for _ in range(ROUNDS):
        if line is None:
            return None
        rest = [b - line.at(a) for a, b in zip(x, y, strict=True)]
        scale = mad(rest, 0.0)
        if scale <= 0.0:
            break
        weights = [min(1.0, HUBER * scale / abs(r)) if r else 1.0 for r in rest]
        line = _weighted(x, y, weights)
    return line


def _weighted(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> Line | None:
    points = list(zip(x, y, weights, strict=True))
    total = math.fsum(weights)
    mean_x = math.fsum(w * a for a, _, w in points) / total
    mean_y = math.fsum(w * b for _, b, w in points) / total
    sxx = math.fsum(w * (a - mean_x) ** 2 for a, _, w in points)
    if not sxx > 0.0:
        return None
    slope = math.fsum(w * (a - mean_x) * (b - mean_y) for a, b, w in points) / sxx
    rest = [b - mean_y - slope * (a - mean_x) for a, b, _ in points]
    syy = math.fsum(w * (b - mean_y) ** 2 for _, b, w in points)
    left = math.fsum(w * r * r for r, w in zip(rest, weights, strict=True))
    explained = 1.0 - left / syy if syy > 0.0 else 0.0
    line = Line(slope, mean_y - slope * mean_x, _error(x, rest, weights), min(max(explained, 0.0), 1.0))
    return line if math.isfinite(line.slope) and math.isfinite(line.intercept) else None


def _error(x: Sequence[float], rest: Sequence[float], weights: Sequence[float]) -> float:
    """Standard error of the slope: the variance of what counts of each point, over the points that count in full."""
    n, whole = len(x), sum(w >= 1.0 for w in weights)
    middle = math.fsum(x) / n
    spread = math.fsum((a - middle) ** 2 for a in x)
    if whole == 0 or spread <= 0.0:
        return math.inf
    return math.sqrt(math.fsum((w * r) ** 2 for r, w in zip(rest, weights, strict=True)) / (n - 2) / spread) * n / whole
