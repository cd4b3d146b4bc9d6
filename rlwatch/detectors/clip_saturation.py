"""Clip saturation: the trust region cuts a large part of the batch, more than it did at first."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import number, rounded
from rlwatch.detectors.rise import Limit, Rise, RiseDetector, odds
from rlwatch.records import ClosedStep, Finding, Severity

TOKENS = 0.1
"""Share of tokens a token-level loss may clip whatever it began with; GRPO clips 0.001 to 0.03 in healthy runs."""
SEQUENCES = 0.4
"""The same for a loss that clips whole responses: GSPO clips around 0.15 as a rule (arXiv 2507.18071)."""
DUAL = 0.02
"""The same for the dual clip, which only tokens more than three times as likely as before reach."""
FACTOR = 4.0
"""Times the odds at the start."""
WHOLE = ("ratio/seq_mean", "ratio/seq_ess", "ratio/seq_max")
"""Metrics only a loss has that takes one ratio a response."""


class ClipSaturation(RiseDetector):
    """Fractions clipped, against how the run began and what its loss usually clips.

    A loss that clips whole responses is told by the sequence ratios its taps record; without taps its own baseline
    must do.
    """

    name: ClassVar[str] = "clip_saturation"
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("ratio/clipfrac", TOKENS, FACTOR, odds),
        Limit("ratio/clipfrac_low", TOKENS, FACTOR, odds),
        Limit("ratio/clipfrac_high", TOKENS, FACTOR, odds),
        Limit("ratio/clipfrac_dual", DUAL, FACTOR, odds),
    )
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._whole = False

    def listen(self, step: ClosedStep) -> None:
        """Learn what is clipped: tokens or whole responses."""
        self._whole = self._whole or any(name in step.metrics for name in WHOLE)

    def floor(self, limit: Limit) -> float | None:
        """A loss that clips responses clips many."""
        return SEQUENCES if self._whole and limit.floor == TOKENS else None

    def told(self, step: ClosedStep, rise: Rise) -> Finding:
        """How much is clipped now, and was at first."""
        level, began = rise.level or 0.0, rise.began or 0.0
        share = began / (1.0 + began)
        return self.finding(
            step,
            "clip_saturation",
            Severity.WARNING,
            f"{level:.1%} of the {'responses' if self._whole else 'tokens'} are clipped ({rise.limit.metric}), "
            f"at the start {number(100.0 * share)}%: the policy moves further in an update than its trust region, "
            "and what is clipped teaches nothing",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=share,
            evidence=rounded({"clipped": level, "start": share, "odds_factor": rise.factor}),
        )
