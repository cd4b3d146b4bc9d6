"""KL to the reference: flat at a height (a reset is due), or running away."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import finite, number, rounded
from rlwatch.detectors.kl_plateau import KLPlateau
from rlwatch.detectors.reward import MEDIAN_ERROR, noise_of
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, Window, median

NOTABLE, HEAVY = 0.3, 1.0
"""Nats per token from which a rise is a drift, and from which it may be critical."""
FACTOR = 3.0
"""Factor over the run's own earlier level that is a drift."""
ESTABLISHED = 0.1
"""Nats per token below which the earlier level is just the beginning: any growth is a large factor."""
SLOW_ROWS, SLOW_FACTOR = 50, 2.0
"""The slow look. Where batches are small the KL of a row strays over two decades: ten rows cannot tell a factor of
three from chance, fifty can tell one of two to three."""
SURE = 3.0
"""Standard errors, of the logarithm, that growth must exceed."""
NOTHING = 1e-3
"""Nats per token below which KL is nothing, whatever its logarithm."""
HUGE = 20.0
"""Nats per token no useful policy is away from its reference; a mean this high is numerical breakdown."""


class KLReference(KLPlateau):
    """KL between policy and reference against its own earlier level; starts anew after a reset.

    Growth alone is how a policy learns; it is a drift when the run does not gain by it. Up to a nat per token that the
    reward has risen by is a remark.
    """

    name: ClassVar[str] = "kl_reference"

    def _restart(self) -> None:
        super()._restart()
        self._slow = Window(rows=SLOW_ROWS, steps=2 * SLOW_ROWS, least=20)
        self._risen = Hold(forgive=3)
        self._warned = Hold(forgive=2)
        self._crept = Hold(forgive=2)
        self._confirmed = Hold(forgive=2)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge growth and flatness."""
        flat = super().judge(step)
        kl = abs(finite(step, *self.reads) or 0.0)
        self._slow.update(step.step, kl)
        now, before = self._now.get(), self._before(self._now)
        if now is None or before is None:
            return flat
        reward = self._company.reward
        gained = reward.risen() and not reward.fallen()
        grown = self._grown(self._now, FACTOR, now, before)
        self._risen.update(step.step, kl > max(1.5 * before, NOTABLE / 2.0))
        self._warned.update(step.step, now > NOTABLE and grown)
        lost = reward.fallen() and now > NOTABLE and now > FACTOR * before
        runaway = now > HEAVY and before > ESTABLISHED and grown and not gained
        self._confirmed.update(step.step, lost or runaway or (now > HUGE and not gained))
        if self._confirmed.lasted(8, 20) or self._warned.lasted(3):
            return [self._drift(step, now, before, paid=gained and now <= HEAVY), *flat]
        # What has grown is not flat, however straight the line through it.
        return self._creep(step, gained) or flat

    def _before(self, last: Window, rows: int = 5) -> float | None:
        """Level of the rows before the last ones, within the past window."""
        older = self._past.values[: -len(last)]
        return median(older) if len(older) >= rows else None

    def _grown(self, last: Window, factor: float, now: float, before: float) -> bool:
        """Whether the level of ``last`` is a multiple of the earlier one, beyond what noise of single rows explains."""
        if now <= factor * before:
            return False
        noise = noise_of([math.log(max(kl, NOTHING)) for kl in self._past.values])
        error = MEDIAN_ERROR * noise * math.sqrt(1.0 / len(last) + 1.0 / (len(self._past) - len(last)))
        return math.log(now / max(before, NOTHING)) > SURE * error

    def _creep(self, step: ClosedStep, gained: bool) -> list[Finding]:
        """Growth that the last rows alone do not show."""
        now, before = self._slow.get(), self._before(self._slow, self._slow.least)
        if now is None or before is None:
            return []
        heavy = now > HEAVY and before > ESTABLISHED and self._grown(self._slow, SLOW_FACTOR, now, before)
        self._crept.update(step.step, heavy and not gained)
        return [self._drift(step, now, before)] if self._crept.lasted(3) else []

    def _drift(self, step: ClosedStep, now: float, before: float, *, paid: bool = False) -> Finding:
        """``paid``: the reward has risen with it, and it is not heavy yet: a remark."""
        severity = Severity.INFO if paid else Severity.WARNING
        severity = Severity.CRITICAL if self._confirmed.lasted(8, 20) else severity
        return self.finding(
            step,
            "kl_drift",
            severity,
            f"KL to the reference grew from {number(before)} to {number(now)} nats/token{self._company.reward.say()}",
            onset=next((h.since for h in (self._risen, self._warned, self._crept) if h.since is not None), None),
            metric="policy/kl_ref",
            score=now / max(FACTOR * before, NOTABLE),
            baseline=before,
            evidence=rounded({"kl": now, "kl_before": before, "reward": self._company.reward.now}),
        )
