"""Trainer and rollout engine send tokens to other experts."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector, odds
from rlwatch.records import ClosedStep, Finding, Severity


class RoutingMismatch(RiseDetector):
    """Share of (token, layer) pairs with other experts, and of layers a token, against the start.

    About a tenth of the pairs differ without replay in healthy runs, and nearly every token in some layer
    (R3, arXiv 2510.11370): growth is judged, the level is not.
    """

    name: ClassVar[str] = "routing_mismatch"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("mismatch/routing_layer_frac", 0.02, 2.0, odds),
        Limit("mismatch/routing_layers", 1.0, 2.0),
        Limit("mismatch/routing_absdiff", 0.05, 2.0),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """How much of the routing differs now."""
        factor = "" if rise.factor is None else f", {number(rise.factor)} times its start"
        return self.finding(
            step,
            "routing_mismatch",
            Severity.WARNING,
            f"trainer and rollout engine route tokens to other experts more often: {rise.limit.metric} "
            f"{number(rise.level or 0.0)}{factor}",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=rise.began,
            evidence=rounded(rise.evidence()),
        )
