"""Mismatch beyond what healthy runs of any kind show, whatever this run began with."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.mismatch_scales import BANDS
from rlwatch.detectors.standing import Standing
from rlwatch.records import ClosedStep, Finding, Severity


class MismatchLevel(BaseDetector):
    """Published bands. A warning where the run began like this: then growth, which is relative, cannot see it.

    Where it has only grown to be so, that is told as information beside ``mismatch_growth``.
    """

    name: ClassVar[str] = "mismatch_level"
    reads: ClassVar[tuple[str, ...]] = tuple(band.metric for band in BANDS)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._bands = [Standing(band) for band in BANDS]

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge each metric; those that began beyond their band speak first."""
        for band in self._bands:
            band.update(step.step, finite(step, band.limit.metric))
        beyond = [band for band in self._bands if band.lasted]
        return [self._finding(step, beyond)] if beyond else []

    def _finding(self, step: ClosedStep, beyond: list[Standing]) -> Finding:
        worst = max(beyond, key=lambda band: (band.always, band.score))
        levels = {band.limit.metric: band.level for band in beyond}
        shown = ", ".join(
            f"{band.limit.metric} {number(band.level or 0.0)} (others alarm at {number(band.limit.floor)})"
            for band in sorted(beyond, key=lambda band: band is not worst)[:3]
        )
        how = "which it was not when the run began"
        if worst.always:
            began, look = ("was so", ", not at training") if worst.began_beyond else ("was close to that", " first")
            how = f"and {began} when the run began: look at weight sync, precision and sampling settings{look}"
        return self.finding(
            step,
            "mismatch_level",
            Severity.WARNING if worst.always else Severity.INFO,
            f"rollout engine and trainer disagree more than in healthy runs: {shown}; {how}",
            onset=worst.since,
            metric=worst.limit.metric,
            score=worst.score,
            evidence=rounded(levels) | {"from_the_start": worst.always},
        )
