"""Detect which side of the update, by the sign of the advantage, loses entropy or makes it explode."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.context import RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window, theil_sen
from rlwatch.wording import number

POSITIVE, NEGATIVE = "policy/entropy_pos", "policy/entropy_neg"
GROWN, MUCH = 1.5, 2.0
"""Entropy of tokens with a negative advantage, over its start, that is ``info``, and that is a warning while the reward
does not rise.
"""
SHARE = 0.75
"""Least share that tokens with a negative advantage must have in the growth of both sides."""
RISING = 0.05
"""Relative change over the trend window that counts as still rising; a plateau ends the rise."""
LOW = 0.15
"""Entropy of tokens with a positive advantage, over its start, that counts as a collapse of that side."""
KEPT = 0.4
"""Entropy of tokens with a negative advantage, over its start, above which only the positive side has collapsed."""


class _Side:
    """Mean entropy, in nats, of the tokens whose advantage has one sign: at the start, now, and its trend."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self._base = Baseline(floor=0.02)
        self._now = Window(rows=10, steps=10)
        self._trend = Window(rows=30, steps=60, least=8)

    def update(self, step: ClosedStep) -> None:
        value = finite(step, self.metric)
        if value is not None:
            for part in (self._base, self._now, self._trend):
                part.update(step.step, min(abs(value), 1e9))

    @property
    def start(self) -> float | None:
        return self._base.get()

    @property
    def now(self) -> float | None:
        return self._now.get()

    @property
    def rising(self) -> bool:
        """Return whether the last rows still rise."""
        at, now = self._trend.at, self.now
        if now is None or len(at) < 8:
            return False
        return theil_sen(at, self._trend.values) * (at[-1] - at[0]) > RISING * now


class EntropySides(BaseDetector):
    """Detector of entropy that grows almost wholly in tokens with a negative advantage, or collapses in positive ones
    alone.

    Samples that are pushed away give their probability to arbitrary tokens: entropy explosions begin there. In runs
    with clip-higher it grows so at first and then stays, which is ``info`` while the reward rises.
    """

    name: ClassVar[str] = "entropy_sides"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((POSITIVE, NEGATIVE),)
    reads: ClassVar[tuple[str, ...]] = (POSITIVE, NEGATIVE)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._positive, self._negative = _Side(POSITIVE), _Side(NEGATIVE)
        self._grown = Hold(forgive=2)
        self._unpaid = Hold(forgive=2)
        self._fallen = Hold(forgive=2)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Compare the entropy of tokens with positive and with negative advantage to the start; return growth or
        collapse, if any.
        """
        self._positive.update(step)
        self._negative.update(step)
        levels = (self._positive.start, self._positive.now, self._negative.start, self._negative.now)
        if None in levels:
            return []
        began, now, began_neg, now_neg = (level or 0.0 for level in levels)
        if began <= 0.0 or began_neg <= 0.0:
            return []
        self._weigh(step.step, now / began, now_neg / began_neg, self._share(now - began, now_neg - began_neg))
        found = []
        if self._grown.lasted(5):
            found.append(self._growth(step, began_neg, now_neg, self._share(now - began, now_neg - began_neg)))
        if self._fallen.lasted(5):
            found.append(self._collapse(step, began, now, now_neg / began_neg))
        return found

    def _share(self, gained: float, gained_neg: float) -> float:
        """Return the share of negative samples in the growth of both sides."""
        return gained_neg / (gained_neg + max(gained, 0.0)) if gained_neg > 0.0 else 0.0

    def _weigh(self, step: int, positive: float, negative: float, share: float) -> None:
        grown = negative >= GROWN and share >= SHARE
        unpaid = self._reward.fallen() or (negative >= MUCH and not self._reward.risen())
        self._grown.update(step, grown)
        self._unpaid.update(step, grown and unpaid and self._negative.rising)
        self._fallen.update(step, positive <= LOW and negative >= KEPT)

    def _growth(self, step: ClosedStep, began: float, now: float, share: float) -> Finding:
        return self.finding(
            step,
            "entropy_negative",
            Severity.WARNING if self._unpaid.lasted(3) else Severity.INFO,
            f"entropy of tokens of negative advantage grew from {number(began)} to {number(now)} nats/token, "
            f"{share:.0%} of the growth of both sides{self._reward.in_words()}: a typical onset of an explosion",
            onset=self._grown.since,
            metric=NEGATIVE,
            score=now / (GROWN * began),
            baseline=began,
            evidence=rounded({"entropy_neg": now, "start": began, "share": share, "entropy_pos": self._positive.now}),
        )

    def _collapse(self, step: ClosedStep, began: float, now: float, negative: float) -> Finding:
        return self.finding(
            step,
            "entropy_positive",
            Severity.INFO if self._reward.risen() else Severity.WARNING,
            f"entropy of tokens of positive advantage fell from {number(began)} to {number(now)} nats/token while that "
            f"of negative ones is at {negative:.0%} of its start{self._reward.in_words()}: only what is already "
            "certain is rewarded",
            onset=self._fallen.since,
            metric=POSITIVE,
            score=LOW * began / max(now, 1e-12),
            baseline=began,
            evidence=rounded({"entropy_pos": now, "start": began, "entropy_neg_ratio": negative}),
        )
