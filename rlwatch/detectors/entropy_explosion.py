"""Entropy explosion: the policy drifts towards noise while the reward falls."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.company import Company
from rlwatch.metrics import Family
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window

RISE = 1.3
"""Entropy over baseline above which a rise is dated."""
WARN, CRITICAL = 1.5, 2.0
"""Ratios beside a fallen reward (an entropy bonus gone wrong was seen at 1.35-1.8 when the reward fell)."""
ALONE = 3.0
"""Ratio that warns by itself when the reward has not risen."""
NOISE = 0.7
"""Share of log V beyond which output is close to uniform noise."""


class EntropyExplosion(BaseDetector):
    """Token entropy above how the run began, with the reward falling or the ceiling log V in sight."""

    name: ClassVar[str] = "entropy_explosion"
    family: ClassVar[str] = Family.EXPLORATION.value
    kinds: ClassVar[tuple[str, ...]] = ("entropy_explosion",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("policy/entropy",),)
    reads: ClassVar[tuple[str, ...]] = ("policy/entropy",)

    def __init__(self) -> None:
        super().__init__()
        self._company = Company()
        self._base = Baseline(floor=0.02)
        self._now = Window(rows=8, steps=8)
        self._rise = Hold(forgive=3)
        self._warned = Hold(forgive=1)
        self._confirmed = Hold(forgive=1)

    def listen(self, step: ClosedStep) -> None:
        """Follow the corroborating metrics."""
        self._company.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the level of the last rows."""
        entropy = abs(finite(step, *self.reads) or 0.0)
        self._base.update(step.step, entropy)
        self._now.update(step.step, entropy)
        now, low = self._now.get(), self._low()
        if now is None or low is None or low <= 0.0:
            return []
        ratio = now / low
        self._rise.update(step.step, entropy > RISE * low)
        reward = self._company.reward
        fallen = reward.fallen()
        noise = self._company.log_vocab is not None and now > NOISE * self._company.log_vocab and ratio > RISE
        alone = ratio > ALONE and not reward.risen()
        self._warned.update(step.step, (fallen and ratio > WARN) or alone or noise)
        self._confirmed.update(step.step, fallen and (ratio > CRITICAL or noise))
        if not self._warned.lasted(3):
            return []
        severity = Severity.CRITICAL if self._confirmed.lasted(3, 2) else Severity.WARNING
        return [self._finding(step, now, low, severity)]

    def _low(self) -> float | None:
        level, first = self._base.get(), self._base.first
        return None if level is None or first is None else min(level, first)

    def _finding(self, step: ClosedStep, now: float, low: float, severity: Severity) -> Finding:
        onset = self._rise.since if self._rise.since is not None else self._warned.since
        reward = self._company.reward
        ceiling = (
            "" if self._company.log_vocab is None else f" (uniform noise would be {number(self._company.log_vocab)})"
        )
        message = f"entropy rose from {number(low)} to {number(now)} nats/token{ceiling}{reward.say()}"
        return self.finding(
            step,
            "entropy_explosion",
            severity,
            message,
            onset=onset,
            metric="policy/entropy",
            score=now / (WARN * low),
            baseline=low,
            evidence=rounded(
                {
                    "entropy": now,
                    "entropy_baseline": low,
                    "ratio": now / low,
                    "log_vocab": self._company.log_vocab,
                    "reward": reward.now,
                    "reward_best": reward.best,
                }
            ),
        )
