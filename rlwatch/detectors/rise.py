"""Metrics that are near nothing in a healthy run: how far one has risen above its own beginning."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import CARRY_ROWS, BaseDetector, finite
from rlwatch.records import ClosedStep, Finding
from rlwatch.stats import Baseline, Hold, Window

MOST = 1e9
"""Odds and weights beyond this are all the same."""


def size(value: float) -> float:
    """As it is, without its sign."""
    return abs(value)


def odds(share: float) -> float:
    """Of a share in [0, 1], share : rest. A factor on odds means the same at 0.1 % and at 30 %."""
    return MOST if share >= 1.0 else min(abs(share) / (1.0 - share), MOST)


def spread_of_ess(ess: float) -> float:
    """1/ESS - 1: chi^2 of the weights an effective sample size (0..1] belongs to."""
    return MOST if ess <= 0.0 else min(max(1.0 / ess - 1.0, 0.0), MOST)


def log_size(ratio: float) -> float:
    """|log ratio|, the distance of a ratio from 1 on either side, nats."""
    return abs(math.log(min(max(abs(ratio), 1.0 / MOST), MOST)))


@dataclass(frozen=True, slots=True)
class Limit:
    """What a metric must exceed: ``floor`` in its own unit, and ``factor`` times how the run began, after ``scale``."""

    metric: str
    floor: float
    factor: float
    scale: Callable[[float], float] = size


class Rise:
    """One metric against its limit: the median of its last rows, beyond it for three rows."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._floor = limit.scale(limit.floor)
        self._base = Baseline()
        self._now = Window(rows=10, steps=10)
        self._raw = Window(rows=10, steps=10)
        self._row = Hold(forgive=3)
        self._out = Hold(forgive=2)
        self._blank = 0
        self.threshold = math.inf
        """On the scale: the higher of the floor and ``factor`` times the beginning; infinite before that is known."""

    def update(self, step: int, value: float | None, floor: float | None = None) -> None:
        """Take a row; None where it was not measured. ``floor`` replaces the limit's own."""
        if value is None:
            self._blank += 1
            if self._blank > CARRY_ROWS:
                self._out.clear()
            return
        self._blank = 0
        risen = self.limit.scale(value)
        self._base.update(step, risen)
        self._now.update(step, risen)
        self._raw.update(step, value)
        if floor is not None:
            self._floor = self.limit.scale(floor)
        level = self._base.get()
        self.threshold = math.inf if level is None else max(self._floor, self.limit.factor * level)
        self._row.update(step, risen > self.threshold)
        self._out.update(step, self.score >= 1.0)

    @property
    def score(self) -> float:
        """The level of the last rows over the threshold."""
        now = self._now.get()
        return 0.0 if now is None or math.isinf(self.threshold) else now / self.threshold

    @property
    def level(self) -> float | None:
        """Median of the last rows, in the metric's own unit."""
        return self._raw.get()

    @property
    def began(self) -> float | None:
        """Median of the first rows, on the scale."""
        return self._base.get()

    @property
    def factor(self) -> float | None:
        """How many times its beginning it is now, on the scale; None where it began at nothing."""
        now, level = self._now.get(), self._base.get()
        return None if now is None or not level else now / level

    def evidence(self) -> dict[str, float | int | None]:
        """The numbers a person needs: level, threshold and beginning (both on the scale), factor."""
        limit = self.threshold
        return {"level": self.level, "threshold": limit, "start": self.began, "factor": self.factor}

    @property
    def lasted(self) -> bool:
        """Whether it has been beyond the limit for three rows."""
        return self._out.lasted(3)

    @property
    def since(self) -> int | None:
        """Since when single rows, or else their median, have been beyond it."""
        return self._out.since if self._row.since is None else self._row.since


class RiseDetector(BaseDetector):
    """Reports, of several metrics that say one thing, the one furthest beyond its limit."""

    limits: ClassVar[tuple[Limit, ...]]

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self._rises = [Rise(limit) for limit in self.limits]

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge each metric; report the worst."""
        for rise in self._rises:
            rise.update(step.step, self.read(step, rise.limit.metric), self.floor(rise.limit))
        risen = [rise for rise in self._rises if rise.lasted]
        return [self.told(step, max(risen, key=lambda rise: rise.score))] if risen else []

    def read(self, step: ClosedStep, metric: str) -> float | None:
        """The value of a metric at this row; None if there is none to use."""
        return finite(step, metric)

    def floor(self, limit: Limit) -> float | None:  # noqa: ARG002  (for subclasses)
        """A floor that depends on the run; None: the limit's own."""
        return None

    @abstractmethod
    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """The finding in words and numbers."""
