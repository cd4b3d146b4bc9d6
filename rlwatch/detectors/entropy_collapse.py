"""Entropy collapse: the policy stops exploring and the reward does not pay for it."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import finite, number, rounded
from rlwatch.detectors.company import DETERMINISTIC
from rlwatch.detectors.entropy import EntropyDetector
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Window

LOW = 0.5
"""Entropy over baseline below which a decline is dated (``onset_step``), where the reward does not pay for it."""
WARN, WARN_BAD = 0.15, 0.4
"""Ratio that warns by itself, and beside a fallen reward or silent groups."""
CRITICAL, CRITICAL_BAD = 0.02, 0.2
"""The same for critical. Healthy runs fall to 0.15-0.3 of their start while the reward rises."""
PAID = 0.05
"""Ratio that warns even while the reward rises: there is nothing left to spend."""


class EntropyCollapse(EntropyDetector):
    """Token entropy against how the run began, corroborated by reward, zero-variance share, gradient.

    Entropy spent on reward is the normal course of RLVR (R = -a exp(H) + b, arXiv 2505.22617), so a low
    level alone is no finding while the reward is above its start.
    """

    name: ClassVar[str] = "entropy_collapse"

    def __init__(self) -> None:
        super().__init__(Baseline(), Window(rows=10, steps=10))

    def beginning(self, level: float, first: float) -> float:
        """The higher: a run that falls inside its warm-up is judged by its first rows."""
        return max(level, first)

    def weigh(self, step: ClosedStep, entropy: float, now: float, start: float) -> None:
        """A fall counts by its depth, less if the reward paid for it, more in bad company."""
        ratio = now / start
        self._moved.update(step.step, entropy < LOW * start and not self._pays(step))
        bad = self._in_bad_company()
        paid = self._company.reward.risen() and not bad
        self._warned.update(step.step, ratio < (PAID if paid else WARN_BAD if bad else WARN))
        self._confirmed.update(step.step, not paid and self._critical(now, ratio, bad))

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

    def told(self, step: ClosedStep, now: float, start: float, severity: Severity) -> Finding:
        """How far it fell, over how many steps, and what the reward did."""
        onset = self.onset
        span = 0 if onset is None else step.step - onset
        reward = self._company.reward
        message = f"entropy fell from {number(start)} to {number(now)} nats/token over {span} steps{reward.say()}"
        if self._company.mute():
            message += "; nearly all groups agree on one reward, so no gradient leads back"
        evidence = rounded(
            {
                "entropy": now,
                "entropy_baseline": start,
                "ratio": now / start,
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
            score=WARN_BAD * start / max(now, 1e-12),
            baseline=start,
            evidence=evidence,
        )
