"""The tail of importance weights: a few tokens or responses carry the update."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector, log_size, spread_of_ess
from rlwatch.records import ClosedStep, Finding, Severity

SAYS = {
    "ratio/ess": "the effective sample size of the tokens' importance ratios is {level} of their number",
    "ratio/seq_ess": "the effective sample size of the responses' ratios is {level} of their number",
    "ratio/product_ess": "the effective sample size of the products of responses' ratios is {level} of their number",
    "ratio/chi2": "chi-squared of the importance ratios is {level}",
    "ratio/m2": "the mean squared log-ratio is {level} nats^2 (M2PO holds it below 0.04)",
    "ratio/p99": "one token in a hundred is {level} times as likely as when it was sampled, or more",
}


class WeightTail(RiseDetector):
    """Effective sample size, chi-squared, second moment and 99th percentile of pi / pi_old against the start.

    Floors: alarm levels in use are 0.3 to 0.5 for ESS and 1 for chi-squared (verl's examples), 0.04 nats^2 for the
    second moment (arXiv 2510.01161). Products over long responses lie at 0.55 in healthy multi-turn runs
    (arXiv 2602.17616), so theirs is lower.
    """

    name: ClassVar[str] = "weight_tail"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("ratio/ess", 0.5, 4.0, spread_of_ess),
        Limit("ratio/seq_ess", 0.5, 4.0, spread_of_ess),
        Limit("ratio/product_ess", 0.15, 4.0, spread_of_ess),
        Limit("ratio/chi2", 1.0, 5.0),
        Limit("ratio/m2", 0.04, 4.0),
        Limit("ratio/p99", 2.0, 3.0, log_size),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """Which measure of the tail, and how it began."""
        metric, level = rise.limit.metric, rise.level or 0.0
        factor = "" if rise.factor is None else f"; on the scale it is judged by, {number(rise.factor)} times its start"
        return self.finding(
            step,
            "weight_tail",
            Severity.WARNING,
            f"{SAYS[metric].format(level=number(level))}{factor}: a small part of the batch carries the update",
            onset=rise.since,
            metric=metric,
            score=rise.score,
            evidence=rounded(rise.evidence()),
        )
