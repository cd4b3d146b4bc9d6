"""The entropy law R = -a exp(H) + b on a run's own history (Cui et al., arXiv 2505.22617)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlwatch.stats import Thinned, Window, fit_line, slope_interval, theil_sen

POINTS = 12
"""Points (of at most 48, each a mean of rows) before a line is trusted."""
COVERED = 0.25
"""Share of the starting entropy a run must have gone through: within less, any curve is a line."""
SURE = 4.0
"""Standard errors of a above zero."""
GOOD = 0.5
"""Share of the variance of the reward the law must explain."""
ODD = 4.0
"""Deviations from the rows before beyond which a row counts as their median: a spike, or a batch of hard data."""
REFIT = 5
"""Rows between fits: a row changes little, and a fit costs most of what the law costs."""
TOP = 50.0
"""Nats beyond which exp(H) is no entropy of tokens."""


@dataclass(frozen=True, slots=True)
class Law:
    """R = -``a`` exp(H) + ``b``; a > 0. ``explained`` in [0, 1]."""

    a: float
    b: float
    error: float
    explained: float

    @property
    def ceiling(self) -> float:
        """Reward at H = 0."""
        return self.b - self.a

    def at(self, entropy: float) -> float:
        """Reward at an entropy, nats per token."""
        return self.b - self.a * math.exp(min(entropy, TOP))

    @property
    def binds(self) -> bool:
        """Whether reward really is bought with entropy."""
        return self.a > SURE * self.error and self.explained >= GOOD


@dataclass(frozen=True, slots=True)
class Arrival:
    """Steps from now until entropy reaches a level, at its present rate; ``low``..``high`` is a 90 % interval."""

    steps: float
    low: float
    high: float


class LawFit:
    """The run's (H, R) in a few points, and the recent fall of log H."""

    def __init__(self) -> None:
        self._points = Thinned(48)
        self._rows = 0
        self._fit: tuple[Law | None] | None = None
        self._rates: tuple[float, float, float] | None = None
        self._recent = (Window(rows=9, steps=10**9, least=5), Window(rows=9, steps=10**9, least=5))
        self._fall = Window(rows=30, steps=100, least=8)

    def update(self, step: int, entropy: float, reward: float | None, *, learn: bool = True) -> None:
        """Take a row; with ``learn`` false (the reward has collapsed: no law holds) only the fall of entropy."""
        self._rows += 1
        if self._rows % REFIT == 0:
            self._fit = self._rates = None
        if entropy > 0.0:
            self._fall.update(step, math.log(entropy))
        if learn and reward is not None:
            usual = [_usual(rows, step, value) for rows, value in zip(self._recent, (entropy, reward), strict=True)]
            self._points.update(step, math.exp(min(usual[0], TOP)), usual[1])

    def get(self) -> Law | None:
        """The fit, at most ``REFIT`` rows old; None where there are too few points, entropy hardly moved, or reward did
        not rise as it fell.
        """
        if self._fit is None:
            self._fit = (self._fitted(),)
        return self._fit[0]

    def _fitted(self) -> Law | None:
        x, y = self._points.get()
        if len(x) < POINTS or min(x) <= 0.0:
            return None
        highest, lowest = math.log(max(x)), math.log(min(x))
        if highest <= 0.0 or highest - lowest < COVERED * highest:
            return None
        line = fit_line(x, y)
        if line is None or line.slope >= 0.0:
            return None
        return Law(-line.slope, line.intercept, line.error, line.explained)

    def arrival(self, entropy: float, level: float) -> Arrival | None:
        """When ``entropy`` will be down at ``level`` (nats, both > 0); None if it does not fall for sure."""
        if self._rates is None:
            self._rates = self._falling()
        rate, fastest, slowest = self._rates
        if slowest >= 0.0 or rate >= 0.0 or not 0.0 < level < entropy:
            return None
        left = math.log(entropy / level)
        return Arrival(left / -rate, left / -fastest, left / -slowest)

    def _falling(self) -> tuple[float, float, float]:
        """Change of log H a step, and the ends of its interval; 0 where it is not known to fall."""
        at, logs = self._fall.at, self._fall.values
        between = slope_interval(at, logs) if len(at) >= 8 else None
        return (0.0, 0.0, 0.0) if between is None else (theil_sen(at, logs), *between)


def _usual(rows: Window, step: int, value: float) -> float:
    """The value, or the median of the rows up to it where it is far from that."""
    rows.update(step, value)
    level = rows.get()
    return value if level is None or abs(value - level) <= ODD * rows.spread else level
