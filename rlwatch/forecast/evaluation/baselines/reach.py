"""Tools that know the limits of the labels, and read what a forecaster may read: how far, and how long, to each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlwatch.forecast.evaluation.limits import Limit, limits
from rlwatch.forecast.evaluation.run_table import Floats
from rlwatch.stats import median

MEDIAN_ROWS = 5
FIT_STEPS = 60
"""A straight line is fitted to so many steps, and to at least :data:`LEAST` rows."""
LEAST = 4
PACE = 50.0
"""Steps to a limit at which its score is 1/2."""
BROKEN = ("loss/policy", "loss/raw", "optim/grad_norm", "policy/entropy")
"""Metrics that are not finite where the run is broken."""
Place = tuple[float, float, float]
"""The level, where it comes from, where the limit is."""


@dataclass
class Track:
    """One limit on one run: the level (NaN where this row has none), the run's own baseline, the best so far."""

    limit: Limit
    level: float = math.nan
    _start: list[float] = field(default_factory=list)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_ROWS))
    _best: float = -math.inf
    _base: float | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """What it reads: the stand-in of a hidden metric."""
        return (self.limit.stand_in,) if self.limit.stand_in else self.limit.metrics

    def add(self, step: int, metrics: Mapping[str, float]) -> Place | None:
        """Where the run stands; None where the level or the limit is not known."""
        value = next((metrics[name] for name in self.metrics if name in metrics), math.nan)
        self.level = math.nan
        if not math.isfinite(value):
            return None
        self._recent.append(value)
        self.level = median(self._recent)
        windows = limits().windows
        if windows.baseline[0] <= step <= windows.baseline[1]:
            self._start.append(value)
        if step >= self.limit.best_from:
            self._best = max(self._best, self.level)
        return self._placed() if step >= windows.monitored and self._start else None

    def _placed(self) -> Place:
        if self._base is None:
            self._base = median(self._start)
        if self.limit.kind == "drop":
            share = float(self.limit.times or 0.0)
            return self.level, self._best, min(share * self._best, self._best - self.limit.fall)
        limit, base = self.limit, self._base
        times = None if limit.times is None else limit.times * base
        plus = None if limit.plus is None else base + limit.plus
        bounds = [bound for bound in (limit.level, times, plus) if bound is not None]
        return self.level, base, max(bounds) if limit.side == "above" else min(bounds)


class _Reach(ABC):
    """Both tools: every limit's track, and what is not finite at once."""

    def __init__(self) -> None:
        self._tracks = [Track(limit) for limit in limits().rows if limit.kind != "broken"]

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """The worst over the limits; infinite where a value is not finite."""
        places = [track.add(step, metrics) for track in self._tracks]
        scores = self._scores(step, places)
        if any(not math.isfinite(metrics[name]) for name in BROKEN if name in metrics):
            return math.inf
        return max(scores, default=None)

    @abstractmethod
    def _scores(self, step: int, places: Sequence[Place | None]) -> list[float]: ...


class Static(_Reach):
    """How much of the way from its own baseline to the limit is gone: 0 at the baseline, 1 at the limit."""

    def _scores(self, step: int, places: Sequence[Place | None]) -> list[float]:  # noqa: ARG002
        found = [place for place in places if place is not None]
        return [(level - base) / (limit - base) if limit != base else 1.0 for level, base, limit in found]


class Extrapolation(_Reach):
    """How soon a straight line through the last 60 steps meets the limit: 1 now, 1/2 in 50 steps, 0 never.

    Beyond the limit, the share of the way from the baseline that is gone: 1 and more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: deque[int] = deque()
        self._levels: deque[list[float]] = deque()

    def _scores(self, step: int, places: Sequence[Place | None]) -> list[float]:
        self._steps.append(step)
        self._levels.append([track.level for track in self._tracks])
        while self._steps[0] <= step - FIT_STEPS:
            self._steps.popleft()
            self._levels.popleft()
        if all(place is None for place in places):
            return []
        paces = slopes(np.array(self._steps, dtype=np.float64), np.array(self._levels)).tolist()
        return [_soon(*place, pace) for place, pace in zip(places, paces, strict=True) if place is not None]


def _soon(level: float, base: float, limit: float, pace: float) -> float:
    sign = 1.0 if limit >= base else -1.0
    ahead = sign * (limit - level)
    if ahead <= 0.0:
        return 1.0 - ahead / abs(limit - base) if limit != base else 1.0
    return 1.0 / (1.0 + ahead / (sign * pace) / PACE) if sign * pace > 0.0 else 0.0


def slopes(x: Floats, columns: Floats) -> Floats:
    """Per step, by least squares, of each column over its rows that are no NaN; 0 of too few."""
    there = ~np.isnan(columns)
    count = there.sum(axis=0)
    away = np.where(there, x[:, None], 0.0)
    away = np.where(there, x[:, None] - away.sum(axis=0) / np.maximum(count, 1), 0.0)
    spread = (away * away).sum(axis=0)
    lean = (away * np.where(there, columns, 0.0)).sum(axis=0)
    return np.where((count >= LEAST) & (spread > 0.0), lean / np.maximum(spread, 1e-9), 0.0)
