"""Trend of a short series that up to 29 % of outliers cannot turn."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.stats.robust import median


def theil_sen(steps: Sequence[int], values: Sequence[float]) -> float:
    """Median of the slopes between all pairs (Theil 1950, Sen 1968), in units of ``values`` per step.

    Needs two different steps, else 0. Cost is quadratic: meant for windows of a few dozen rows.

    >>> theil_sen([0, 10, 20, 30, 40], [1.0, 2.0, 3.0, 99.0, 5.0])
    0.1
    """
    slopes = [
        (values[j] - values[i]) / (steps[j] - steps[i])
        for i in range(len(steps))
        for j in range(i + 1, len(steps))
        if steps[j] != steps[i]
    ]
    return median(slopes) if slopes else 0.0
