"""Off-policy data: responses that the off-policy mask drops."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import finite, number, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector, odds
from rlwatch.records import ClosedStep, Finding, Severity


class OffPolicyMask(RiseDetector):
    """Share of responses DeepSeek-V3.2's mask drops (arXiv 2512.02556, eq. 9), and the worst it has to do with.

    No threshold is published, so the run's own beginning counts first. The mask averages over a response: one
    impossible token in a long answer shows in the largest distance only.
    """

    name: ClassVar[str] = "off_policy_mask"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("offpolicy/masked", 0.15, 4.0, odds),
        Limit("offpolicy/masked_neg", 0.3, 4.0, odds),
        Limit("offpolicy/kl_neg_max", 1.0, 4.0),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def read(self, step: ClosedStep, metric: str) -> float | None:
        """Some trainers log a count of responses under the name of a share: that says nothing without the batch."""
        value = finite(step, metric)
        return None if value is not None and value > 1.0 and metric != "offpolicy/kl_neg_max" else value

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """How many responses are dropped, or how far the worst is."""
        level, began = rise.level or 0.0, rise.began or 0.0
        if rise.limit.metric == "offpolicy/kl_neg_max":
            what = f"a response of negative advantage is {number(level)} nats/token from the policy that sampled it"
            start = number(began)
        else:
            whose = " of negative advantage" if rise.limit.metric == "offpolicy/masked_neg" else ""
            what, start = f"the off-policy mask drops {level:.0%} of the responses{whose}", f"{began / (1 + began):.1%}"
        return self.finding(
            step,
            "off_policy_mask",
            Severity.WARNING,
            f"{what}, at the start {start}: sampling and training policy drift apart (staleness or engine mismatch)",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            evidence=rounded(rise.evidence()),
        )
