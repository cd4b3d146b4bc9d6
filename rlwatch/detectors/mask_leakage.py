"""Tokens the environment wrote are counted by the loss."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.rise import Limit
from rlwatch.detectors.standing import Standing
from rlwatch.records import ClosedStep, Finding, Severity

LEAK = Limit("tokens/environment_leak", 1e-3, 0.0)
"""Share of the environment's tokens from which the mask is wrong; it should be exactly 0."""


class MaskLeakage(BaseDetector):
    """Share of tool and user tokens with mask 1. It has no healthy level, so no start to compare with."""

    name: ClassVar[str] = "mask_leakage"
    reads: ClassVar[tuple[str, ...]] = (LEAK.metric,)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((LEAK.metric,),)

    def __init__(self) -> None:
        super().__init__()
        self._leak = Standing(LEAK, rows=3)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the share of the last rows."""
        self._leak.update(step.step, finite(step, LEAK.metric))
        if not self._leak.lasted:
            return []
        level, share = self._leak.level or 0.0, finite(step, "tokens/environment_frac")
        of_all = "" if share is None else f" ({share:.0%} of all response tokens are theirs)"
        return [
            self.finding(
                step,
                "mask_leakage",
                Severity.WARNING,
                f"{level:.1%} of the tokens that tools or users wrote are counted by the loss{of_all}: the policy is "
                "trained to predict its environment",
                onset=self._leak.since,
                metric=LEAK.metric,
                score=self._leak.score,
                evidence=rounded({"leak": level, "environment": share}),
            )
        ]
