"""Staleness: responses of policy versions long gone."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector
from rlwatch.records import ClosedStep, Finding, Severity


class Staleness(RiseDetector):
    """Policy versions between sampling and update, and versions one response was sampled under."""

    name: ClassVar[str] = "staleness"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("staleness/mean", 3.0, 2.0),
        Limit("staleness/worst_mean", 4.0, 2.0),
        Limit("staleness/max", 8.0, 2.0),
        Limit("staleness/spans_mean", 3.0, 2.0),
        Limit("staleness/spans_max", 8.0, 2.0),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """How old the data are."""
        level = rise.level or 0.0
        return self.finding(
            step,
            "staleness",
            Severity.WARNING,
            f"{rise.limit.metric} is {number(level)} policy versions, at the start {number(rise.began or 0.0)}: "
            "the trainer runs ahead of the rollouts it learns from",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=rise.began,
            evidence=rounded(rise.evidence()),
        )
