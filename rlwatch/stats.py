"""Streaming statistics of one series of numbers: plain floats in, bounded memory, no torch.

Every class with a state has ``update``, ``get`` and ``state_dict``. NaN, +Inf and -Inf are skipped, counted
(``skipped``), and never enter a statistic.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import Any, ClassVar, Self

import numpy as np

__all__ = [
    "GAUSSIAN",
    "Baseline",
    "Cusum",
    "Hold",
    "LinearFit",
    "Ranked",
    "Stateful",
    "Thinned",
    "Window",
    "fit_line",
    "mad",
    "median",
    "ordered_quantile",
    "quantile",
    "slope_interval",
    "theil_sen",
]


# Order statistics of a few finite numbers, which one outlier cannot move.

GAUSSIAN = 1.4826
"""1 / Phi^-1(3/4): makes the median absolute deviation estimate a normal standard deviation."""


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum of ``values``, rounded only once, so that every version of Python gives the same result.

    (``sum`` changed its rounding with Python 3.12.) A sum beyond the largest float is infinite.

    >>> exact_sum([0.1] * 10), exact_sum([1e308, 1e308])
    (1.0, inf)
    """
    kept = list(values)
    try:
        return math.fsum(kept)
    except OverflowError:
        return sum(kept)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which the fraction ``share`` (0..1) of ``values`` (finite, at least one) lies,
    interpolated.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    return ordered_quantile(sorted(values), share)


def ordered_quantile(ordered: Sequence[float], share: float) -> float:
    """Return the interpolated value below which the fraction ``share`` (0..1) of ``ordered`` (ascending, not empty)
    lies.
    """
    last = len(ordered) - 1
    at = share * last
    low = int(at)
    part = at - low
    return ordered[low] * (1.0 - part) + ordered[low + 1 if low < last else last] * part


def median(values: Sequence[float]) -> float:
    """Return the median of ``values`` (finite, at least one)."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] + 0.0 if len(ordered) % 2 else ordered[half - 1] * 0.5 + ordered[half] * 0.5


def mad(values: Sequence[float], center: float | None = None) -> float:
    """Return the median absolute deviation of ``values`` (finite, at least one), scaled to a normal standard deviation.

    It is 0 for constant values. ``center``: the median, if known already.

    >>> round(mad([1.0, 2.0, 3.0, 4.0, 100.0]), 4)
    1.4826
    """
    middle = median(values) if center is None else center
    return GAUSSIAN * median([abs(value - middle) for value in values])


# Trend of a short series that up to 29 % of outliers cannot turn.

NORMAL_95 = 1.6449
"""Number of standard deviations below which 95 % of a normal variable lie."""


def theil_sen(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the trend of a series: the median of the slopes between all pairs (Theil 1950, Sen 1968).

    The unit is that of ``values`` per step. 0 without two different ``steps``. Up to 29 % of outliers cannot turn the
    trend. The cost is quadratic: it is meant for windows of a few dozen rows.

    >>> theil_sen([0, 10, 20, 30, 40], [1.0, 2.0, 3.0, 99.0, 5.0])
    0.1
    """
    slopes = _slopes(steps, values)
    return float(ordered_quantile(slopes, 0.5)) if len(slopes) else 0.0


def slope_interval(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 90 % confidence interval of the trend of a series, from order statistics of the slopes (Sen 1968).

    The trend is that of :func:`theil_sen`, in units of ``values`` per step. None without two different ``steps``. The
    interval assumes independent noise; neighbouring rows of a run are correlated, so it is rather too narrow.

    >>> slope_interval(list(range(20)), [0.5 * i for i in range(20)])
    (0.5, 0.5)
    """
    slopes = _slopes(steps, values)
    if not len(slopes):
        return None
    n = len(steps)
    # Kendall's S, the slopes above less those below a trial slope, has the variance n (n - 1)(2 n + 5) / 18 under no
    # trend. So many slopes to each side of the median, as a share of all of them, bound the interval.
    half = NORMAL_95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18.0) / 2.0 / len(slopes)
    low, high = (ordered_quantile(slopes, share) for share in (max(0.5 - half, 0.0), min(0.5 + half, 1.0)))
    return float(low), float(high)


def _slopes(steps: Sequence[int], values: Sequence[float]) -> Any:
    """Return the slopes between all pairs of different steps as an array in ascending order."""
    at, height = np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
    first, second = _pairs(len(at))
    run = at.take(second) - at.take(first)
    with np.errstate(over="ignore", invalid="ignore"):
        slopes = height.take(second) - height.take(first)
        if np.count_nonzero(run) < len(run):
            apart = run != 0.0
            slopes, run = slopes[apart], run[apart]
        slopes /= run
    slopes.sort()
    return slopes


@lru_cache(maxsize=64)
def _pairs(rows: int) -> tuple[Any, Any]:
    """Return the indices of all pairs of ``rows`` rows, as two arrays."""
    return np.triu_indices(rows, 1)


# A straight line through noisy points, some of which are wrong.

HUBER = 1.345
"""Deviations beyond which a point counts less (95 % as efficient as least squares on normal noise)."""
ROUNDS = 8
"""Re-weightings: more change the third digit at most."""
LARGEST_SQUARED = 1e100
"""Numbers beyond it would overflow when squared."""


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A straight line y = ``slope`` x + ``intercept`` fitted to points.

    ``error``: standard error of the slope. ``explained``: share in [0, 1] of the (weighted) variance of y that the line
    explains.
    """

    slope: float
    intercept: float
    error: float
    explained: float

    def at(self, x: float) -> float:
        """Return the y of the line at ``x``."""
        return self.slope * x + self.intercept


def fit_line(x: Sequence[float], y: Sequence[float]) -> LinearFit | None:
    """Fit a straight line to points by least squares of ``y`` on ``x`` (finite, equally many), robust to outliers.

    Points are re-weighted after Huber so that outliers weigh little. None for fewer than three points, for points
    without spread in x, and for numbers too large to square. The standard error is that of Huber's estimator for
    independent noise (Huber 1973).

    >>> line = fit_line([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    >>> round(line.slope, 9), round(line.intercept, 9)
    (2.0, 1.0)
    """
    if len(x) < 3 or max(map(abs, (*x, *y))) > LARGEST_SQUARED:
        return None
    weights = [1.0] * len(x)
    line = _weighted(x, y, weights)
    for _ in range(ROUNDS):
        if line is None:
            return None
        rest = [b - line.at(a) for a, b in zip(x, y, strict=True)]
        # Huber's weight min(1, k s / |r|) makes the square of small residuals and the size of large ones count.
        scale = mad(rest, 0.0)
        if scale <= 0.0:
            break
        weights = [min(1.0, HUBER * scale / abs(r)) if r else 1.0 for r in rest]
        line = _weighted(x, y, weights)
    return line


def _weighted(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> LinearFit | None:
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
    line = LinearFit(slope, mean_y - slope * mean_x, _error(x, rest, weights), min(max(explained, 0.0), 1.0))
    return line if math.isfinite(line.slope) and math.isfinite(line.intercept) else None


def _error(x: Sequence[float], rest: Sequence[float], weights: Sequence[float]) -> float:
    """Return the standard error of the slope: the variance of the clipped residuals over the unclipped points."""
    # Huber (1973): var = (n / m)^2 sum (w r)^2 / (n - 2) / sxx, where w r is the clipped residual and m counts those
    # that are not clipped, the derivative of the estimating function.
    n, whole = len(x), sum(w >= 1.0 for w in weights)
    middle = math.fsum(x) / n
    spread = math.fsum((a - middle) ** 2 for a in x)
    if whole == 0 or spread <= 0.0:
        return math.inf
    return math.sqrt(math.fsum((w * r) ** 2 for r, w in zip(rest, weights, strict=True)) / (n - 2) / spread) * n / whole


# State: saved and restored in the same way for every stateful statistic.


class Stateful:
    """Base of the streaming statistics: saves and restores the attributes that a class names in ``MEMORY``.

    All other attributes of an instance are settings.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists and numbers, for JSON."""
        return {name: _plain(getattr(self, name)) for name in self.MEMORY}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        for name in self.MEMORY:
            current = getattr(self, name)
            value = state[name]
            setattr(self, name, deque(map(_item, value), current.maxlen) if isinstance(current, deque) else value)


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return [list(item) if isinstance(item, tuple) else item for item in value]
    return value


def _item(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# The last stretch of a series, sized in rows and in steps at once.
#
# Trainers log every step, every fifth or every tenth. A window of ``steps`` steps keeps that meaning at any cadence,
# ``rows`` bounds the memory and ``least`` keeps enough rows for a median when rows are far apart.


class Window(Stateful):
    """The newest rows of a series: those of the last ``steps`` steps, sized in rows and in steps at once.

    A step at or below the last one (a resume from a checkpoint) removes that step and all later ones.

    Parameters
    ----------
    rows
        Largest number of rows.
    steps
        Number of steps that the window covers at any cadence of logging.
    least
        Smallest number of rows, also older than ``steps``, that are kept where rows are far apart.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "_steps", "_values")

    def __init__(self, *, rows: int, steps: int, least: int = 3) -> None:
        self.least = least
        self.steps = steps
        self.skipped = 0
        self._steps: deque[int] = deque(maxlen=rows)
        self._values: deque[float] = deque(maxlen=rows)
        self._median: float | None = None
        """Cached median of the rows; None where it was not computed since the last one."""

    def update(self, step: int, value: float) -> None:
        """Add the ``value`` of a row; non-finite values are skipped and counted."""
        if not isfinite(value):
            self.skipped += 1
            return
        steps, values = self._steps, self._values
        self._median = None
        while steps and steps[-1] >= step:
            steps.pop()
            values.pop()
        steps.append(step)
        values.append(value)
        before = step - self.steps
        while steps[0] <= before and len(steps) > self.least:
            steps.popleft()
            values.popleft()

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add several finite rows with ascending steps; the result equals one call of :meth:`update` for each row."""
        self.update(steps[0], values[0])
        self._steps.extend(steps[1:])
        self._values.extend(values[1:])
        before = steps[-1] - self.steps
        while self._steps[0] <= before and len(self._steps) > self.least:
            self._steps.popleft()
            self._values.popleft()
        self._median = None

    def oldest_after(self, steps: Sequence[int]) -> list[int]:
        """Return the step of the oldest row after each of several rows at ascending ``steps``, which are not added."""
        at, kept, begins, found = [*self._steps, *steps], self._steps.maxlen or 0, 0, []
        first = len(self._steps) + 1
        for size, step in enumerate(steps, first):
            begins = max(begins, size - kept)
            while at[begins] <= step - self.steps and size - begins > self.least:
                begins += 1
            found.append(at[begins])
        return found

    def medians(self, steps: Sequence[int], values: Sequence[float]) -> list[float | None]:
        """Return what :meth:`get` would return after each of several finite rows with ascending steps, which are not
        added.

        Raises ``ValueError`` if the first step is at or below the window's last one.
        """
        block = self._even(steps, values)
        if block is not None:
            found: list[float | None] = middles(running(block, len(self._values))).tolist()
            return found
        other = self._same()
        found = []
        for row in zip(steps, values, strict=True):
            other.update(*row)
            found.append(other.get())
        return found

    def steady(self, steps: Sequence[int]) -> bool:
        """Return True if the window has as many rows after each of several rows at ascending ``steps`` as now, and its
        newest row does not represent it alone.
        """
        at, rows = self._steps, len(self._values)
        if not rows or len(steps) < 2:
            return False
        gap, first = steps[1] - steps[0], at[0]
        kept = min(at.maxlen or 0, max(self.least, -(-self.steps // gap)))
        if rows != kept or (rows == self.least and gap >= self.steps):
            return False
        return [*at, *steps] == list(range(first, first + gap * (rows + len(steps)), gap))

    def _same(self) -> Window:
        other = Window(rows=self._steps.maxlen or 0, steps=self.steps, least=self.least)
        other._steps.extend(self._steps)
        other._values.extend(self._values)
        return other

    def _even(self, steps: Sequence[int], values: Sequence[float]) -> Any:
        """Return the values of the rows but the oldest, and of the next rows, as an array; None unless the window
        always has as many rows as now, and a median that depends on nothing but their order.
        """
        if self._steps and steps[0] <= self._steps[-1]:
            raise ValueError(f"step {steps[0]} is at or below the last one, {self._steps[-1]}")
        if not self.steady(steps):
            return None
        x = np.array([*islice(self._values, 1, None), *values])
        # Sorting may misplace zeros with a sign.
        return None if np.signbit(x[x == 0.0]).any() else x

    def medians_and_spreads(
        self, steps: Sequence[int], values: Sequence[float]
    ) -> tuple[list[float | None], list[float]]:
        """Return what :meth:`get` and :attr:`spread` would be after each of several finite rows with ascending steps,
        which are not added.
        """
        block = self._even(steps, values)
        if block is not None:
            ordered = running(block, len(self._values))
            levels = middles(ordered)
            apart = np.abs(ordered - levels[:, None])
            apart.sort(axis=1)
            return levels.tolist(), (GAUSSIAN * middles(apart)).tolist()
        other = self._same()
        found = []
        for row in zip(steps, values, strict=True):
            other.update(*row)
            found.append((other.get(), other.spread))
        return [level for level, _ in found], [spread for _, spread in found]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self._median = None

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> list[float]:
        """Finite values in the window, oldest first."""
        return list(self._values)

    @property
    def at(self) -> list[int]:
        """Steps of the rows in the window, oldest first."""
        return list(self._steps)

    def get(self) -> float | None:
        """Return the median of the window; None before it has ``least`` rows.

        Where the distance of two rows exceeds the steps of the window, it is the newest value.
        """
        if self._median is None:
            values, least = self._values, self.least
            rows = len(values)
            if rows >= least:
                self._median = values[-1] if rows == least and self.alone else median(values)
        return self._median

    @property
    def alone(self) -> bool:
        """Return whether the distance between the two newest rows covers the whole window, so that the newest row
        represents it.
        """
        at = self._steps
        return len(at) == self.least and len(at) > 1 and at[-1] - at[-2] >= self.steps

    def copy(self) -> Self:
        """Return an independent copy of the window with the same rows."""
        return deepcopy(self)

    @property
    def oldest(self) -> int | None:
        """Step of the oldest row in the window; None when the window is empty."""
        return self._steps[0] if self._steps else None

    @property
    def most(self) -> float:
        """Highest value in the window; -inf when the window is empty."""
        return max(self._values, default=-math.inf)

    @property
    def lowest(self) -> float:
        """Lowest value in the window; inf when the window is empty."""
        return min(self._values, default=math.inf)

    @property
    def last(self) -> int | None:
        """Step of the newest row in the window; None when the window is empty."""
        return self._steps[-1] if self._steps else None

    def reaches(self, limit: float) -> bool:
        """Return whether the median of the window is at least ``limit``; False before it has ``least`` rows.

        Cheap where no value reaches the limit.
        """
        values = self._values
        if len(values) < self.least or (values[-1] < limit and max(values) < limit):
            return False
        return (self.get() or 0.0) >= limit

    @property
    def mean(self) -> float | None:
        """Arithmetic mean of the window, for values that are shares in [0, 1]; None before it has ``least`` rows."""
        return exact_sum(self._values) / len(self._values) if len(self._values) >= self.least else None

    @property
    def spread(self) -> float:
        """Median absolute deviation of the window, scaled to a normal standard deviation; 0 when the
        window is empty.
        """
        known = None if len(self._values) == self.least and self.alone else self._median
        return mad(self._values, known) if self._values else 0.0


def running(values: Any, rows: int) -> Any:
    """Return the stretches of ``rows`` consecutive ``values``, one per line of an array, each in ascending order."""
    x = np.asarray(values, dtype=np.float64)
    stretches = x.take(_lines(len(x), rows))
    stretches.sort(axis=1)
    return stretches


@lru_cache(maxsize=64)
def _lines(count: int, rows: int) -> Any:
    """Return the indices of each stretch of ``rows`` among ``count`` values."""
    return np.arange(count - rows + 1)[:, None] + np.arange(rows)


def middles(ordered: Any) -> Any:
    """Return the median of each line of an array of ascending values, as :func:`median` computes it."""
    half, odd = divmod(ordered.shape[1], 2)
    return ordered[:, half] + 0.0 if odd else ordered[:, half - 1] * 0.5 + ordered[:, half] * 0.5


class Ranked(Window):
    """A window that also keeps its values sorted, for long windows in which each update needs a quantile.

    Parameters are those of :class:`Window`.
    """

    def __init__(self, *, rows: int, steps: int, least: int = 3) -> None:
        super().__init__(rows=rows, steps=steps, least=least)
        self._ordered: list[float] | None = []

    def update(self, step: int, value: float) -> None:
        """Add the ``value`` of a row; non-finite values are skipped and counted."""
        ordered, steps, values = self._ordered, self._steps, self._values
        if ordered is None or not isfinite(value) or (steps and steps[-1] >= step):
            super().update(step, value)
            self._ordered = None
            return
        self._median = None
        if len(values) == values.maxlen:
            del ordered[bisect_left(ordered, values[0])]
        steps.append(step)
        values.append(value)
        insort(ordered, value)
        before = step - self.steps
        while steps[0] <= before and len(steps) > self.least:
            del ordered[bisect_left(ordered, values[0])]
            steps.popleft()
            values.popleft()

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add several finite rows with ascending steps; the result equals one call of :meth:`update` for each row."""
        super().extend(steps, values)
        self._ordered = None

    def quantile(self, share: float) -> float:
        """Return the value below which the fraction ``share`` (0..1) of the rows lies, interpolated; needs at least one
        row.
        """
        if self._ordered is None:
            self._ordered = sorted(self._values)
        return ordered_quantile(self._ordered, share)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self._ordered = None


# A run's own baseline: its beginning, which later values do not change.

FIRST_ROWS = 3
"""Rows that define how a run began: the smallest number whose median ignores one bad row."""
TRUSTED_ROWS = 8
"""Number of rows from which on the spread is known well enough to exclude a value."""
QUARANTINE = 2.0
"""Number of widths between the first and the ninth decile beyond which a value is excluded (about 6
sigma if normal).
"""


class Baseline(Stateful):
    """Robust level and spread of the first rows of a run, which later rows do not change.

    It is ready after :data:`FIRST_ROWS` rows. It is complete with ``rows`` rows, or at least 5 rows over ``steps``
    steps (coarse logs). Values far outside the deciles so far are excluded, so that a spike does not become part of the
    baseline. A series of two levels (batches with and without gradient) counts as no spike.

    Parameters
    ----------
    rows
        Number of rows that complete the baseline.
    steps
        Number of steps that complete it in a coarse log.
    floor
        Smallest spread that is assumed, in the unit of the values.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "quarantined", "_values", "_start", "_done")

    def __init__(self, *, rows: int = 20, steps: int = 50, floor: float = 0.0) -> None:
        self.steps = steps
        self.floor = floor
        self.skipped = 0
        self.quarantined = 0
        self._values: deque[float] = deque(maxlen=rows)
        self._start: int | None = None
        self._done = False
        self._forget()

    def _forget(self) -> None:
        """Drop the cached results, because the rows have changed. Once the baseline is complete, each
        is computed once.
        """
        self._quantiles: dict[float, float] = {}
        self._first: float | None = None
        self._spread: float | None = None

    def update(self, step: int, value: float) -> None:
        """Take the next row of the run: its step and value; non-finite values are skipped and counted."""
        if not isfinite(value):
            self.skipped += 1
            return
        if self._done:
            return
        self._start = step if self._start is None else self._start
        if self._far(value):
            self.quarantined += 1
        else:
            self._values.append(value)
            self._forget()
        count, span = len(self._values), step - self._start
        self._done = count == self._values.maxlen or (count >= 5 and span >= self.steps)

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take several finite rows, as one call of :meth:`update` for each would."""
        for row in zip(steps, values, strict=True):
            if self._done:
                return
            self.update(*row)

    def _far(self, value: float) -> bool:
        if len(self._values) < TRUSTED_ROWS:
            return False
        # Between the deciles of a normal variable lie 2.56 sigma: two such widths beyond them begin 6.4 sigma from the
        # median. Deciles, not the median absolute deviation: a series of two levels has a MAD of 0.
        low, high = self._quantile(0.1), self._quantile(0.9)
        reach = QUARANTINE * max(high - low, self.floor)
        # Without any spread, no distance can be called far.
        return reach > 0.0 and not low - reach <= value <= high + reach

    def _quantile(self, share: float) -> float:
        known = self._quantiles.get(share)
        if known is None:
            known = self._quantiles[share] = quantile(self._values, share)
        return known

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self._forget()

    @property
    def known(self) -> bool:
        """Return whether the baseline has taken any finite value."""
        return self._start is not None

    @property
    def ready(self) -> bool:
        """Return whether the baseline has enough rows for a level."""
        return len(self._values) >= FIRST_ROWS

    @property
    def done(self) -> bool:
        """Return whether the baseline is complete: later rows do not change it."""
        return self._done

    def get(self) -> float | None:
        """Return the median of the baseline's rows; None before it has :data:`FIRST_ROWS` rows."""
        known = self._quantiles.get(0.5)
        return known if known is not None else self._quantile(0.5) if self.ready else None

    @property
    def first(self) -> float | None:
        """Median of the first :data:`FIRST_ROWS` rows; None before. A run that breaks during warm-up is compared with
        this.
        """
        if self._first is None and self.ready:
            self._first = median([self._values[i] for i in range(FIRST_ROWS)])
        return self._first

    @property
    def spread(self) -> float:
        """Median absolute deviation of the baseline's rows, scaled to a normal standard deviation; at
        least ``floor``.
        """
        if self._spread is None:
            self._spread = max(mad(self._values), self.floor) if self._values else self.floor
        return self._spread

    def upper(self, share: float = 0.75) -> float | None:
        """Return the quantile ``share`` of the baseline's rows, for series that are often near zero; None before it is
        ready.
        """
        return self._quantile(share) if self.ready else None


# Cumulative sum: small persistent shifts, and when they began.


class Cusum(Stateful):
    """One-sided cumulative sum that detects a small persistent rise of a standardised series (Page 1954).

    S = max(0, S + z - drift). ``since`` is the first step of the current excursion above 0: the usual estimate of the
    change point.

    Parameters
    ----------
    drift
        Half of the smallest relevant shift, in standard deviations.
    cap
        Largest contribution of a single row, so that one spike is not a shift.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "sum", "since")

    def __init__(self, drift: float = 0.5, cap: float = 3.0) -> None:
        self.drift = drift
        self.cap = cap
        self.skipped = 0
        self.sum = 0.0
        self.since: int | None = None

    def update(self, step: int, z: float) -> None:
        """Take the next standardised value ``z`` (standard deviations from the level); non-finite ones are skipped and
        counted.
        """
        if not math.isfinite(z):
            self.skipped += 1
            return
        # Page's sum: under no shift z - drift is below 0 on average and the sum stays near 0; a shift of 2 drift makes
        # it grow by drift a row. The ceiling lets an ended shift be forgotten in bounded time.
        self.sum = min(max(0.0, self.sum + min(z, self.cap) - self.drift), 20.0 * self.cap)
        if self.sum == 0.0:
            self.since = None
        elif self.since is None:
            self.since = step

    def get(self) -> float:
        """Return the current cumulative sum, >= 0, in standard deviations."""
        return self.sum


# Duration of a condition in steps: a row of a coarse log covers the steps since the row before it.


class Hold(Stateful):
    """Counter of the steps for which a condition has held; more than ``forgive`` consecutive rows without it end it.

    A row covers the steps since the row before it; with a row for every step, one step. After a pause it covers as many
    as rows did before. A step at or below the last one (a resume) starts anew. ``since``: step at which the condition
    began to hold, or None.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("since", "rows", "_covered", "_lead", "_gap", "_misses", "_last")

    def __init__(self, forgive: int = 0) -> None:
        self.forgive = forgive
        self.since: int | None = None
        self.rows = 0
        self._covered = 0
        self._lead = 0
        self._gap = 1
        self._misses = 0
        self._last: int | None = None

    def update(self, step: int, condition: bool) -> None:
        """Take the next row: its step, and True in ``condition`` if the condition holds at it."""
        last, usual = self._last, self._gap
        if last is not None and step <= last:
            self.clear()
            last, usual = None, 1
        self._gap = gap = 1 if last is None else step - last
        self._last = step
        if not condition:
            self._misses += 1
            if self.since is not None and self._misses > self.forgive:
                self._forget()
            return
        covered = gap if gap < usual else usual
        if self.since is None:
            self.since, self._lead = step, covered - 1
        self.rows += 1
        self._covered += covered
        self._misses = 0

    def miss(self, steps: Sequence[int]) -> None:
        """Take rows with ascending steps at which the condition does not hold, as one call of :meth:`update` for each
        would.
        """
        self.update(steps[0], condition=False)
        if len(steps) > 1:
            self._misses += len(steps) - 1
            self._gap, self._last = steps[-1] - steps[-2], steps[-1]
            if self.since is not None and self._misses > self.forgive:
                self._forget()

    def get(self) -> int:
        """Return the number of steps since the condition began to hold; 0 if it does not hold."""
        return 0 if self.since is None or self._last is None else self._last - self.since

    def lasted(self, rows: int, steps: int = 0) -> bool:
        """Return whether the condition has held for ``rows`` rows of a log of every step, and over at least ``steps``
        steps.

        In a coarser log the rows must cover as many steps; at least half as many rows are needed and at least two,
        because a single one may be odd. Two are enough where each covers ``rows`` steps.
        """
        if self._covered < rows:
            return False
        fewest = min(rows, 2) if self._gap >= rows else max(min(rows, 2), (rows + 1) // 2)
        return self.rows >= fewest and self.get() + self._lead >= steps

    def clear(self) -> None:
        """Reset the counter: the condition does not hold."""
        if self._last is not None:
            self._forget()
            self._misses, self._last, self._gap = 0, None, 1

    def _forget(self) -> None:
        self.since, self.rows, self._covered, self._lead = None, 0, 0, 0


# A whole run in a few points: pairs of numbers, averaged over ever longer stretches.


class Thinned(Stateful):
    """Pairs (x, y) of a run of any length, summarised in at most ``points`` points.

    Each point is the mean of ``block`` rows. When there are too many points, neighbours are merged and blocks double in
    length. A step at or below the last one (a resume) drops the rows at or after it.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "block", "_rows", "_open")

    def __init__(self, points: int = 48) -> None:
        self.skipped = 0
        self.version = 0
        """Changes with the points."""
        self.block = 1
        self._rows: deque[tuple[float, ...]] = deque(maxlen=points)
        self._open: deque[tuple[float, ...]] = deque(maxlen=1)

    def update(self, step: int, x: float, y: float) -> None:
        """Add a row with the pair (``x``, ``y``); it is skipped and counted where one of them is not finite."""
        if not (math.isfinite(x) and math.isfinite(y)):
            self.skipped += 1
            return
        for rows in (self._open, self._rows):
            while rows and rows[-1][1] >= step:
                rows.pop()
                self.version += 1
        row = (step, step, x, y, 1)
        merged = _merged(self._open.pop(), row) if self._open else row
        if merged[4] < self.block:
            self._open.append(merged)
            return
        if len(self._rows) == self._rows.maxlen:
            self._halve()
        self._rows.append(merged)
        self.version += 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self.version += 1

    def _halve(self) -> None:
        rows = list(self._rows)
        self._rows.clear()
        self._rows.extend(_merged(*rows[i : i + 2]) if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2))
        self.block *= 2

    def __len__(self) -> int:
        return len(self._rows)

    def get(self) -> tuple[list[float], list[float]]:
        """Return the x and the y of all points, oldest first; up to the last ``block`` - 1 rows may be missing."""
        return [row[2] for row in self._rows], [row[3] for row in self._rows]


def _merged(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    """Merge two points (first step, last step, x, y, rows), weighted by their rows."""
    rows = left[4] + right[4]
    share = right[4] / rows
    rest = 1.0 - share
    return left[0], right[1], left[2] * rest + right[2] * share, left[3] * rest + right[3] * share, rows
