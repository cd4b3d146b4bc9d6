"""Order statistics of a handful of finite numbers: what one outlier cannot move."""

from __future__ import annotations

from collections.abc import Sequence

GAUSSIAN = 1.4826
"""1 / Phi^-1(3/4): makes the median absolute deviation estimate a normal standard deviation."""


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of ``values`` (finite, at least one) lies, interpolated.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    part = at - low
    return ordered[low] * (1.0 - part) + ordered[high] * part


def median(values: Sequence[float]) -> float:
    """Middle of ``values`` (finite, at least one)."""
    return quantile(values, 0.5)


def mad(values: Sequence[float], center: float | None = None) -> float:
    """Median absolute deviation, scaled to a normal standard deviation; 0 for constant values.

    >>> round(mad([1.0, 2.0, 3.0, 4.0, 100.0]), 4)
    1.4826
    """
    middle = median(values) if center is None else center
    return GAUSSIAN * median([abs(value - middle) for value in values])
