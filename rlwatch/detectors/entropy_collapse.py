"""Entropy collapse: the policy stops exploring and the reward does not pay for it."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.company import DETERMINISTIC, Company
from rlwatch.metrics import Family
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window

LOW = 0.5
"""Entropy over baseline below which a decline is dated (``onset_step``), where the reward does not pay for it."""
WARN, WARN_BAD = 0.15, 0.4
"""Ratio that warns by itself, and beside a fallen reward or silent groups."""
CRITICAL, CRITICAL_BAD = 0.02, 0.2
"""The same for critical. Healthy runs fall to 0.15-0.3 of their start while the reward rises."""
PAID = 0.05
"""Ratio that warns even while the reward rises: there is nothing left to spend."""


class EntropyCollapse(BaseDetector):
    """Token entropy against how the run began, corroborated by reward, zero-variance share, gradient.

    Entropy spent on reward is the normal course of RLVR (R = -a exp(H) + b, arXiv 2505.22617), so a low
    level alone is no finding while the reward is above its start.
    """

    name: ClassVar[str] = "entropy_collapse"
    family: ClassVar[str] = Family.EXPLORATION.value
    kinds: ClassVar[tuple[str, ...]] = ("entropy_collapse",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("policy/entropy",),)
    reads: ClassVar[tuple[str, ...]] = ("policy/entropy",)

    def __init__(self) -> None:
        super().__init__()
        self._company = Company()
        self._base = Baseline()
        self._now = Window(rows=10, steps=10)
        self._decline = Hold(forgive=3)
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
        now, high = self._now.get(), self._high()
        if now is None or high is None or high <= 0.0:
            return []
        ratio = now / high
        self._decline.update(step.step, entropy < LOW * high and not self._pays(step))
        bad = self._in_bad_company()
        paid = self._company.reward.risen() and not bad
        self._warned.update(step.step, ratio < (PAID if paid else WARN_BAD if bad else WARN))
        self._confirmed.update(step.step, not paid and self._critical(now, ratio, bad))
        if not self._warned.lasted(3):
            return []
        severity = Severity.CRITICAL if self._confirmed.lasted(3, 2) else Severity.WARNING
        return [self._finding(step, now, high, severity)]

    def _high(self) -> float | None:
        level, first = self._base.get(), self._base.first
        return None if level is None or first is None else max(level, first)

    def _in_bad_company(self) -> bool:
        company = self._company
        return company.reward.fallen() or (company.mute() and not company.reward.risen())

    def _pays(self, step: ClosedStep) -> bool:
        """Whether this very row still earns more than the start: entropy spent so far was not lost."""
        reward, value = self._company.reward, finite(step, "reward/mean")
        return reward.risen() and not (value is not None and reward.low(value))

    def _critical(self, now: float, ratio: float, bad: bool) -> bool:
        if ratio < (CRITICAL_BAD if bad else CRITICAL):
            return True
        return bad and self._company.log_vocab is not None and now < DETERMINISTIC * self._company.log_vocab

    def _finding(self, step: ClosedStep, now: float, high: float, severity: Severity) -> Finding:
        onset = self._decline.since if self._decline.since is not None else self._warned.since
        span = step.step - (step.step if onset is None else onset)
        reward = self._company.reward
        message = f"entropy fell from {number(high)} to {number(now)} nats/token over {span} steps{reward.say()}"
        if self._company.mute():
            message += "; nearly all groups agree on one reward, so no gradient leads back"
        evidence = rounded(
            {
                "entropy": now,
                "entropy_baseline": high,
                "ratio": now / high,
                "reward": reward.now,
                "reward_best": reward.best,
                "silent_share": self._company.silent,
                "grad_ratio": self._company.grad_ratio,
            }
        )
        return self.finding(
            step,
            "entropy_collapse",
            severity,
            message,
            onset=onset,
            metric="policy/entropy",
            score=WARN_BAD * high / max(now, 1e-12),
            baseline=high,
            evidence=evidence,
        )
