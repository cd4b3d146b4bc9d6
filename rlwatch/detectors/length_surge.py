"""Responses grow fast while the reward gains nothing by it: the sign that comes before many collapses."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.reward import RewardWatch
from rlwatch.detectors.rise import Limit, Rise, RiseDetector, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold

ROWS, STEPS = 5, 15
"""Rows and steps the medians must stay beyond their limits."""
FACTOR = 9.0
"""On the odds of not ending: from 10 % to half, from half to nine tenths."""


class LengthSurge(RiseDetector):
    """Mean length doubled, or half of the responses cut, with a reward that has not risen.

    On Qwen3-4B a surge of length was the early warning of the collapse (arXiv 2602.01826); lengths grow in healthy
    runs too, and the reward with them. The limit itself is for ``length_explosion``.
    """

    name: ClassVar[str] = "length_surge"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("len/mean", 32.0, 2.0),
        Limit("len/clipped", 0.5, FACTOR, odds),
        Limit("text/eos_missing", 0.5, FACTOR, odds),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._long = Hold(forgive=1)

    def listen(self, step: ClosedStep) -> None:
        """Follow the reward."""
        self._reward.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """A surge that pays is none, nor is one of a few small batches."""
        found = super().judge(step)
        self._long.update(step.step, bool(found) and not self._reward.risen())
        return found if self._long.lasted(ROWS, STEPS) and found else []

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """How long, and against what."""
        level, began = rise.level or 0.0, rise.began or 0.0
        if rise.limit.metric == "len/mean":
            what = f"mean response length is {number(level)} tokens, {number(began)} at the start"
        else:
            share = began / (1.0 + began)
            what = f"{level:.0%} of the responses do not end by themselves, {share:.0%} at the start"
        return self.finding(
            step,
            "length_surge",
            Severity.WARNING,
            what + self._reward.say(),
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            evidence=rounded(rise.evidence() | {"reward": self._reward.now, "reward_start": self._reward.start}),
        )
