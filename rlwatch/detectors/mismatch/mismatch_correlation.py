"""Detect that the correlation between the token probabilities of trainer and rollout engine falls."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import finite, rounded
from rlwatch.detectors.mismatch.mismatch_growth import shortfall
from rlwatch.detectors.rise import Rise, RiseDetector, RiseLimit
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Window

NARROWED = 0.7
"""Factor on the differences of probability below which a lower correlation only reflects a narrower range: a policy
that becomes certain has probabilities near 1, whose correlation is that of rounding.
"""


class MismatchCorrelation(RiseDetector):
    """Detector of a falling correlation between the token probabilities of trainer and rollout engine.

    It compares 1 - Pearson's correlation with its start (verl's users ask for 0.98 in smoke tests; healthy 0.995 and
    up).
    """

    name: ClassVar[str] = "mismatch_correlation"
    limits: ClassVar[tuple[RiseLimit, ...]] = (RiseLimit("mismatch/prob_corr", 0.98, 3.0, shortfall),)

    def __init__(self) -> None:
        super().__init__()
        self._gap = Window(rows=10, steps=10)
        self._gap_base = Baseline()

    def listen(self, step: ClosedStep) -> None:
        """Read the mean difference between the probabilities of trainer and rollout engine from the row ``step``."""
        gap = finite(step, "mismatch/prob_absdiff")
        if gap is not None:
            self._gap.update(step.step, gap)
            self._gap_base.update(step.step, gap)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Return a finding if the correlation fell, unless the probabilities only came to lie closer together."""
        found = super().judge(step)
        now, then = self._gap.get(), self._gap_base.get()
        narrowed = now is not None and then is not None and now < NARROWED * then
        return [] if narrowed else found

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step``: the correlation now and at the start; ``rise``: the course of 1 -
        correlation.
        """
        level, start = rise.level or 0.0, 1.0 - (rise.began or 0.0)
        return self.finding(
            step,
            "mismatch_correlation",
            Severity.WARNING,
            f"the probabilities that trainer and rollout engine give to one token agree less: correlation "
            f"{level:.3f}, at the start {start:.3f}",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=start,
            evidence=rounded({"correlation": level, "start": start, "prob_absdiff": self._gap.get()}),
        )
