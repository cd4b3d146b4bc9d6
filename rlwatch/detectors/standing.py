"""Recognise a series that has stopped rising: with certainty, noise included, not merely without a visible rise."""

from __future__ import annotations

import math
from bisect import bisect_left
from statistics import fmean

from rlwatch.stats import Thinned, Window

FEWEST, FIRST = 12, 4
"""Fewest points since a step that can show that a series moved, and how many of them count as the first."""
STILL = 0.1
"""Share of the range of its rows that a flat series cannot have gained, noise included."""
ERRORS = 2.0
"""Standard errors that are allowed for noise."""
ROOM = 0.75
"""Share of the reachable maximum below which a flat series has much left to gain."""


class SeriesHistory:
    """Level, range and course of a reward, or of one of its parts, over a run, in a few dozen points."""

    def __init__(self) -> None:
        self._now = Window(rows=20, steps=20, least=5)
        self._points = Thinned(points=64)
        self.low, self.high = math.inf, -math.inf
        self._course: tuple[int, list[float], list[float]] = (-1, [], [])
        """Version of the points, their steps, and their values."""
        self._of: tuple[int, int, float, float] | None = None
        """Arguments of the last call of :meth:`gained`, and"""
        self._answer = (0.0, 0.0)
        """its result, cached: points are few, and rows many."""

    def update(self, step: int, value: float) -> None:
        """Read the series' next finite value, at a step."""
        self.low, self.high = min(self.low, value), max(self.high, value)
        self._now.update(step, value)
        self._points.update(step, float(step), value)

    @property
    def level(self) -> float:
        """Median of the metric's last rows; 0 if there are too few."""
        return self._now.get() or 0.0

    @property
    def share(self) -> bool:
        """True if all values of the metric lie in [0, 1], so that it may be a share of the answers."""
        return self.low >= 0.0 and self.high <= 1.0

    @property
    def room(self) -> bool:
        """True if the level is well below its maximum: 1 for a share, otherwise the best row, if above 0."""
        return self.level < ROOM * (1.0 if self.share else max(self.high, 0.0)) and self.high > 0.0

    def climbed(self, least: float) -> float | None:
        """Return the step at which the series was last halfway between its lowest point and its level.

        None if these are less than ``least`` apart, or if there are too few points.
        """
        _, steps, values = self._known()
        if len(values) < FEWEST or self.level - min(values) < least:
            return None
        half = (self.level + min(values)) / 2.0
        return max((step for step, value in zip(steps, values, strict=True) if value < half), default=None)

    def _known(self) -> tuple[int, list[float], list[float]]:
        """Return version, steps and values of the points, oldest first."""
        if self._course[0] != self._points.version:
            self._course = (self._points.version, *self._points.get())
        return self._course

    def gained(self, since: float) -> tuple[float, float] | None:
        """Return lower and upper bounds on the gain since step ``since``, as shares of the range; None with too few
        points.
        """
        version, steps, values = self._known()
        begins = bisect_left(steps, since)
        if len(values) - begins < FEWEST or self.high <= self.low:
            return None
        of = (version, begins, self.low, self.high)
        if of == self._of:
            return self._answer
        values = values[begins:]
        half, scale = len(values) // 2, self.high - min(self.low, 0.0)
        # The halves of a straight line are half of its rise apart in the mean; an early rise shows in the first points.
        slow, early = _change(values[:half], values[half:]), _change(values[:FIRST], values[half:])
        self._of, self._answer = of, (min(2.0 * slow[0], early[0]) / scale, max(2.0 * slow[1], early[1]) / scale)
        return self._answer


def _change(first: list[float], last: list[float]) -> tuple[float, float]:
    """Return the bounds of the difference of two means, noise included."""
    noise = ERRORS * math.sqrt(_variance(first) / len(first) + _variance(last) / len(last))
    change = fmean(last) - fmean(first)
    return change - noise, change + noise


def _variance(values: list[float]) -> float:
    """Return the variance of at least two finite values, correctly rounded like :func:`statistics.variance`, faster.

    Floats are integers over powers of two, so over the largest of these powers their sums are exact.
    """
    parts = [value.as_integer_ratio() for value in values]
    over = max(below for _, below in parts)
    whole = [above * (over // below) for above, below in parts]
    count, total = len(whole), sum(whole)
    return (count * sum([each * each for each in whole]) - total * total) / (count * (count - 1) * over * over)
