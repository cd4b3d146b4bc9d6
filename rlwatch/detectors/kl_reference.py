"""KL to the reference: flat at a height (a reset is due), or running away."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import finite, number, rounded
from rlwatch.detectors.kl_plateau import KLPlateau
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, median

NOTABLE, HEAVY = 0.3, 1.0
"""Nats per token from which a rise is a drift, and from which it may be critical."""
FACTOR = 3.0
"""Factor over the run's own earlier level that is a drift."""
ESTABLISHED = 0.1
"""Nats per token below which the earlier level is just the beginning: any growth is a large factor."""
HUGE = 20.0
"""Nats per token no useful policy is away from its reference; a mean this high is numerical breakdown."""


class KLReference(KLPlateau):
    """KL between policy and reference against its own earlier level; starts anew after a reset.

    Growth alone is how a policy learns; it is a drift when the run does not gain by it.
    """

    name: ClassVar[str] = "kl_reference"
    kinds: ClassVar[tuple[str, ...]] = ("kl_saturation", "kl_drift", "reset_due")

    def _restart(self) -> None:
        super()._restart()
        self._risen = Hold(forgive=3)
        self._warned = Hold(forgive=2)
        self._confirmed = Hold(forgive=2)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge growth and flatness."""
        flat = super().judge(step)
        kl = abs(finite(step, *self.reads) or 0.0)
        now, before = self._now.get(), self._before()
        if now is None or before is None:
            return flat
        reward = self._company.reward
        gained = reward.risen() and not reward.fallen()
        factor = now / max(before, 1e-9)
        self._risen.update(step.step, kl > max(1.5 * before, NOTABLE / 2.0))
        self._warned.update(step.step, now > NOTABLE and factor > FACTOR)
        lost = reward.fallen() and now > NOTABLE and factor > FACTOR
        runaway = now > HEAVY and before > ESTABLISHED and factor > FACTOR and not gained
        self._confirmed.update(step.step, lost or runaway or (now > HUGE and not gained))
        if self._confirmed.lasted(8, 20) or self._warned.lasted(3):
            return [self._drift(step, now, before), *flat]
        return flat

    def _before(self) -> float | None:
        """Level of the rows before the last ones, within the past window."""
        older = self._past.values[: -len(self._now)]
        return median(older) if len(older) >= 5 else None

    def _drift(self, step: ClosedStep, now: float, before: float) -> Finding:
        severity = Severity.CRITICAL if self._confirmed.lasted(8, 20) else Severity.WARNING
        return self.finding(
            step,
            "kl_drift",
            severity,
            f"KL to the reference grew from {number(before)} to {number(now)} nats/token{self._company.reward.say()}",
            onset=self._risen.since if self._risen.since is not None else self._warned.since,
            metric="policy/kl_ref",
            score=now / max(FACTOR * before, NOTABLE),
            baseline=before,
            evidence=rounded({"kl": now, "kl_before": before, "reward": self._company.reward.now}),
        )
