"""Entropy explosion: the policy drifts towards noise while the reward falls."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.entropy import EntropyDetector
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Window

RISE = 1.3
"""Entropy over baseline above which a rise is dated."""
WARN, CRITICAL = 1.5, 2.0
"""Ratios beside a fallen reward (an entropy bonus gone wrong was seen at 1.35-1.8 when the reward fell)."""
ALONE = 3.0
"""Ratio that warns by itself when the reward has not risen."""
NOISE = 0.7
"""Share of log V beyond which output is close to uniform noise."""


class EntropyExplosion(EntropyDetector):
    """Token entropy above how the run began, with the reward falling or the ceiling log V in sight."""

    name: ClassVar[str] = "entropy_explosion"

    def __init__(self) -> None:
        super().__init__(Baseline(floor=0.02), Window(rows=8, steps=8))

    def beginning(self, level: float, first: float) -> float:
        """The lower: a run that rises inside its warm-up is judged by its first rows."""
        return min(level, first)

    def weigh(self, step: ClosedStep, entropy: float, now: float, start: float) -> None:
        """A rise counts beside a fallen reward, by itself if it is large, or close to noise."""
        ratio = now / start
        self._moved.update(step.step, entropy > RISE * start)
        reward, log_vocab = self._company.reward, self._company.log_vocab
        fallen = reward.fallen()
        noise = log_vocab is not None and now > NOISE * log_vocab and ratio > RISE
        alone = ratio > ALONE and not reward.risen()
        self._warned.update(step.step, (fallen and ratio > WARN) or alone or noise)
        self._confirmed.update(step.step, fallen and (ratio > CRITICAL or noise))

    def told(self, step: ClosedStep, now: float, start: float, severity: Severity) -> Finding:
        """How far it rose, how far it is from noise, and what the reward did."""
        reward = self._company.reward
        ceiling = (
            "" if self._company.log_vocab is None else f" (uniform noise would be {number(self._company.log_vocab)})"
        )
        message = f"entropy rose from {number(start)} to {number(now)} nats/token{ceiling}{reward.say()}"
        return self.finding(
            step,
            "entropy_explosion",
            severity,
            message,
            onset=self.onset,
            metric="policy/entropy",
            score=now / (WARN * start),
            baseline=start,
            evidence=rounded(
                {
                    "entropy": now,
                    "entropy_baseline": start,
                    "ratio": now / start,
                    "log_vocab": self._company.log_vocab,
                    "reward": reward.now,
                    "reward_best": reward.best,
                }
            ),
        )
