"""A series that stands still: certainly so, noise included, which is more than not having been seen to rise."""

from __future__ import annotations

import math
from bisect import bisect_left
from statistics import fmean

from rlwatch.stats import Thinned, Window

FEWEST, FIRST = 12, 4
"""Points since a step that tell whether a series moved, and how many of them are the first."""
STILL = 0.1
"""Of the range of its rows that a series, noise included, cannot have gained where it stands still."""
ERRORS = 2.0
"""Standard errors that noise is given."""
ROOM = 0.75
"""Of what it can reach, below which a series that stands still has much left to gain."""


class SeriesHistory:
    """A reward or a part of one: its level, its range, and all of its history in a few dozen points."""

    def __init__(self) -> None:
        self._now = Window(rows=20, steps=20, least=5)
        self._points = Thinned(points=64)
        self.low, self.high = math.inf, -math.inf
        self._course: tuple[int, list[float], list[float]] = (-1, [], [])
        """The points, and the version of them that these are."""
        self._of: tuple[int, int, float, float] | None = None
        """Question that :meth:`gained` was asked last, and"""
        self._answer = (0.0, 0.0)
        """its answer: points are few, and rows many."""

    def update(self, step: int, value: float) -> None:
        """Take the next finite value."""
        self.low, self.high = min(self.low, value), max(self.high, value)
        self._now.update(step, value)
        self._points.update(step, float(step), value)

    @property
    def level(self) -> float:
        """Median of the last rows; 0 where there are too few."""
        return self._now.get() or 0.0

    @property
    def share(self) -> bool:
        """True of one that may be a share of the answers."""
        return self.low >= 0.0 and self.high <= 1.0

    @property
    def room(self) -> bool:
        """True if it is well below what it can reach: 1 of a share, else the best row there was, if above 0."""
        return self.level < ROOM * (1.0 if self.share else max(self.high, 0.0)) and self.high > 0.0

    def climbed(self, least: float) -> float | None:
        """Step at which it was last halfway between its lowest point and this level; None if they are less apart."""
        _, steps, values = self._known()
        if len(values) < FEWEST or self.level - min(values) < least:
            return None
        half = (self.level + min(values)) / 2.0
        return max((step for step, value in zip(steps, values, strict=True) if value < half), default=None)

    def _known(self) -> tuple[int, list[float], list[float]]:
        """Version, steps and values of the points, the oldest first."""
        if self._course[0] != self._points.version:
            self._course = (self._points.version, *self._points.get())
        return self._course

    def gained(self, since: float) -> tuple[float, float] | None:
        """Least and most that it can have gained from step ``since`` on, as shares of its range; None of too few."""
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
    """Difference of two means, give or take what noise allows."""
    noise = ERRORS * math.sqrt(_variance(first) / len(first) + _variance(last) / len(last))
    change = fmean(last) - fmean(first)
    return change - noise, change + noise


def _variance(values: list[float]) -> float:
    """Variance of at least two finite values, correctly rounded as :func:`statistics.variance` has it, and quicker.

    Floats are whole numbers over powers of two: over the largest of these their sums are exact.
    """
    parts = [value.as_integer_ratio() for value in values]
    over = max(below for _, below in parts)
    whole = [above * (over // below) for above, below in parts]
    count, total = len(whole), sum(whole)
    return (count * sum([each * each for each in whole]) - total * total) / (count * (count - 1) * over * over)
