"""The tail of the weights trainer/rollout: a few tokens or responses carry the correction, or are cut by it."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.rise import MOST, Limit, Rise, RiseDetector, spread_of_ess
from rlwatch.records import ClosedStep, Finding, Severity


def log_of_chi2(chi2: float) -> float:
    """log(1 + chi^2), nats: products of many weights span decades in healthy runs. Sampled, it may be below 0."""
    return math.log1p(min(max(chi2, 0.0), MOST))


def log_above_one(weight: float) -> float:
    """Log of a weight above 1, nats; 0 below."""
    return math.log(min(max(weight, 1.0), MOST))


SAYS = {
    "mismatch/ess": "the effective sample size of the tokens' weights is {level} of their number",
    "mismatch/chi2": "chi-squared of the tokens' weights is {level}",
    "mismatch/m2": "the mean squared log-weight is {level} nats^2",
    "mismatch/factor2_frac": "a share of {level} of the tokens have probabilities more than a factor of 2 apart",
    "mismatch/seq_ess": "the effective sample size of the responses' weights is {level} of their number",
    "mismatch/seq_chi2": "chi-squared of the responses' weights is {level}",
    "mismatch/seq_weight_max": "the largest weight of a response is {level}",
    "mismatch/seq_rejected": "a share of {level} of the responses have weights outside the usual bounds",
}


class MismatchTail(RiseDetector):
    """Effective sample size, chi-squared and second moment of raw weights trainer/rollout, against the start.

    verl computes its effective sample size after truncation, which looks healthy when much is cut: chi-squared and
    the responses' weights are read beside it. Weights of whole responses vary by decades between healthy runs
    (sequence KL 7.6 in BF16, 0.3 in FP16: arXiv 2510.26788), so theirs are compared on log scales.
    """

    name: ClassVar[str] = "mismatch_tail"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("mismatch/ess", 0.7, 4.0, spread_of_ess),
        Limit("mismatch/chi2", 0.5, 4.0),
        Limit("mismatch/m2", 0.04, 4.0),
        Limit("mismatch/factor2_frac", 0.02, 4.0),
        Limit("mismatch/seq_ess", 0.1, 4.0, spread_of_ess),
        Limit("mismatch/seq_chi2", 20.0, 2.0, log_of_chi2),
        Limit("mismatch/seq_weight_max", 20.0, 2.0, log_above_one),
        Limit("mismatch/seq_rejected", 0.5, 2.0),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """Which measure of the tail, and how it began."""
        metric, level = rise.limit.metric, rise.level or 0.0
        factor = "" if rise.factor is None else f", {number(rise.factor)} times its start on the scale it is judged by"
        return self.finding(
            step,
            "mismatch_tail",
            Severity.WARNING,
            f"{SAYS[metric].format(level=number(level))}{factor}: a small part of what the rollout engine sampled "
            "carries the correction for it, or is cut by it",
            onset=rise.since,
            metric=metric,
            score=rise.score,
            evidence=rounded(rise.evidence()),
        )
