"""Tools that know no limit: control charts, and the statistics said to rise before a tipping point."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from rlwatch.forecast.evaluation.baselines.start import Start, watched
from rlwatch.forecast.evaluation.run_table import Floats

ALPHA = 0.05
"""Weight of a new row in the moving mean and variance."""
SLACK = 0.5
"""Of the CUSUM, in standard deviations: half the shift it is made for."""
WINDOW = 40
"""Rows of the moving variance and autocorrelation."""
STRONGEST = 5
"""Early-warning statistics average so many metrics: a tipping point shows in several."""


def _worst(row: Floats) -> float | None:
    return None if np.isnan(row).all() else float(np.nanmax(row))


class EwmaZ:
    """Largest |value - moving mean| over the moving standard deviation; the moving values come before the row."""

    def __init__(self) -> None:
        self._start = Start()
        self._moving: tuple[Floats, Floats] | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """In standard deviations."""
        row = watched(metrics)
        known = self._start.add(step, row)
        if known is None:
            return None
        center, spread = known
        mean, variance = self._moving or (center, spread**2)
        away = row - mean
        z = np.abs(away) / np.maximum(np.sqrt(variance), spread / 10.0)
        kept = np.where(np.isnan(away), 0.0, away)
        fresh = np.where(np.isnan(away), variance, (1 - ALPHA) * (variance + ALPHA * kept * kept))
        self._moving = (mean + ALPHA * kept, fresh)
        return _worst(z)


class Cusum:
    """Two-sided cumulative sums of standard deviations from the run's own baseline beyond the slack (Page 1954)."""

    def __init__(self) -> None:
        self._start = Start()
        self._up: Floats | float = 0.0
        self._down: Floats | float = 0.0

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """The largest sum."""
        row = watched(metrics)
        known = self._start.add(step, row)
        if known is None:
            return None
        z = (row - known[0]) / known[1]
        z = np.where(np.isnan(z), 0.0, z)
        self._up = np.maximum(0.0, self._up + z - SLACK)
        self._down = np.maximum(0.0, self._down - z - SLACK)
        return float(np.max(np.maximum(self._up, self._down)))


class EarlyWarning:
    """Rising variance and lag-1 autocorrelation of the detrended last rows, against the run's own start.

    Critical slowing down, as in Scheffer et al. 2009: log of the variance's ratio to the baseline's, plus twice the
    autocorrelation, averaged over the metrics where that is largest.
    """

    def __init__(self) -> None:
        self._start = Start()
        self._rows: deque[Floats] = deque(maxlen=WINDOW)

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """The mean of the strongest; None until the window is full."""
        row = watched(metrics)
        known = self._start.add(step, row)
        self._rows.append(row)
        if known is None or len(self._rows) < WINDOW:
            return None
        rows = np.array(self._rows)
        there = ~np.isnan(rows).any(axis=0)
        if not there.any():
            return None
        residual = _detrended(rows[:, there])
        variance = (residual * residual).mean(axis=0) + 1e-12
        echo = (residual[1:] * residual[:-1]).mean(axis=0) / variance
        told = np.log(variance / known[1][there] ** 2) + 2.0 * echo
        return float(np.sort(told)[-STRONGEST:].mean())


_TIME = np.arange(WINDOW) - (WINDOW - 1) / 2.0


def _detrended(rows: Floats) -> Floats:
    """Less the straight line through each column."""
    away = rows - rows.mean(axis=0)
    line = _TIME[:, None] * (_TIME @ away / (_TIME @ _TIME))
    left: Floats = away - line
    return left
