"""Detect that every optimizer step is skipped: training goes on and the weights no longer change."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold

ALL = 0.999
"""Share of skipped optimizer steps in a row that counts as all of them."""
POLICY = ("policy/entropy", "policy/logp_mean")
"""Metrics of the policy that are finite only while its weights are."""
SOON, LONG = 4, 20
"""Consecutive steps without an update for a warning, and for critical. A float16 scaler skips about ten at first."""


class SilentFreeze(BaseDetector):
    """Detector of optimizer steps that are all skipped because the gradient is not finite.

    Trainers skip silently (verl, and every loss scaler); once the weights are NaN every gradient is, so every step is
    skipped. If skipped steps are not counted, another sign is equivalent: the gradient norm is non-finite row after row
    while the policy's own metrics stay finite. An update with such a gradient would have broken them.
    """

    name: ClassVar[str] = "silent_freeze"
    reads: ClassVar[tuple[str, ...]] = ("optim/step_skipped", "optim/grad_norm")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("optim/step_skipped",),
        *(("optim/grad_norm", name) for name in POLICY),
    )

    def __init__(self) -> None:
        super().__init__()
        self._skips = Hold()

    def measured(self, step: ClosedStep) -> bool:
        """Return True if the row shows whether an update was made or skipped."""
        return any(name in step.metrics for name in self.reads)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if each has an optimizer step that was not skipped; otherwise return False."""
        if self._skips.since is not None or max(rows.column("optim/step_skipped"), default=0.0) >= ALL:
            return False
        self._skips.miss(rows.steps)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Count rows without an optimizer step that changes the weights; return a finding once there are enough."""
        skipped = self._skipped(step)
        if skipped is None:
            return []
        self._skips.update(step.step, skipped)
        if not self._skips.lasted(3, SOON):
            return []
        severity = Severity.CRITICAL if self._skips.lasted(3, LONG) else Severity.WARNING
        since = self._skips.since
        counted = "optim/step_skipped" in step.metrics
        how = "was skipped" if counted else "must have been skipped (its gradient is not finite, the policy still is)"
        return [
            self.finding(
                step,
                "silent_freeze",
                severity,
                f"every optimizer step since step {since} {how}: the weights no longer change",
                onset=since,
                metric="optim/step_skipped" if counted else "optim/grad_norm",
                score=self._skips.get() / SOON,
                evidence=rounded({"steps": self._skips.get(), "rows": self._skips.rows}) | {"counted": counted},
            )
        ]

    def _skipped(self, step: ClosedStep) -> bool | None:
        """Return whether all updates of the row were skipped; None if unknown."""
        share = step.metrics.get("optim/step_skipped")
        if share is not None and math.isfinite(share):
            return share >= ALL
        norm = step.metrics.get("optim/grad_norm")
        if norm is None:
            return None
        alive = any(name in step.metrics and math.isfinite(step.metrics[name]) for name in POLICY)
        return not math.isfinite(norm) and alive
