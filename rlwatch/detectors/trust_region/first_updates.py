"""Detect first updates that moved the policy far at once, after which no row earned the reward of the first one."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import noise_of
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Window, median
from rlwatch.wording import number

FAR, NEAR = 0.3, 0.1
"""Nats per token of KL from which the policy is far from its reference, and up to which the first row is near it."""
SOON, SETTLED = 12, 6
"""Rows within which a policy that its first updates broke is recognised, and rows after the first that show it."""
WORSE = 0.25
"""Share of the first row's reward that must be lost."""
PLAIN = 4.0
"""Deviations of one row that the loss must exceed: the level before the updates is known from one row only."""
BACK = 0.1
"""Share of the first row's reward that may be missing when the reward has recovered."""


class FirstUpdates(BaseDetector):
    """Detector of a policy broken by its first updates: KL to the reference and reward, compared with the first row.

    Every other detector takes its baseline from the first rows. If one or two updates broke the policy, those rows
    already belong to the broken policy, and nothing deviates from them. Only the first row precedes all updates.
    """

    name: ClassVar[str] = "first_updates"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        ("reward/mean", kl) for kl in ("policy/kl_ref", "policy/kl_ref_k3", "policy/kl_ref_k2", "policy/kl_ref_k1")
    )
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)
    distances: ClassVar[tuple[str, ...]] = tuple(kl for _, kl in requires)

    def __init__(self) -> None:
        super().__init__()
        self._paid = Window(rows=8, steps=10**9)
        self._kl = Window(rows=8, steps=10**9)
        self._first: float | None = None
        self._began: int | None = None
        self._rows = 0
        self._broke = self._never = False

    def pass_over(self, rows: Stretch) -> bool:
        """Count all ``rows`` at once if the first updates are over, which alone are judged."""
        self._rows += len(rows.steps) if self._never else 0
        return self._never

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Compare the rows after the first with the first one; return a finding if the first updates broke the
        policy.
        """
        reward, kl = finite(step, "reward/mean"), finite(step, *self.distances)
        self._rows += 1
        if self._never or reward is None:
            return []
        if self._first is None:
            self._first, self._never = reward, kl is not None and abs(kl) > NEAR
            return []
        self._began = step.step if self._began is None else self._began
        self._paid.update(step.step, reward)
        if kl is not None:
            self._kl.update(step.step, abs(kl))
        self._broke = self._stays(self._first) if self._broke else self._breaks(self._first)
        self._never = not self._broke and self._rows > SOON
        return [self._finding(step, self._first)] if self._broke else []

    def _breaks(self, first: float) -> bool:
        paid, kl = self._paid.values, self._kl.values
        if self._rows > SOON or min(len(paid), len(kl)) < SETTLED or median(kl) < FAR or max(paid) >= first:
            return False
        return first - median(paid) > max(WORSE * abs(first), PLAIN * noise_of(paid))

    def _stays(self, first: float) -> bool:
        return first - median(self._paid.values) > BACK * abs(first)

    def _finding(self, step: ClosedStep, first: float) -> Finding:
        paid, kl = median(self._paid.values), median(self._kl.values)
        return self.finding(
            step,
            "first_updates",
            Severity.CRITICAL,
            f"the first updates moved the policy {number(kl)} nats/token away from the reference, and the reward fell "
            f"from {number(first)} to {number(paid)}",
            onset=self._began,
            metric="reward/mean",
            score=kl / FAR,
            baseline=first,
            evidence=rounded({"kl": kl, "reward": paid, "first": first}),
        )
