"""Tools that know the limits of the labels, and read what a forecaster may read: how far, and how long, to each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlwatch.forecast.evaluation.limits import Limit, limits
from rlwatch.stats.robust import median

MEDIAN_ROWS = 5
FIT_STEPS = 60
"""A straight line is fitted to so many steps, and to at least :data:`LEAST` rows."""
LEAST = 4
BROKEN = ("loss/policy", "loss/raw", "optim/grad_norm", "policy/entropy")
"""Metrics that are not finite where the run is broken."""


@dataclass
class Track:
    """One limit on one run: the level, its own baseline, the best so far, the last rows."""

    limit: Limit
    _start: list[float] = field(default_factory=list)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_ROWS))
    levels: deque[tuple[int, float]] = field(default_factory=deque)
    _best: float = -math.inf
    _base: float | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """What it reads: the stand-in of a hidden metric."""
        return (self.limit.stand_in,) if self.limit.stand_in else self.limit.metrics

    def add(self, step: int, metrics: Mapping[str, float]) -> tuple[float, float, float] | None:
        """(level, where it comes from, where the limit is); None where either is not known yet."""
        value = next((metrics[name] for name in self.metrics if name in metrics), None)
        if value is None or not math.isfinite(value):
            return None
        self._recent.append(value)
        level = median(self._recent)
        self.levels.append((step, level))
        while self.levels[0][0] <= step - FIT_STEPS:
            self.levels.popleft()
        return self._placed(step, value, level)

    def _placed(self, step: int, value: float, level: float) -> tuple[float, float, float] | None:
        windows = limits().windows
        if windows.baseline[0] <= step <= windows.baseline[1]:
            self._start.append(value)
        if step >= self.limit.best_from:
            self._best = max(self._best, level)
        if step < windows.monitored or not self._start:
            return None
        if self._base is None:
            self._base = median(self._start)
        base = self._base
        if self.limit.kind == "drop":
            return level, self._best, min(float(self.limit.times or 0.0) * self._best, self._best - self.limit.fall)
        bounds = [bound for bound in self._bounds(base) if bound is not None]
        at = max(bounds) if self.limit.side == "above" else min(bounds)
        return level, base, at

    def _bounds(self, base: float) -> tuple[float | None, ...]:
        limit = self.limit
        return (
            limit.level,
            None if limit.times is None else limit.times * base,
            None if limit.plus is None else base + limit.plus,
        )


class _Reach:
    """Both tools: every limit's track, and what is not finite at once."""

    def __init__(self) -> None:
        self._tracks = [Track(limit) for limit in limits().rows if limit.kind != "broken"]

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """The worst over the limits; infinite where a value is not finite."""
        if any(not math.isfinite(metrics[name]) for name in BROKEN if name in metrics):
            return math.inf
        found = [(track, track.add(step, metrics)) for track in self._tracks]
        return max((self._score(track, *at) for track, at in found if at is not None), default=None)

    def _score(self, track: Track, level: float, base: float, limit: float) -> float:
        raise NotImplementedError


class Static(_Reach):
    """How much of the way from its own baseline to the limit is gone: 0 at the baseline, 1 at the limit."""

    def _score(self, track: Track, level: float, base: float, limit: float) -> float:  # noqa: ARG002
        way = limit - base
        return (level - base) / way if way else 1.0


class Extrapolation(_Reach):
    """How soon a straight line through the last 60 steps meets the limit: 1 now, 1/2 in 50 steps, 0 never."""

    def _score(self, track: Track, level: float, base: float, limit: float) -> float:
        ahead = (limit - level) * (1.0 if limit >= base else -1.0)
        if ahead <= 0.0:
            return 1.0
        pace = slope(track.levels) * (1.0 if limit >= base else -1.0)
        return 1.0 / (1.0 + ahead / pace / 50.0) if pace > 0.0 else 0.0


def slope(points: deque[tuple[int, float]]) -> float:
    """Per step, by least squares; 0 of too few points."""
    count = len(points)
    if count < LEAST:
        return 0.0
    x = sum(step for step, _ in points) / count
    y = sum(level for _, level in points) / count
    spread = sum((step - x) ** 2 for step, _ in points)
    return sum((step - x) * (level - y) for step, level in points) / spread if spread else 0.0
