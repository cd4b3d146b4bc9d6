"""Responses repeat themselves: loops, repeated n-grams, text that compresses far too well."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.reward import RewardWatch
from rlwatch.detectors.rise import MOST, Limit, Rise, RiseDetector, odds
from rlwatch.records import ClosedStep, Finding, Severity


def repeated(distinct: float) -> float:
    """Odds that an n-gram is a repeated one, of the share that is distinct."""
    return MOST if distinct <= 0.0 else odds(max(1.0 - distinct, 0.0))


class Repetition(RiseDetector):
    """Loops and repeated n-grams above the run's beginning; slime's rule for text (compresses more than tenfold).

    Long responses repeat more n-grams than short ones, so distinct-n has wide limits. A warning: looping responses
    cost a run its reward, which is where it becomes critical.
    """

    name: ClassVar[str] = "repetition"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("text/looping_frac", 0.1, 4.0, odds),
        Limit("text/tail_loop", 0.1, 4.0, odds),
        Limit("text/loop_cover", 0.15, 4.0, odds),
        Limit("text/repetition_frac", 0.05, 4.0, odds),
        Limit("text/repetition", 0.4, 3.0, odds),
        Limit("text/distinct_2", 0.3, 4.0, repeated),
        Limit("text/zlib_ratio", 6.0, 2.0),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()

    def listen(self, step: ClosedStep) -> None:
        """Follow the reward, for the message."""
        self._reward.update(step)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """How much is repeated."""
        level = rise.level or 0.0
        return self.finding(
            step,
            "repetition",
            Severity.WARNING,
            f"{SAYS[rise.limit.metric]} ({number(level)}){self._reward.say()}",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            evidence=rounded(rise.evidence() | {"reward": self._reward.now}),
        )


SAYS = {
    "text/looping_frac": "responses are caught in loops: share at least half covered by one repeated block",
    "text/tail_loop": "responses end in a repeated block: share of a response it covers",
    "text/loop_cover": "repeated blocks cover much of a response",
    "text/repetition_frac": "long texts compress more than tenfold at their end: share that does",
    "text/repetition": "much of a response is repeated 3-grams",
    "text/distinct_2": "few 2-grams of a response are distinct",
    "text/zlib_ratio": "responses compress like loops",
}
