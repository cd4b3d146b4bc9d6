"""Trend of a short series that up to 29 % of outliers cannot turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from rlwatch.stats.robust import median, quantile

NORMAL_95 = 1.6449
"""Standard deviations of a normal variable below which 95 % of it lie."""


def theil_sen(steps: Sequence[int], values: Sequence[float]) -> float:
    """Median of the slopes between all pairs (Theil 1950, Sen 1968), in units of ``values`` per step.

    Needs two different steps, else 0. Cost is quadratic: meant for windows of a few dozen rows.

    >>> theil_sen([0, 10, 20, 30, 40], [1.0, 2.0, 3.0, 99.0, 5.0])
    0.1
    """
    slopes = _slopes(steps, values)
    return median(slopes) if slopes else 0.0


def slope_interval(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float] | None:
    """90 % confidence interval of that trend: order statistics of the slopes (Sen 1968), for independent noise.

    None where there are no two different steps. Neighbouring rows of a run go together, so it is rather too narrow.

    >>> slope_interval(list(range(20)), [0.5 * i for i in range(20)])
    (0.5, 0.5)
    """
    slopes = _slopes(steps, values)
    if not slopes:
        return None
    n = len(steps)
    half = NORMAL_95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18.0) / 2.0 / len(slopes)
    return quantile(slopes, max(0.5 - half, 0.0)), quantile(slopes, min(0.5 + half, 1.0))


def _slopes(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    points = zip(steps, values, strict=True)
    return [(y - b) / (x - a) for (a, b), (x, y) in combinations(points, 2) if x != a]
