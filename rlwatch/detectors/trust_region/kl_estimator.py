"""Detect faulty estimates of KL to the reference: tokens beyond verl's clamp, and estimators that contradict each
other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import MEDIAN_ERROR, RewardWatch
from rlwatch.detectors.rise import Rise, RiseLimit, odds
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Hold, Window, median, quantile
from rlwatch.wording import number

CLAMP = 10.0
"""Value of k3, nats, at which verl clamps that of a token: beyond it the KL penalty has no gradient."""
BEYOND = RiseLimit("policy/kl_ref_saturated", 0.002, 5.0, odds)
"""Share of tokens beyond the clamp: 0.2 % of them add 0.02 nats/token to a clamped mean, as much as a usual KL."""
MEANS = ("policy/kl_ref_k1", "policy/kl_ref", "policy/kl_ref_k3")
PART = 0.25
"""Share of the usual KL, by its smallest estimate, from which clamped tokens are more than ``info``: if KL itself is
large, 0.2 % of the tokens are its tail.
"""
HALF = 5.0
"""A clamped mean from which at least half of the tokens must be at the clamp, if the rest is near 0."""
MOST = 1e9
NOTABLE = 0.05
"""Nats per token by which estimators must disagree."""
APART, FAR_APART = 0.5, 2.0 / 3.0
"""Disagreement over the larger estimate: half of it; one three times the other."""
SURE = 6.0
"""Standard errors by which estimators must disagree, from the scatter of rows."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two estimates of one KL, nats per token; ``errors``: their difference in standard errors."""

    low: float
    high: float
    errors: float

    @property
    def apart(self) -> float:
        """Difference of the two estimates of KL relative to the larger one."""
        largest = max(abs(self.low), abs(self.high))
        return (self.high - self.low) / largest if largest > 0.0 else 0.0

    @property
    def real(self) -> bool:
        """True if the difference is notable, beyond noise, and at least half of the larger estimate."""
        return self.high - self.low >= NOTABLE and self.apart >= APART and self.errors >= SURE


class EstimatorPair:
    """Two estimators of one KL, compared over the last rows. ``first``, ``second``: their metric names."""

    def __init__(self, first: str, second: str) -> None:
        self.names = first, second
        self._rows = (Window(rows=20, steps=60, least=8), Window(rows=20, steps=60, least=8))
        self.out = Hold(forgive=2)

    def update(self, step: ClosedStep) -> None:
        """Read both estimates of KL from the row ``step``, if it has both."""
        values = step.numbers.get(self.names[0]), step.numbers.get(self.names[1])
        if values[0] is None or values[1] is None:
            return
        for rows, value in zip(self._rows, values, strict=True):
            rows.update(step.step, min(max(value or 0.0, -MOST), MOST))
        gap = self.get()
        self.out.update(step.step, gap is not None and gap.real)

    def get(self) -> Disagreement | None:
        """Return the disagreement over the last rows; None before there are enough."""
        levels = [rows.get() for rows in self._rows]
        if levels[0] is None or levels[1] is None:
            return None
        gaps = [b - a for a, b in zip(self._rows[0].values, self._rows[1].values, strict=True)]
        # half of the central 68 %: rows that jump between two levels have a median deviation of nothing
        error = MEDIAN_ERROR * (quantile(gaps, 0.84) - quantile(gaps, 0.16)) / 2.0 / math.sqrt(len(gaps))
        middle = abs(median(gaps))
        errors = middle / error if error > 0.0 else math.inf if middle > 0.0 else 0.0
        return Disagreement(min(levels[0], levels[1]), max(levels[0], levels[1]), errors)


PAIRS = (("policy/kl_ref_k1", "policy/kl_ref_k3"), ("policy/kl_ref_weighted", "policy/kl_ref_k3"))
"""Pairs of metrics that estimate the same KL and are therefore compared."""


class KLEstimator(BaseDetector):
    """Detector of faults that make the logged KL, or the penalty, a different quantity than KL(policy || reference).

    Over samples of the policy k1 and k3 have the same mean, which is not negative. If they contradict each other beyond
    noise, or k1 is below 0, the samples do not come from the policy (top-p or top-k sampling, another temperature,
    stale data, a mismatched engine). On-policy, k3 weighted by pi/pi_old and unweighted agree.
    """

    name: ClassVar[str] = "kl_estimator"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("policy/kl_ref_k1", "policy/kl_ref_k3"),
        ("policy/kl_ref_weighted", "policy/kl_ref_k3"),
        ("policy/kl_ref_saturated",),
        ("policy/kl_ref",),
    )
    reads: ClassVar[tuple[str, ...]] = ("policy/kl_ref_k3", "policy/kl_ref_saturated", "policy/kl_ref")
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._restart()

    def _restart(self) -> None:
        self._beyond = Rise(BEYOND)
        self._kl = Window(rows=60, steps=10**9)
        self._usual: tuple[int, float] | None = None
        """Step since which tokens lie beyond the clamp, and KL before it."""
        self._clamped = Window(rows=10, steps=10)
        self._row_at_clamp = Hold(forgive=3)
        self._at_clamp = Hold(forgive=2)
        self._pairs = tuple(EstimatorPair(*pair) for pair in PAIRS)

    def notice(self, event: Event) -> None:
        """Start anew after a reset of the reference, from which every estimator begins at zero."""
        if event.kind == "reference_reset":
            self._restart()
            self._held = []

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if no estimate of KL can be contradicted or clamped; otherwise return False.

        They must have no pair of estimators and no clamped tokens, and a KL far below the clamp.
        """
        holds = (self._at_clamp, *(pair.out for pair in self._pairs))
        counted = self._beyond.known or BEYOND.metric in rows.metrics
        if counted or any(hold.since is not None for hold in holds) or any(map(rows.metrics.issuperset, PAIRS)):
            return False
        kl = rows.column("policy/kl_ref")
        clamped = {row.origin.get("policy/kl_ref") == "actor/kl_loss" for row in rows.rows} if kl else {False}
        if len(clamped) > 1 or (True in clamped and max(*kl, self._clamped.most) >= HALF):
            return False
        if True in clamped:
            self._clamped.extend(rows.steps, kl)
            self._row_at_clamp.miss(rows.steps)
            self._at_clamp.miss(rows.steps)
        if known := [rows.column(name) for name in MEANS if name in rows.metrics]:
            self._kl.extend(rows.steps, [min(*map(abs, each), MOST) for each in zip(*known, strict=True)])
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the share of clamped tokens and both pairs of estimators; return saturation and bias, if any."""
        self._beyond.update(step.step, finite(step, BEYOND.metric))
        self._watch_clamped_mean(step)
        known = [abs(kl) for name in MEANS if (kl := finite(step, name)) is not None]
        if known:
            self._kl.update(step.step, min(*known, MOST))
        for pair in self._pairs:
            pair.update(step)
        biased = next((pair for pair in self._pairs if pair.out.lasted(3)), None)
        bias = None if biased is None else self._bias(step, biased)
        return [finding for finding in (self._clamp(step), bias) if finding is not None]

    def _watch_clamped_mean(self, step: ClosedStep) -> None:
        """Check a mean that verl logs after the clamp, which cannot exceed it."""
        kl = finite(step, "policy/kl_ref")
        if kl is None or step.origin.get("policy/kl_ref") != "actor/kl_loss":
            return
        self._clamped.update(step.step, kl)
        level = self._clamped.get()
        self._row_at_clamp.update(step.step, HALF <= kl <= CLAMP)
        self._at_clamp.update(step.step, level is not None and HALF <= level <= CLAMP)

    def _matters(self, share: float, since: int | None) -> bool:
        """Return whether the tokens beyond the clamp are much of the earlier KL, and no reward paid for it."""
        if since is None:
            return True
        if self._reward.pays(since):
            return False
        if self._usual is None or self._usual[0] != since:
            before = self._kl.values[: bisect_left(self._kl.at, since)][-20:]
            self._usual = since, median(before) if len(before) >= 3 else 0.0
        return CLAMP * share >= PART * self._usual[1]

    def _clamp(self, step: ClosedStep) -> Finding | None:
        if self._beyond.lasted:
            share, since, metric = self._beyond.level or 0.0, self._beyond.since, BEYOND.metric
            known = f"{share:.2%} of the tokens"
        elif self._at_clamp.lasted(3):
            share, metric = (self._clamped.get() or 0.0) / CLAMP, "policy/kl_ref"
            since = self._at_clamp.since if self._row_at_clamp.since is None else self._row_at_clamp.since
            known = f"the mean is {number(share * CLAMP)}, so about {share:.0%} of the tokens"
        else:
            return None
        matters = metric != BEYOND.metric or self._matters(share, since)
        return self.finding(
            step,
            "k3_saturation",
            Severity.WARNING if matters else Severity.INFO,
            f"KL to the reference is saturated: {known} lie beyond k3 = {CLAMP:g}, where verl clamps it and no "
            f"gradient pulls them back; clamped they are {number(CLAMP * share)} nats/token of the mean",
            onset=since,
            metric=metric,
            score=self._beyond.score if metric == BEYOND.metric else share * CLAMP / HALF,
            evidence=rounded({"share": share, "clamped_mean": CLAMP * share}),
        )

    def _bias(self, step: ClosedStep, pair: EstimatorPair) -> Finding | None:
        gap = pair.get()
        if gap is None:
            return None
        loud = gap.apart >= FAR_APART
        first, second = (finite(step, name) for name in pair.names)
        return self.finding(
            step,
            "k3_bias",
            Severity.WARNING if loud else Severity.INFO,
            f"estimators of one KL disagree: {' and '.join(pair.names)} stand at {number(gap.low)} and "
            f"{number(gap.high)} nats/token in either order, {number(min(gap.errors, 999.0))} standard errors apart; "
            "the samples are not the policy's own (top-p or top-k sampling, another temperature, stale data, another "
            "engine), so the penalty is not KL(policy || reference)",
            onset=pair.out.since,
            metric=pair.names[0],
            score=gap.apart / APART,
            evidence=rounded({pair.names[0]: first, pair.names[1]: second, "errors": gap.errors}),
        )
