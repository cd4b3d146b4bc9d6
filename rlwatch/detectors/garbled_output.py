"""Garbled responses: broken characters, mixed scripts, noise that no longer compresses."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import finite, number, rounded
from rlwatch.detectors.reward import RewardWatch
from rlwatch.detectors.rise import MOST, Limit, Rise, RiseDetector, odds
from rlwatch.records import ClosedStep, Finding, Severity


def density(zlib_ratio: float) -> float:
    """Compressed bytes over bytes: prose 0.3 to 0.5, random characters 0.7 and more."""
    return MOST if zlib_ratio <= 0.0 else min(1.0 / zlib_ratio, MOST)


MUCH = 0.3
"""Share of garbled characters that leaves no text."""
SAYS = {
    "text/garbled": "{level} of the characters of responses are control, private-use, unassigned or replacement ones",
    "text/replacement": "{level} of the characters of responses stand for bytes that decode to nothing",
    "text/script_switches": "responses change between writing systems {level} times in 100 characters",
    "text/zlib_ratio": "responses hardly compress any more (ratio {level}; prose 2 to 3), as random characters do",
}


class GarbledOutput(RiseDetector):
    """Characters of sampled responses against the run's beginning.

    Nearly always the visible end of another failure, so it is critical only where hardly any text is left and the
    reward fell. Loops are the matter of ``repetition``, runs of token id 0 of ``id0_run``.
    """

    name: ClassVar[str] = "garbled_output"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("text/garbled", 0.01, 5.0, odds),
        Limit("text/replacement", 0.005, 5.0, odds),
        Limit("text/script_switches", 4.0, 4.0),
        Limit("text/zlib_ratio", 1.5, 1.5, density),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()

    def listen(self, step: ClosedStep) -> None:
        """Follow the reward."""
        self._reward.update(step)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """What is wrong with the text."""
        metric, level = rise.limit.metric, rise.level or 0.0
        lost = metric in ("text/garbled", "text/replacement") and level >= MUCH and self._reward.fallen()
        shown = f"{level:.1%}" if metric in ("text/garbled", "text/replacement") else number(level)
        return self.finding(
            step,
            "garbled_output",
            Severity.CRITICAL if lost else Severity.WARNING,
            f"{SAYS[metric].format(level=shown)}{self._reward.say()}",
            onset=rise.since,
            metric=metric,
            score=rise.score,
            evidence=rounded(rise.evidence() | {"length": finite(step, "len/mean"), "reward": self._reward.now}),
        )
