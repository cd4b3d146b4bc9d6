"""What the last rows of each signal look like: level, extremes, slopes and spread, all against the baseline.

All but the spread is in the noise of the run's own rows: a small batch moves everything, and none of it means much.

Sums over the whole run so far (a CUSUM and its age) are left out: in runs whose faults begin at some step they are a
clock, and a clock forecasts nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlwatch.forecast.history import Floats, History

SHAPES = ("low", "high", "z", "slope25", "slope60", "turn", "restless", "fallen", "risen")
"""Kinds of features, of every signal."""
FAR = 30.0
"""Where a feature is cut off: nothing is learnt beyond."""
QUIET = 0.02
"""Least spread a signal is taken to have, in the scale of its changes."""


class Extremes:
    """The highest and the lowest level of every signal since its baseline was complete."""

    def __init__(self, signals: int) -> None:
        self._high: Floats = np.full(signals, math.nan)
        self._low: Floats = np.full(signals, math.nan)

    def update(self, now: Floats) -> tuple[Floats, Floats]:
        """Distances of the newest level from both: <= 0 from the highest, >= 0 from the lowest."""
        self._high, self._low = np.fmax(self._high, now), np.fmin(self._low, now)
        return now - self._high, now - self._low


@dataclass(frozen=True, slots=True)
class Shaped:
    """``values``: all :data:`SHAPES` of all signals, (shapes, signals); of each signal (signals,): ``now``, the change
    against the baseline, ``fallen``, that against the best level so far, and ``slope``, over 25 steps, per 10 steps.

    NaN where a signal has too few rows.
    """

    values: Floats
    now: Floats
    fallen: Floats
    slope: Floats


def shapes(history: History, extremes: Extremes, noise: Floats, restless: Floats) -> Shaped:
    """The newest row of a run in its history.

    ``noise``: spread of each signal's rows about their course (:func:`jitter`); ``restless``: spread of their
    differences in the baseline.
    """
    changes = history.changes()
    now = median(changes[_last(history.steps, 5, 2)])
    ten = changes[_last(history.steps, 10, 2)]
    moves = spread(np.diff(changes[_last(history.steps, 25, 6)], axis=0))
    slope = _slope(history.steps, changes, 25, 5)
    fallen, risen = extremes.update(now)
    parts = [
        np.fmin.reduce(ten) / noise,
        np.fmax.reduce(ten) / noise,
        now / noise,
        slope / noise,
        _slope(history.steps, changes, 60, 6) / noise,
        (now - median(changes[_before(history.steps, 15, 45)])) / noise,
        np.log((moves + QUIET / 4) / (restless + QUIET / 4)),
        fallen / noise,
        risen / noise,
    ]
    return Shaped(np.asarray(np.clip(np.stack(parts), -FAR, FAR)), now, fallen, slope)


def jitter(history: History) -> Floats:
    """Spread of each signal's rows of the last 60 steps about their course, (signals,).

    What scatters more than it did at the start, as rewards of a small batch do once it learns, has not moved by that.
    """
    return spread(np.diff(history.changes()[_last(history.steps, 60, 8)], axis=0)) / math.sqrt(2.0)


def median(rows: Floats) -> Floats:
    """Median of each column, missing values left out; NaN where there is none (rows, n) -> (n,)."""
    ordered = np.sort(rows, axis=0)  # NaN last
    count = np.isfinite(rows).sum(0)
    columns = np.arange(rows.shape[1])
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(rows) - 1)
    return np.where(count > 0, (ordered[low, columns] + ordered[high, columns]) / 2, math.nan)


def spread(rows: Floats) -> Floats:
    """Standard deviation of each column, missing values left out; NaN where there is none (rows, n) -> (n,)."""
    seen = np.isfinite(rows)
    count = seen.sum(0)
    filled = np.where(seen, rows, 0.0)
    mean = filled.sum(0) / np.maximum(count, 1)
    square = np.where(seen, (filled - mean) ** 2, 0.0).sum(0) / np.maximum(count, 1)
    return np.where(count > 0, np.sqrt(square), math.nan)


def _last(steps: Floats, span: int, least: int) -> slice:
    """Rows of the last ``span`` steps, and at least so many."""
    inside = int((steps > steps[-1] - span).sum())
    return slice(-max(inside, least), None)


def _before(steps: Floats, near: int, far: int) -> slice:
    """Rows from ``far`` to ``near`` steps ago, and at least one: what was usual shortly before."""
    first, after = (int((steps <= steps[-1] - ago).sum()) for ago in (far, near))
    return slice(max(min(first, after - 1), 0), max(after, 1))


def _slope(steps: Floats, changes: Floats, span: int, least: int) -> Floats:
    """Least-squares slope of each signal, per 10 steps; NaN with fewer than 3 values."""
    rows = _last(steps, span, least)
    y, x = changes[rows], steps[rows, None]
    seen = np.isfinite(y)
    count = np.maximum(seen.sum(0), 1)
    dx = np.where(seen, x - np.where(seen, x, 0.0).sum(0) / count, 0.0)
    filled = np.where(seen, y, 0.0)
    width = (dx**2).sum(0)
    slope = 10.0 * (dx * filled).sum(0) / np.where(width > 0.0, width, math.nan)
    return np.where(seen.sum(0) >= 3, slope, math.nan)
