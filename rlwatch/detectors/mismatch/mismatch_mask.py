"""Detect that a mask of mismatched tokens catches fewer although the gap widens: no sign of health (KPop, 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window
from rlwatch.wording import number

GAPS = (
    "mismatch/logp_absdiff",
    "mismatch/log_ppl_absdiff",
    "mismatch/k3",
    "mismatch/prob_absdiff",
)
"""Metrics of the size of the difference, which cannot cancel like the plain estimate of KL; the first one logged is
used.
"""


class FirstGap:
    """Reader of the size of the gap between trainer and rollout engine, by one metric in all rows, so that levels
    compare.

    ``name``: the metric, the first of ``GAPS`` that was measured; empty before that.
    """

    def __init__(self) -> None:
        self.name = ""

    def read(self, step: ClosedStep) -> float | None:
        """Return the size of the gap between trainer and rollout engine in the row ``step``; None if it was not
        measured.
        """
        if not self.name:
            self.name = next((name for name in GAPS if finite(step, name) is not None), "")
        value = finite(step, self.name) if self.name else None
        return None if value is None else abs(value)


MASKS = ("mismatch/icepop_masked", "mismatch/tis_truncated", "mismatch/is_zero")
"""Metrics of the share of tokens masked or cut for their weight."""
LEAST = 1e-4
"""Share of masked tokens below which its fall is noise; IcePop masks 1 to 2 tokens in 1000."""
FEWER = 0.6
"""Factor on the share of masked tokens at or below which it has fallen."""
WIDER = 1.25
"""Factor on the gap, in the same time, from which it has widened."""
ODD = 2
"""Rows of a window left out at either end: batches that are odd as a whole come singly and distort a mean."""


@dataclass(frozen=True, slots=True)
class Then:
    """Levels of an earlier stretch of rows: share of masked tokens, gap, and step."""

    masked: float
    gap: float
    step: int


class _Mask:
    """Course of the share of tokens that one correction masks, and of the gap to the rollout engine.

    The last rows are compared with the start, and with the rows in which the correction masked most.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._base = Baseline()
        self._gap_base = Baseline()
        self._now = Window(rows=20, steps=20, least=5)
        self._gap = Window(rows=20, steps=20, least=5)
        self._first: int | None = None
        self._most: Then | None = None
        self.hold = Hold(forgive=2)

    def update(self, step: int, masked: float, gap: float) -> None:
        for part in (self._base, self._now):
            part.update(step, masked)
        for part in (self._gap_base, self._gap):
            part.update(step, gap)
        self._first = step if self._first is None else self._first
        now, wide = self._level(), self._gap.get()
        if now is not None and wide is not None and (self._most is None or now > self._most.masked):
            self._most = Then(now, wide, step)
        self.hold.update(step, self.since() is not None)

    @property
    def now(self) -> tuple[float, float]:
        return self._level() or 0.0, self._gap.get() or 0.0

    def _level(self) -> float | None:
        """Return the mean share of the window without its odd rows: most rows of a rare event are 0."""
        kept = sorted(self._now.values)[ODD:-ODD]
        return sum(kept) / len(kept) if kept else None

    def since(self) -> Then | None:
        """Return the stretch against which fewer tokens are caught across a wider gap."""
        start, wide = self._base.get(), self._gap_base.get()
        if start is None or wide is None or self._first is None or self._level() is None:
            return None
        masked, gap = self.now
        for then in (Then(start, wide, self._first), self._most):
            if then is not None and then.masked >= LEAST and masked <= FEWER * then.masked and gap >= WIDER * then.gap:
                return then
        return None


class MismatchMask(BaseDetector):
    """Detector of a mask (IcePop) or truncation (TIS) that catches fewer tokens although trainer and engine differ
    more.

    As both policies sharpen, ratios leave the band less often while probabilities drift further apart: the mask misses
    a mismatch that grows. The share may rise first, so its highest level counts as a start, too.
    """

    name: ClassVar[str] = "mismatch_mask"
    reads: ClassVar[tuple[str, ...]] = MASKS
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((mask, gap) for mask in MASKS for gap in GAPS)

    def __init__(self) -> None:
        super().__init__()
        self._gap = FirstGap()
        self._masks = [_Mask(name) for name in MASKS]

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Return a finding for the first correction that masks or cuts fewer tokens although the gap to the engine has
        widened.

        The gap is that between the log-probs of trainer and rollout engine in the row ``step`` and those before.
        """
        gap = self._gap.read(step)
        for mask in self._masks:
            masked = finite(step, mask.name)
            if masked is not None and gap is not None:
                mask.update(step.step, masked, gap)
        blind = ((mask, mask.since()) for mask in self._masks if mask.hold.lasted(5))
        return [self._finding(step, mask, then) for mask, then in blind if then is not None][:1]

    def _finding(self, step: ClosedStep, mask: _Mask, then: Then) -> Finding:
        masked, gap = mask.now
        return self.finding(
            step,
            "mismatch_mask",
            Severity.WARNING,
            f"the mask catches fewer tokens while the gap widens: {mask.name} fell from {number(then.masked)} to "
            f"{number(masked)} since step {then.step}, {self._gap.name} rose from {number(then.gap)} to {number(gap)}; "
            "a falling mask rate is no health here",
            onset=mask.hold.since,
            metric=mask.name,
            score=gap / max(WIDER * then.gap, 1e-12),
            baseline=then.masked,
            evidence=rounded({"masked": masked, "masked_then": then.masked, "gap": gap, "gap_then": then.gap}),
        )
