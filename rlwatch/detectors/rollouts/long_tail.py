"""Detect a long tail of response lengths: the whole batch waits for a few responses."""

from __future__ import annotations

from operator import truediv
from typing import ClassVar

from rlwatch.detectors.base import rounded
from rlwatch.detectors.rise import Rise, RiseDetector, RiseLimit, inverse, odds
from rlwatch.detectors.stretch import Stretch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number


class LongTail(RiseDetector):
    """Detector of a long tail of lengths, idle generation slots, and responses carried over to the next iteration
    (C3PO++).

    arXiv 2510.18855 publishes no limits; these are far from what even lengths give, and the run's own beginning counts
    first. ``1 - mean / max`` of a batch is the least share of a synchronous engine's slots that idle. It costs time,
    not quality: ``info`` if only lengths show it, a warning if work is carried over or wasted.
    """

    name: ClassVar[str] = "long_tail"
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit("len/tail_ratio", 4.0, 2.0),
        RiseLimit("len/max_over_mean", 5.0, 2.0),
        RiseLimit("len/bubble", 0.8, 2.0, odds),
        RiseLimit("len/gini", 0.6, 2.0, odds),
        RiseLimit("partial/frac", 0.4, 2.0, odds),
        RiseLimit("partial/retention_mean", 2.0, 2.0),
        RiseLimit("partial/retention_max", 6.0, 2.0),
        RiseLimit("len/budget_used", 0.6, 1.5, inverse),
        RiseLimit("time/rollout_idle", 0.5, 2.0, odds),
    )
    reads: ClassVar[tuple[str, ...]] = (*(limit.metric for limit in limits), "len/max")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        *((limit.metric,) for limit in limits),
        ("len/max", "len/mean"),
    )

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if all metrics are below their limits; otherwise return False."""
        columns = {limit.metric: rows.column(limit.metric) for limit in self.limits}
        longest, mean = rows.column("len/max"), rows.column("len/mean")
        if longest and mean and not columns["len/max_over_mean"]:
            if min(mean) < 1.0:
                return False
            columns["len/max_over_mean"] = list(map(truediv, longest, mean))
        return self.buffered(rows.steps, list(columns.values()))

    def read(self, step: ClosedStep, limit: RiseLimit) -> float | None:
        """Return the value in the row ``step`` of the metric that ``limit`` is for; None if it was not measured.

        Maximum over mean of the lengths is computed from the two if it was not logged.
        """
        get = step.numbers.get
        value = get(limit.metric)
        if value is not None or limit.metric != "len/max_over_mean":
            return value
        longest, mean = get("len/max"), get("len/mean")
        return None if longest is None or mean is None or mean < 1.0 else longest / mean

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step`` for the metric that is beyond its limit; ``rise``: its course so
        far.
        """
        metric, level = rise.limit.metric, rise.level or 0.0
        costs = metric.startswith(("partial/", "time/")) or metric == "len/budget_used"
        return self.finding(
            step,
            "long_tail",
            Severity.WARNING if costs else Severity.INFO,
            f"{DESCRIPTIONS[metric]}: {metric} is {number(level)}, its limit here {number(_raw(rise))}",
            onset=rise.since,
            metric=metric,
            score=rise.score,
            evidence=rounded(rise.evidence()),
        )


def _raw(rise: Rise) -> float:
    """Return the threshold in the metric's own unit."""
    if rise.limit.scale is odds:
        return rise.threshold / (1.0 + rise.threshold)
    return 1.0 / rise.threshold if rise.limit.scale is inverse else rise.threshold


DESCRIPTIONS = {
    "len/tail_ratio": "the longest 1 % of the responses are far longer than the usual one",
    "len/max_over_mean": "the batch waits for a response far longer than the mean",
    "len/bubble": "most generation slots idle while the longest response is finished",
    "len/gini": "a few responses hold most of the tokens",
    "partial/frac": "many responses are carried over from earlier iterations",
    "partial/retention_mean": "responses are carried over repeatedly",
    "partial/retention_max": "one response is carried over repeatedly",
    "len/budget_used": "much of the iteration's token budget is not used",
    "time/rollout_idle": "the rollout engines wait",
}
