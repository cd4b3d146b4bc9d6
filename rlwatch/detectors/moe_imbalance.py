"""Experts out of balance: how far the load of experts departs from an even one."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector
from rlwatch.records import ClosedStep, Finding, Severity


class MoEImbalance(RiseDetector):
    """Load violations (load of an expert times the number of experts, less 1: 0 when even) against the start.

    Experts specialise, so the level differs between models; only its growth is judged.
    """

    name: ClassVar[str] = "moe_imbalance"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("mismatch/moe_avg_vio", 0.5, 1.6),
        Limit("mismatch/moe_max_vio", 2.0, 2.0),
        Limit("mismatch/moe_worst_vio", 4.0, 2.0),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """The violation now and at first."""
        level, start = rise.level or 0.0, rise.began or 0.0
        return self.finding(
            step,
            "moe_imbalance",
            Severity.WARNING,
            f"the load of experts has become uneven: {rise.limit.metric} {number(level)}, at the start {number(start)} "
            "(0 is even): routing differs more between trainer and engine, and some experts are hardly trained",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=start,
            evidence=rounded(rise.evidence()),
        )
