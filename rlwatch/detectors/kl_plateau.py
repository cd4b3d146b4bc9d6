"""KL to the reference has gone flat at a height: the plateau that a reset of the reference is for (ProRL)."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.company import Company
from rlwatch.detectors.reset_vetoes import Vetoes
from rlwatch.detectors.validation import Validation
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Hold, Window, median, theil_sen

NOTABLE = 0.3
"""Nats per token below which flat is just small."""
HELD_OUT = 0.05
"""The same where held-out scores have stalled, which says that the KL term holds the policy however small it is."""
TREND_ROWS = 60
FLAT = 0.15
"""Relative change over the trend window that counts as flat."""
JUMP = 0.5
"""Relative distance of the last rows from the trend window that makes them a jump: a robust trend overlooks it."""
HEAVY_SHARE = 0.5
"""Share of the loss from which the KL term rules the update."""


class KLPlateau(BaseDetector):
    """The flat half of :class:`~rlwatch.detectors.kl_reference.KLReference`: level and slope of KL.

    Both flat: ``kl_saturation``; held-out scores stalled as well: ``reset_due``.

    ProRL (arXiv 2505.24864) resets when validation stagnates or degrades under a KL term that has come to dominate.
    Neither is said in a collapse (see :class:`Vetoes`), nor for some rows after one: a reset then saves nothing and
    makes the bad policy the anchor. While held-out scores still rise, no reset is due.
    """

    reads: ClassVar[tuple[str, ...]] = ("policy/kl_ref", "policy/kl_ref_k3", "policy/kl_ref_k2", "policy/kl_ref_k1")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._company = Company()
        self._validation = Validation()
        self._vetoes = Vetoes()
        self._restart()

    def _restart(self) -> None:
        self._now = Window(rows=10, steps=10)
        self._past = Window(rows=120, steps=1000, least=8)
        self._flat = Hold(forgive=2)
        self._stalled = Hold(forgive=2)

    def notice(self, event: Event) -> None:
        """Start anew after a reset: KL to the new reference begins at zero, and scores get their time."""
        if event.kind == "reference_reset":
            self._restart()
            self._validation = Validation()
            self._held = []

    def listen(self, step: ClosedStep) -> None:
        """Follow the corroborating metrics."""
        self._company.update(step)
        self._validation.update(step)
        self._vetoes.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge flatness, then what speaks against a reset."""
        kl = abs(finite(step, *self.reads) or 0.0)
        self._now.update(step.step, kl)
        self._past.update(step.step, kl)
        now = self._now.get()
        if now is None:
            return []
        stalls = now >= HELD_OUT and self._validation.stalls()
        change = self._change(now) if stalls or now >= NOTABLE else None
        flat = change is not None and abs(change) < FLAT * now
        self._flat.update(step.step, flat and now >= NOTABLE)
        self._stalled.update(step.step, flat and stalls)
        if not (self._flat.lasted(10) or self._stalled.lasted(10)) or self._vetoes.why(self._company):
            return []
        if self._stalled.lasted(10):
            return [self._due(step, now, change)]
        return [self._saturated(step, now, change)]

    def _change(self, now: float) -> float | None:
        """Change of KL over the trend window, nats; None where there are too few rows, or the last ones jumped."""
        rows = self._past
        if len(rows) < 20 or rows.at[-1] - rows.at[0] < 50:
            return None
        at, values = rows.at[-TREND_ROWS::2], rows.values[-TREND_ROWS::2]
        if abs(now - median(values)) > JUMP * now:
            return None
        return theil_sen(at, values) * (at[-1] - at[0])

    def _saturated(self, step: ClosedStep, now: float, change: float | None) -> Finding:
        share, rising = self._share(step, now), self._validation.rises()
        heavy = share is not None and share >= HEAVY_SHARE and not rising
        says = "" if share is None else f"; the KL term is {share:.0%} of the loss"
        due = ", but held-out scores still rise" if rising else ": a reference reset is due"
        return self.finding(
            step,
            "kl_saturation",
            Severity.WARNING if heavy else Severity.INFO,
            f"KL to the reference has been flat at {number(now)} nats/token{says}{due}",
            onset=self._flat.since,
            metric="policy/kl_ref",
            score=now / NOTABLE,
            evidence=rounded({"kl": now, "change": change, "loss_share": share}),
        )

    def _due(self, step: ClosedStep, now: float, change: float | None) -> Finding:
        validation, share = self._validation, self._share(step, now)
        best, score = validation.best or 0.0, validation.now or 0.0
        return self.finding(
            step,
            "reset_due",
            Severity.WARNING,
            f"held-out score stands at {number(score)}, {number(best - score)} below its best of step "
            f"{validation.best_step}, and no longer rises, while KL to the reference is flat at {number(now)} "
            "nats/token and nothing collapses: a reference reset is due",
            onset=self._stalled.since,
            metric="policy/kl_ref",
            score=now / HELD_OUT,
            evidence=rounded(
                {"kl": now, "change": change, "loss_share": share, "held_out": score, "held_out_best": best}
            ),
        )

    def _share(self, step: ClosedStep, now: float) -> float | None:
        coefficient, loss = finite(step, "policy/kl_coef"), finite(step, "loss/policy")
        if coefficient is None or loss is None:
            return None
        term = abs(coefficient) * now
        return min(term / (term + abs(loss)), 1.0) if term > 0.0 else 0.0
