"""The entropy budget: what is left of it, what reward it still buys, and when it will be spent."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.company import Company
from rlwatch.detectors.entropy_law import Arrival, Law, LawFit
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window

TELL, WARN = 0.8, 0.9
"""Shares of the starting entropy spent: told with the forecast; a warning where the law binds. Published runs spend
73 % in the first twelfth of training and 94 % in the first third (arXiv 2505.22617)."""
SOLVED = 0.95
"""Share of the best possible reward from which nothing is left to buy."""


class EntropyBudget(BaseDetector):
    """Fits R = -a exp(H) + b to the run's own entropy and reward once most of the entropy is spent.

    Low entropy on a solved task is convergence; low entropy below the top is a ceiling: the law says at which reward
    (b - a) the run will stall. ``entropy_collapse`` judges the fall itself.
    """

    name: ClassVar[str] = "entropy_budget"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("policy/entropy", "reward/mean"),)
    reads: ClassVar[tuple[str, ...]] = ("policy/entropy",)

    def __init__(self) -> None:
        super().__init__()
        self._company = Company()
        self._law = LawFit()
        self._base = Baseline()
        self._now = Window(rows=10, steps=10)
        self._best = Window(rows=10, steps=10)
        self._told = Hold(forgive=2)
        self._warned = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Follow the reward and the largest of each batch."""
        self._company.update(step)
        best = finite(step, "reward/max")
        if best is not None:
            self._best.update(step.step, best)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Fit, once enough is spent."""
        entropy = min(abs(finite(step, *self.reads) or 0.0), 1e9)
        self._base.update(step.step, entropy)
        self._now.update(step.step, entropy)
        fallen = self._company.reward.fallen()
        self._law.update(step.step, entropy, finite(step, "reward/mean"), learn=not fallen)
        now, level, first = self._now.get(), self._base.get(), self._base.first
        if now is None or level is None or first is None or max(level, first) <= 0.0:
            return []
        start = max(level, first)
        spent = 1.0 - now / start
        law = self._law.get() if spent >= TELL else None
        binds = law is not None and law.binds
        self._told.update(step.step, binds)
        self._warned.update(step.step, binds and spent >= WARN and not fallen and not self._solved())
        if law is None or not self._told.lasted(3):
            return []
        return [self._finding(step, law, now, start)]

    def _solved(self) -> bool:
        """Whether the reward is at its top: that of the batches, or 1 on the common scale."""
        now, best = self._company.reward.now, self._best.get()
        if now is None:
            return False
        if best is not None and best > 0.0 and now >= SOLVED * best:
            return True
        return SOLVED <= now <= 1.0

    def _finding(self, step: ClosedStep, law: Law, now: float, start: float) -> Finding:
        arrival = self._law.arrival(now, (1.0 - WARN) * start)
        reward = self._company.reward.now
        stands = "" if reward is None else f" (now {number(reward)})"
        return self.finding(
            step,
            "entropy_budget",
            Severity.WARNING if self._warned.lasted(5) else Severity.INFO,
            f"{1.0 - now / start:.0%} of the entropy is spent ({number(start)} to {number(now)} nats/token), and "
            f"reward was bought with it: R = -{number(law.a)} exp(H) + {number(law.b)} explains {law.explained:.0%} "
            f"of it; so it will stall at {number(law.ceiling)}{stands}{_when(arrival)}",
            onset=self._told.since,
            metric="policy/entropy",
            score=(1.0 - now / start) / TELL,
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
