"""Detect a spent entropy budget: what reward the remaining entropy still buys, and when it will be spent.

The law R = -a exp(H) + b of reward R and entropy H (Cui et al., arXiv 2505.22617) is fitted to the run's own history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import RunContext
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Thinned, Window, fit_line, slope_interval, theil_sen
from rlwatch.wording import number

POINTS = 12
"""Least number of points (at most 48, each a mean of rows) for a fit."""
COVERED = 0.25
"""Share of the highest entropy that the run must have moved through for a fit: over less, any curve looks like a
line.
"""
SURE = 4.0
"""Standard errors by which the coefficient a must exceed zero."""
GOOD = 0.5
"""Share of the variance of the reward that the fitted law must explain for a forecast."""
ODD = 4.0
"""Deviations beyond which a row is replaced by the median of the rows before: a spike, or a batch of hard data."""
REFIT = 5
"""Number of rows between two fits of the law: one row changes little, and a fit is most of the detector's cost."""
TOP = 50.0
"""Entropy in nats beyond which exp(H) cannot be that of tokens."""


@dataclass(frozen=True, slots=True)
class Law:
    """A fitted law R = -``a`` exp(H) + ``b`` of reward R and entropy H (nats/token), with a > 0.

    ``error``: standard error of ``a``. ``explained``: share of the reward's variance that it explains, in [0, 1].
    """

    a: float
    b: float
    error: float
    explained: float

    @property
    def ceiling(self) -> float:
        """Reward that the law predicts at entropy 0, where the run will stall."""
        return self.b - self.a

    def at(self, entropy: float) -> float:
        """Return the mean reward that the law predicts for an ``entropy`` in nats per token."""
        return self.b - self.a * math.exp(min(entropy, TOP))

    @property
    def binds(self) -> bool:
        """True if the fit shows that a gain of reward really comes with a loss of entropy."""
        return self.a > SURE * self.error and self.explained >= GOOD


@dataclass(frozen=True, slots=True)
class Arrival:
    """Forecast of the steps from now until entropy reaches a level, at its present rate of change.

    ``low``..``high``: a 90 % interval of that number of steps.
    """

    steps: float
    low: float
    high: float


class LawFit:
    """Fit of the run's reward to its entropy, in a few points, and the recent rate at which the entropy falls."""

    def __init__(self) -> None:
        self._points = Thinned(48)
        self._rows = 0
        self._fit: tuple[Law | None] | None = None
        self._rates: tuple[float, float, float] | None = None
        self._recent = (Window(rows=9, steps=10**9, least=5), Window(rows=9, steps=10**9, least=5))
        self._fall = Window(rows=30, steps=100, least=8)

    def update(self, step: int, entropy: float, reward: float | None, *, learn: bool = True) -> None:
        """Read entropy (nats per token) and mean ``reward`` (None if not measured) of the row at ``step``.

        ``learn``: False to follow only the entropy, because the reward has collapsed and no law holds.
        """
        self._rows += 1
        if self._rows % REFIT == 0:
            self._fit = self._rates = None
        if entropy > 0.0:
            self._fall.update(step, math.log(entropy))
        if learn and reward is not None:
            usual = [_usual(rows, step, value) for rows, value in zip(self._recent, (entropy, reward), strict=True)]
            self._points.update(step, math.exp(min(usual[0], TOP)), usual[1])

    def extend(self, steps: Sequence[int], entropies: Sequence[float], rewards: Sequence[float]) -> None:
        """Read rows at ascending ``steps`` at once, all to be learnt from; ``rewards`` is empty where not measured."""
        if self._rows // REFIT != (self._rows + len(steps)) // REFIT:
            self._fit = self._rates = None
        self._rows += len(steps)
        falling = [(step, math.log(entropy)) for step, entropy in zip(steps, entropies, strict=True) if entropy > 0.0]
        if falling:
            self._fall.extend(*zip(*falling, strict=True))
        if rewards:
            usual = [
                _usually(rows, steps, values) for rows, values in zip(self._recent, (entropies, rewards), strict=True)
            ]
            for step, entropy, reward in zip(steps, *usual, strict=True):
                self._points.update(step, math.exp(min(entropy, TOP)), reward)

    def get(self) -> Law | None:
        """Return the fitted law, at most ``REFIT`` rows old.

        None with too few points, if entropy hardly moved, or if reward did not rise as it fell.
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
        """Return in how many steps entropy falls from ``entropy`` to ``level`` (nats per token, both > 0).

        None if it is not certain that entropy falls.
        """
        if self._rates is None:
            self._rates = self._falling()
        rate, fastest, slowest = self._rates
        if slowest >= 0.0 or rate >= 0.0 or not 0.0 < level < entropy:
            return None
        left = math.log(entropy / level)
        return Arrival(left / -rate, left / -fastest, left / -slowest)

    def _falling(self) -> tuple[float, float, float]:
        """Return the change of log H a step, and the ends of its interval; 0 where no fall is known."""
        at, logs = self._fall.at, self._fall.values
        between = slope_interval(at, logs) if len(at) >= 8 else None
        return (0.0, 0.0, 0.0) if between is None else (theil_sen(at, logs), *between)


def _usual(rows: Window, step: int, value: float) -> float:
    """Return the value, or the median of the rows up to it where the value is far from that."""
    rows.update(step, value)
    level = rows.get()
    return value if level is None or abs(value - level) <= ODD * rows.spread else level


def _usually(rows: Window, steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return :func:`_usual` of each of several rows at ascending ``steps``."""
    levels, spreads = rows.medians_and_spreads(steps, values)
    rows.extend(steps, values)
    return [
        value if level is None or abs(value - level) <= ODD * spread else level
        for value, level, spread in zip(values, levels, spreads, strict=True)
    ]


REMARK, WARN = 0.8, 0.9
"""Shares of the starting entropy spent: from the first on ``info`` with the forecast; from the second on a warning if
the law holds. Published runs spend 73 % in the first twelfth of training and 94 % in the first third (arXiv
2505.22617).
"""
NEARLY = 1.0 - 1e-9
"""Factor on a limit: values below the product are below the limit whatever the rounding."""
PASSED = 0.05
"""Share of the predicted ceiling by which a reward above it has clearly passed it."""
SOLVED = 0.95
"""Share of the best reward of a batch from which nothing is left to buy."""


class EntropyBudget(BaseDetector):
    """Detector of a spent entropy budget: fits R = -a exp(H) + b to the run's entropy H and reward R.

    The fit is made once most of the entropy is spent. Low entropy on a solved task is convergence; low entropy below
    the top is a ceiling, and the law predicts the reward (b - a) at which the run will stall. ``entropy_collapse``
    judges the fall itself.
    """

    name: ClassVar[str] = "entropy_budget"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("policy/entropy", "reward/mean"),)
    reads: ClassVar[tuple[str, ...]] = ("policy/entropy",)
    shares: ClassVar[tuple[str, ...]] = ("_context",)

    def __init__(self) -> None:
        super().__init__()
        self._context = RunContext()
        self._law = LawFit()
        self._base = Baseline()
        self._now = Window(rows=10, steps=10)
        self._best = Window(rows=10, steps=10)
        self._remarked = Hold(forgive=2)
        self._warned = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Read the reward, and the largest reward of each batch, from every row."""
        self._context.update(step)
        best = finite(step, "reward/max")
        if best is not None:
            self._best.update(step.step, best)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if most of the entropy is left and the reward has not fallen."""
        entropies = [min(abs(entropy), 1e9) for entropy in rows.column("policy/entropy")]
        rewards, course, first = rows.column("reward/mean"), self._context.reward.ahead(rows), self._base.first
        level, last = self._base.get(), self._now.last
        if not self._base.done or level is None or first is None or last is None or rows.steps[0] <= last:
            return False
        start, least = max(level, first), min(*entropies, self._now.lowest)
        if start > 0.0 and 1.0 - least / start >= NEARLY * REMARK:
            return False
        if course is None or not course.cannot_fall():
            return False
        self._now.extend(rows.steps, entropies)
        self._law.extend(rows.steps, entropies, rewards)
        if self._now.get() is not None and start > 0.0:
            for hold in (self._remarked, self._warned):
                hold.miss(rows.steps)
        best = rows.column("reward/max")
        if best:
            self._best.extend(rows.steps, best)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Fit the law of reward over entropy once enough entropy is spent; return the forecast of the reward, if the
        fit holds.
        """
        entropy = min(abs(finite(step, *self.reads) or 0.0), 1e9)
        self._base.update(step.step, entropy)
        self._now.update(step.step, entropy)
        fallen = self._context.reward.fallen()
        self._law.update(step.step, entropy, finite(step, "reward/mean"), learn=not fallen)
        now, level, first = self._now.get(), self._base.get(), self._base.first
        if now is None or level is None or first is None or max(level, first) <= 0.0:
            return []
        start = max(level, first)
        spent = 1.0 - now / start
        law = self._law.get() if spent >= REMARK else None
        binds = law is not None and law.binds and not self._passed(law)
        self._remarked.update(step.step, binds)
        stalls = law is not None and not self._above(law) and not self._solved()
        self._warned.update(step.step, binds and spent >= WARN and not fallen and stalls)
        if law is None or self._passed(law) or not self._remarked.lasted(3):
            return []
        return [self._finding(step, law, now, start)]

    def _above(self, law: Law) -> bool:
        """Return whether the reward is above the ceiling already, by any amount."""
        now = self._context.reward.now
        return now is not None and now > law.ceiling

    def _passed(self, law: Law) -> bool:
        """Return whether the reward is clearly above the ceiling, which refutes the law."""
        now = self._context.reward.now
        return now is not None and now - law.ceiling > PASSED * abs(law.ceiling)

    def _solved(self) -> bool:
        """Return whether the reward is at its top: that of the batches, or near 1 on the common scale."""
        now, best = self._context.reward.now, self._best.get()
        if now is not None and best is not None and best > 0.0 and now >= SOLVED * best:
            return True
        return self._context.reward.near_full()

    def _finding(self, step: ClosedStep, law: Law, now: float, start: float) -> Finding:
        arrival = self._law.arrival(now, (1.0 - WARN) * start)
        reward = self._context.reward.now
        reached = "" if reward is None else f" (now {number(reward)})"
        return self.finding(
            step,
            "entropy_budget",
            Severity.WARNING if self._warned.lasted(5) else Severity.INFO,
            f"{1.0 - now / start:.0%} of the entropy is spent ({number(start)} to {number(now)} nats/token), and "
            f"reward was bought with it: R = -{number(law.a)} exp(H) + {number(law.b)} explains {law.explained:.0%} "
            f"of it; so it will stall at {number(law.ceiling)}{reached}{_when(arrival)}",
            onset=self._remarked.since,
            metric="policy/entropy",
            score=(1.0 - now / start) / REMARK,
            baseline=start,
            evidence=rounded(
                {
                    "spent": 1.0 - now / start,
                    "a": law.a,
                    "b": law.b,
                    "ceiling": law.ceiling,
                    "explained": law.explained,
                    "reward": reward,
                    "gain_left": law.ceiling - law.at(now),
                    "arrival_steps": None if arrival is None else arrival.steps,
                    "arrival_low": None if arrival is None else arrival.low,
                    "arrival_high": None if arrival is None else arrival.high,
                }
            ),
        )


def _when(arrival: Arrival | None) -> str:
    if arrival is None:
        return ""
    between = f"({number(arrival.low)} to {number(arrival.high)})"
    return f"; nine tenths will be spent in {number(arrival.steps)} steps {between}"
