"""KL to the reference: flat and heavy (a reset is due), or running away."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.company import Company
from rlwatch.metrics import Family
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Hold, Window, median, theil_sen

NOTABLE, HEAVY = 0.3, 1.0
"""Nats per token from which a rise is a drift, and from which it may be critical."""
FACTOR = 3.0
"""Factor over the run's own earlier level that is a drift."""
ESTABLISHED = 0.1
"""Nats per token below which the earlier level is just the beginning: any growth is a large factor."""
HUGE = 20.0
"""Nats per token no useful policy is away from its reference; a mean this high is numerical breakdown."""
TREND_ROWS = 60
FLAT = 0.15
"""Relative change over the trend window that counts as flat."""
JUMP = 0.5
"""Relative distance of the last rows from the trend window that makes them a jump: a robust trend overlooks it."""
HEAVY_SHARE = 0.5
"""Share of the loss from which the KL term rules the update."""


class KLReference(BaseDetector):
    """KL between policy and reference against its own earlier level; starts anew after a reset.

    Growth alone is how a policy learns; it is a drift when the run does not gain by it.
    """

    name: ClassVar[str] = "kl_reference"
    family: ClassVar[str] = Family.TRUST_REGION.value
    kinds: ClassVar[tuple[str, ...]] = ("kl_saturation", "kl_drift")
    reads: ClassVar[tuple[str, ...]] = ("policy/kl_ref", "policy/kl_ref_k3", "policy/kl_ref_k2", "policy/kl_ref_k1")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._company = Company()
        self._restart()

    def _restart(self) -> None:
        self._now = Window(rows=10, steps=10)
        self._past = Window(rows=120, steps=1000, least=8)
        self._risen = Hold(forgive=3)
        self._warned = Hold(forgive=2)
        self._confirmed = Hold(forgive=2)
        self._flat = Hold(forgive=2)

    def notice(self, event: Event) -> None:
        """Start anew after a reset: KL to the new reference begins at zero."""
        if event.kind == "reference_reset":
            self._restart()
            self._held = []

    def listen(self, step: ClosedStep) -> None:
        """Follow the corroborating metrics."""
        self._company.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge growth and flatness."""
        kl = abs(finite(step, *self.reads) or 0.0)
        self._now.update(step.step, kl)
        self._past.update(step.step, kl)
        now, before = self._now.get(), self._before()
        if now is None or before is None:
            return []
        reward = self._company.reward
        gained = reward.risen() and not reward.fallen()
        factor = now / max(before, 1e-9)
        self._risen.update(step.step, kl > max(1.5 * before, NOTABLE / 2.0))
        self._warned.update(step.step, now > NOTABLE and factor > FACTOR)
        lost = reward.fallen() and now > NOTABLE and factor > FACTOR
        runaway = now > HEAVY and before > ESTABLISHED and factor > FACTOR and not gained
        self._confirmed.update(step.step, lost or runaway or (now > HUGE and not gained))
        found = []
        if self._confirmed.lasted(8, 20) or self._warned.lasted(3):
            found.append(self._drift(step, now, before))
        saturation = self._saturation(step, now)
        if saturation is not None and not reward.fallen():  # never advise to anchor a policy that has lost its reward
            found.append(saturation)
        return found

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

    def _saturation(self, step: ClosedStep, now: float) -> Finding | None:
        rows = self._past
        if len(rows) < 20 or rows.at[-1] - rows.at[0] < 50 or now < NOTABLE:
            self._flat.update(step.step, False)
            return None
        at, values = rows.at[-TREND_ROWS::2], rows.values[-TREND_ROWS::2]
        change = theil_sen(at, values) * (at[-1] - at[0])
        jumped = abs(now - median(values)) > JUMP * now
        self._flat.update(step.step, abs(change) < FLAT * now and not jumped)
        if not self._flat.lasted(10):
            return None
        share = self._share(step, now)
        heavy = share is not None and share >= HEAVY_SHARE
        says = "" if share is None else f"; the KL term is {share:.0%} of the loss"
        return self.finding(
            step,
            "kl_saturation",
            Severity.WARNING if heavy else Severity.INFO,
            f"KL to the reference has been flat at {number(now)} nats/token{says}: a reference reset is due",
            onset=self._flat.since,
            metric="policy/kl_ref",
            score=now / NOTABLE,
            evidence=rounded({"kl": now, "change": change, "loss_share": share}),
        )

    def _share(self, step: ClosedStep, now: float) -> float | None:
        coefficient, loss = finite(step, "policy/kl_coef"), finite(step, "loss/policy")
        if coefficient is None or loss is None:
            return None
        term = abs(coefficient) * now
        return min(term / (term + abs(loss)), 1.0) if term > 0.0 else 0.0
