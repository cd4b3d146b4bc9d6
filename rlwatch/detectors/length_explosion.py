"""Responses run into the length limit: the policy no longer ends its answers."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.reward import RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window

NEARLY_ALL = 0.95
"""Share of responses cut at the limit from which hardly any answer is complete."""
RISE = 0.1
"""Rise over the run's beginning below which it has always been so."""
LONG = 30
"""Steps from which it is critical, unless the reward has risen by it."""


class LengthExplosion(BaseDetector):
    """Share of truncated responses against how the run began.

    Long answers may be better answers; answers that are nearly all cut off are not, and once no sample
    in a group ends, length cannot be unlearned.
    """

    name: ClassVar[str] = "length_explosion"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("len/clipped",),)
    reads: ClassVar[tuple[str, ...]] = ("len/clipped",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._base = Baseline(floor=0.02)
        self._now = Window(rows=10, steps=15)
        self._rise = Hold(forgive=2)
        self._full = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Follow the reward."""
        self._reward.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the share of the last rows."""
        share = finite(step, *self.reads)
        if share is None:
            return []
        self._base.update(step.step, share)
        self._now.update(step.step, share)
        now, level, first = self._now.get(), self._base.get(), self._base.first
        if now is None or level is None or first is None:
            return []
        start = min(level, first)
        self._rise.update(step.step, share > (start + NEARLY_ALL) / 2.0)
        self._full.update(step.step, now >= NEARLY_ALL and now - start >= RISE)
        if not self._full.lasted(3, 8):
            return []
        severe = self._full.lasted(5, LONG) and not self._reward.risen()
        return [self._finding(step, now, start, Severity.CRITICAL if severe else Severity.WARNING)]

    def _finding(self, step: ClosedStep, now: float, start: float, severity: Severity) -> Finding:
        length = finite(step, "len/mean")
        mean = "" if length is None else f" (mean length {number(length)} tokens)"
        return self.finding(
            step,
            "length_explosion",
            severity,
            f"{now:.0%} of responses are cut at the length limit{mean}, {start:.0%} at the start{self._reward.say()}",
            onset=self._rise.since if self._rise.since is not None else self._full.since,
            metric="len/clipped",
            score=now / NEARLY_ALL,
            baseline=start,
            evidence=rounded({"clipped": now, "clipped_start": start, "length": length, "reward": self._reward.now}),
        )
