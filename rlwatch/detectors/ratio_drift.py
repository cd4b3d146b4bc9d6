"""Drift of importance ratios: whole batches become likelier, or less likely, than when they were sampled."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector, log_size
from rlwatch.records import ClosedStep, Finding, Severity

FACTOR = 5.0
"""Times |log ratio| at the start."""


class RatioDrift(RiseDetector):
    """The mean ratio away from 1, for good: of responses' geometric means, of whole responses, of tokens.

    The mean of pi / pi_old over samples of pi_old is 1 whatever pi is; what lasts beyond noise says that the samples
    are not pi_old's, or that a few of them are everything. The geometric mean, which has no such law, drifts with
    the size of an update.
    """

    name: ClassVar[str] = "ratio_drift"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("ratio/geo_mean", 1.02, FACTOR, log_size),
        Limit("ratio/seq_mean", 1.1, FACTOR, log_size),
        Limit("ratio/mean", 1.05, FACTOR, log_size),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """Which mean, and which way."""
        level = rise.level or 0.0
        way = "less likely" if level < 1.0 else "likelier"
        return self.finding(
            step,
            "ratio_drift",
            Severity.WARNING,
            f"{rise.limit.metric} stands at {number(level)}: in the update, responses are {way} than when they were "
            f"sampled (|log| was {number(rise.began or 0.0)} at the start)",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=1.0,
            evidence=rounded(rise.evidence()),
        )
