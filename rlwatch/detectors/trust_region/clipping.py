"""Detect clip fractions that are saturated, so that much of the batch has no gradient, or that carry no information."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.rise import Rise, RiseDetector, RiseLimit, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number

TOKENS = 0.1
"""Share of tokens up to which clipping is normal for a token-level loss; GRPO clips 0.001 to 0.03 in healthy runs."""
SEQUENCES = 0.4
"""Share up to which clipping is normal for a loss that clips whole responses: GSPO clips around 0.15 as a rule (arXiv
2507.18071).
"""
DUAL = 0.02
"""Share up to which the dual clip is normal, which affects only tokens more than three times as likely as before."""
FACTOR = 4.0
"""Factor over the odds of being clipped at the start."""
WHOLE = ("ratio/seq_mean", "ratio/seq_ess", "ratio/seq_max")
"""Metrics of losses that take one ratio per response."""


class ClipSaturation(RiseDetector):
    """Detector of saturated clipping: clip fractions compared with how the run began and with what its loss usually
    clips.

    A loss that clips whole responses is recognised by the sequence ratios that rlwatch records from the trainer's
    tensors. Without these the run's own baseline is used.
    """

    name: ClassVar[str] = "clip_saturation"
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit("ratio/clipfrac", TOKENS, FACTOR, odds),
        RiseLimit("ratio/clipfrac_low", TOKENS, FACTOR, odds),
        RiseLimit("ratio/clipfrac_high", TOKENS, FACTOR, odds),
        RiseLimit("ratio/clipfrac_dual", DUAL, FACTOR, odds),
    )

    def __init__(self) -> None:
        super().__init__()
        self._whole = False

    def listen(self, step: ClosedStep) -> None:
        """Note from the row ``step`` whether the loss clips tokens or whole responses."""
        self._whole = self._whole or any(name in step.metrics for name in WHOLE)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if the loss clips tokens and all clip fractions are below their limits; else return
        False.
        """
        if self._whole or not rows.metrics.isdisjoint(WHOLE):
            return False
        return self.buffered(rows.steps, [rows.column(limit.metric) for limit in self.limits])

    def floor(self, limit: RiseLimit) -> float | None:
        """Return the lowest clip fraction to report if the loss clips whole responses, which are many; else None.

        ``limit``: the limit of the metric, whose own floor is for a loss that clips tokens.
        """
        return SEQUENCES if self._whole and limit.floor == TOKENS else None

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step``: the share clipped now and at the start; ``rise``: the course of the
        fraction.
        """
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


# A clip fraction without information: exactly zero, whatever happens.

FAR_ROWS = 20
"""Rows with far ratios and nothing clipped from which that is no accident."""
ROWS = 50
"""Rows with nothing clipped at all from which the metric carries no information, wherever ratios are."""
STILL = 1e-4
"""Nats that a log-ratio may differ from 0 by rounding, if every batch is used for one update."""

Indicator = tuple[str, Callable[[float], bool]]
FAR: dict[str, tuple[Indicator, ...]] = {
    "ratio/clipfrac": (
        ("ratio/log_absmax", lambda x: x >= 0.5),
        ("ratio/max", lambda r: r >= 1.6),
        ("ratio/min", lambda r: r <= 0.6),
        ("policy/kl_old", lambda k: abs(k) >= 0.01),
    ),
    "ratio/clipfrac_low": (("ratio/min", lambda r: r <= 0.6),),
    "ratio/clipfrac_high": (("ratio/max", lambda r: r >= 1.6),),
    "ratio/clipfrac_dual": (("ratio/max", lambda r: r >= 10.0),),
}
"""For each clip fraction, the metrics that show tokens beyond the widest usual bounds (0.4, dual 3)."""
PLAIN = ("ratio/clipfrac", "ratio/clipfrac_low", "ratio/clipfrac_high")
"""Clip fractions whose lasting zero needs no confirmation; for the dual clip zero is the rule."""


class ClipBlind(BaseDetector):
    """Detector of clip fractions that carry no information, so that their zero is not taken for health.

    Some losses do not define it (SAPO always logs 0, GSPO and CISPO have no dual clip), and with one update per rollout
    the ratio is 1 by construction. A public run collapsed with a clip fraction of exactly 0 throughout.
    """

    name: ClassVar[str] = "clip_blind"
    reads: ClassVar[tuple[str, ...]] = tuple(FAR)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((metric,) for metric in FAR)

    def __init__(self) -> None:
        super().__init__()
        self._zero = dict.fromkeys(FAR, 0)
        self._far = dict.fromkeys(FAR, 0)
        self._since: dict[str, int] = {}
        self._works: set[str] = set()
        self._largest: float | None = None

    def listen(self, step: ClosedStep) -> None:
        """Remember from the row ``step`` how far importance ratios are from 1 at all."""
        far = finite(step, "ratio/log_absmax")
        if far is not None:
            self._largest = max(abs(far), self._largest or 0.0)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if each of their clip fractions has been above 0 before; otherwise return False.

        Such a fraction works, so that it is not watched any more.
        """
        if not self._works.issuperset(FAR.keys() & rows.metrics) or any(self._zero.values()):
            return False
        if far := rows.column("ratio/log_absmax"):
            self._largest = max(*map(abs, far), self._largest or 0.0)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Count rows with a clip fraction of 0; return a finding for fractions without information."""
        for metric in FAR:
            self._count(step, metric)
        contradicted = [metric for metric in FAR if self._far[metric] >= FAR_ROWS]
        if contradicted:
            return [self._finding(step, contradicted, self._although(step, contradicted[0]))]
        constant = [metric for metric in PLAIN if self._zero[metric] >= ROWS]
        if constant and not self._works & set(PLAIN):
            return [self._finding(step, constant, self._because())]
        return []

    def _count(self, step: ClosedStep, metric: str) -> None:
        value = step.numbers.get(metric)
        if value is None or metric in self._works:
            return
        if value != 0.0:
            self._works.add(metric)
            self._zero[metric] = self._far[metric] = 0
            return
        self._since.setdefault(metric, step.step)
        self._zero[metric] = min(self._zero[metric] + 1, ROWS)
        if any(beyond(seen) for name, beyond in FAR[metric] if (seen := finite(step, name)) is not None):
            self._far[metric] = min(self._far[metric] + 1, FAR_ROWS)

    def _although(self, step: ClosedStep, metric: str) -> str:
        seen = [f"{name} {number(value)}" for name, _ in FAR[metric] if (value := finite(step, name)) is not None]
        return (
            f"although ratios move{f' ({seen[0]})' if seen else ''}: this loss does not define it (SAPO; the dual clip "
            "of GSPO and CISPO), or its bounds are out of reach"
        )

    def _because(self) -> str:
        if self._largest is not None and self._largest <= STILL:
            return "because every batch is used for one update, so that ratios are 1"
        return "as it must be with one update a rollout, or with a loss that does not define it"

    def _finding(self, step: ClosedStep, blind: Sequence[str], why: str) -> Finding:
        return self.finding(
            step,
            "clip_uninformative",
            Severity.INFO,
            f"{' and '.join(blind)} {'has' if len(blind) == 1 else 'have'} been exactly 0 at every row, {why}; that is "
            "no sign of health: look at ratios and at the mismatch of raw log-probs instead",
            onset=self._since.get(blind[0]),
            metric=blind[0],
            evidence=rounded({"log_ratio_largest": self._largest, "rows": self._zero[blind[0]]}),
        )
