"""One stretch of the responses drifts while the others stand: its opening, most often, where the format is."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import finite, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector
from rlwatch.metrics.table import POSITIONS
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number

FAMILIES = ("policy/kl_ref_at_", "mismatch/logp_absdiff_at_")
LEAST = 0.05
"""Nats a token of a stretch below which it has not drifted, whatever the others do."""
TIMES, GREW = 4.0, 4.0
"""Times the largest of the other stretches, and times what it was of it when the run began."""
NOTHING = 1e-4
"""Nats of all others below which there is nothing to compare with: a run that has just begun."""


class PositionDrift(RiseDetector):
    """KL to the reference, or the gap to the rollout engine, of one stretch of positions against the largest other.

    A mean over tokens hides it: eight tokens of 500 are 2 % of it. Openings move more than the rest in sound runs, too
    (they hold the format), so a stretch counts by how much more it does so than when the run began. A template or a
    prompt that the policy and the reference, or the engine, do not see alike looks like this.
    """

    name: ClassVar[str] = "position_drift"
    limits: ClassVar[tuple[Limit, ...]] = tuple(
        Limit(f"{family}{first}", TIMES, GREW, says=f"tokens {where} of the responses")
        for family in FAMILIES
        for first, where in POSITIONS
    )
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((f"{family}0", f"{family}8") for family in FAMILIES)

    def read(self, step: ClosedStep, limit: Limit) -> float | None:
        """Times the largest other stretch that this one is; within the limit while it is next to nothing."""
        value = finite(step, limit.metric)
        family = next(family for family in FAMILIES if limit.metric.startswith(family))
        others = [finite(step, f"{family}{first}") for first, _ in POSITIONS if f"{family}{first}" != limit.metric]
        largest = max((other for other in others if other is not None), default=0.0)
        if value is None or largest < NOTHING:
            return None
        return value / largest if value >= LEAST else min(value / largest, TIMES / 2.0)

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Which stretch, and how far it is from the others."""
        metric, value = rise.limit.metric, finite(step, rise.limit.metric)
        what = "KL to the reference" if metric.startswith(FAMILIES[0]) else "gap between trainer and rollout engine"
        return self.finding(
            step,
            "position_drift",
            Severity.WARNING,
            f"the {what} sits in {rise.limit.says}: {number(rise.level or 0.0)} times that of any other stretch, "
            f"{number(rise.began or 0.0)} times at the start",
            onset=rise.since,
            metric=metric,
            score=rise.score,
            evidence=rounded({"nats": value, "times": rise.level, "times_start": rise.began}),
        )
