"""Detect a reference that changed without an announcement, from KL, which must be continuous between resets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Window, mad, median
from rlwatch.wording import number

NOTHING = 1e-3
"""KL, nats per token, that two engines may have with equal weights: right after a reset of the reference KL is below
it.
"""
ESTABLISHED = 0.01
"""KL, nats per token, that a level must have before its loss is significant."""
FALLEN = 0.02
"""Share of KL's earlier level that is as good as zero: the reference was reset."""
STEADY = 0.3
"""Share of KL's level above which each row before a fall must lie: a KL that is near zero now and then is ignored."""
UNUSUAL = 6.0
"""Spreads of the rows, in log space, that a fall of KL must exceed to be more than they usually vary."""
LOW = 0.5
"""Share of KL's earlier level below which the rows after a fall must stay: one odd row is no reset."""
BELOW = 0.1
"""Share of KL's level that an estimate must be below zero to count as signed (k1), so that it may pass through zero."""
CONFIRM = 2
"""Rows after a fall that must confirm it, and rows after a resume that must lie high."""
JUMPED = 3.0
"""Factor over KL as extrapolated since the last reset beyond which KL after a resume shows that the reset was lost."""
EARLY = 5
"""Number of rows before a fall, or before a resume, whose KL gives the level at that time."""
TINY = 1e-12
"""Value that replaces a KL of zero before the logarithm."""
REPORT_ROWS = 10
"""Rows for which a finding is repeated."""


@dataclass(slots=True)
class _Resumed:
    """The first rows of an attempt, against the highest of the last rows before it since the reset (0: none yet).

    ``walked``: rows since the reset. KL grows with the square of the distance, so right after a reset a few rows
    multiply it. ``old_level``: KL to the old reference when the reset came, to which a lost reset returns. ``built``:
    rows it took to reach that level: a policy that was that far after ten rows is soon that far again.
    """

    level: float
    walked: int
    old_level: float | None
    built: int
    reason: str
    since: int
    rows: list[float] = field(default_factory=list)

    @property
    def least(self) -> float:
        """Return the KL from which a row shows the old reference."""
        growth = ((self.walked + CONFIRM) / max(self.walked - 1, 1)) ** 2
        soon = JUMPED * (self.walked + EARLY - 1) / max(self.built, 1) if self.walked < EARLY else 0.0
        return max(JUMPED * growth * self.level, max(LOW, soon) * (self.old_level or 0.0), ESTABLISHED)

    @property
    def jumped(self) -> bool:
        """Return whether every row lies at the KL to the old reference, far above the level before the resume."""
        if self.old_level is None and self.level == 0.0:
            return False
        return min(self.rows) > self.least


class ReferenceContinuity(BaseDetector):
    """Detector of unannounced changes of the reference: KL to the reference across resets and resumes.

    If KL falls to zero without a reset, the reference was captured anew, as some trainers do when they resume:
    ``silent_reference_reset``. If it jumps up at a resume that follows a reset, the reset was lost, because most
    trainers save no reference: ``lost_reference_reset``, the one finding that an uninterrupted run cannot have.
    """

    name: ClassVar[str] = "reference_continuity"
    reads: ClassVar[tuple[str, ...]] = ("policy/kl_ref_k3", "policy/kl_ref", "policy/kl_ref_k2", "policy/kl_ref_k1")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._metric: str | None = None
        self._attempt: int | None = None
        self._step = -1
        self._announced: int | None = None
        self._old_level: float | None = None
        self._built = 0
        self._not_restored = ""
        self._was_reset = False
        self._resumed: _Resumed | None = None
        self._signed = False
        self._reported: dict[str, tuple[Finding, int]] = {}
        self._begin()

    def _begin(self) -> None:
        self._rows = 0
        self._past = Window(rows=20, steps=400, least=5)
        self._fallen: list[int] = []
        self._level = 0.0

    def notice(self, event: Event) -> None:
        """Note an announced reset, which explains a fall of KL, and a reference that a resume could not restore."""
        if event.kind == "reference_reset":
            self._announced = self._step if event.step is None else event.step
            if self._fallen and self._fallen[0] >= self._announced:
                self._fallen = []
        elif event.kind == "reference_not_restored":
            self._not_restored = str(event.body.get("reason", "")) or "it could not be taken up again"

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if the run goes on and KL is above the level to which it falls at a reset; else
        return False.
        """
        values = rows.column(self._metric or "")
        waits = self._announced is not None or self._resumed is not None or self._fallen or self._reported
        if not values or waits or self._attempt != rows.rows[0].attempt or rows.steps[0] <= self._step:
            return False
        if min(values) <= NOTHING or 0.0 in rows.column("policy/kl_coef"):
            return False
        self._past.extend(rows.steps, values)
        self._rows, self._step = self._rows + len(values), rows.steps[-1]
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Follow KL to the reference policy; return findings of unannounced changes of it, each repeated for some
        rows.
        """
        kl = self._read(step)
        if kl is None:
            return []
        self._turn(step)
        lost, silent = self._lost(step, kl), self._silent(step, kl)
        if not self._fallen:
            self._past.update(step.step, kl)
            self._rows += 1
        self._step, self._attempt = step.step, step.attempt
        self._reported = {kind: (finding, left - 1) for kind, (finding, left) in self._reported.items() if left > 1}
        self._reported |= {found.kind: (found, REPORT_ROWS) for found in (lost, silent) if found is not None}
        self._held = [finding for finding, _ in self._reported.values()]
        return self._carried(step)

    def _read(self, step: ClosedStep) -> float | None:
        """Return KL by the first metric that was seen: another estimator has another level."""
        if finite(step, "policy/kl_coef") == 0.0:
            return None  # without a KL term some trainers report 0
        self._metric = self._metric or next((name for name in self.reads if finite(step, name) is not None), None)
        value = None if self._metric is None else finite(step, self._metric)
        if value is not None and value < -max(BELOW * (self._past.get() or 0.0), NOTHING):
            self._signed = True
        return None if value is None else abs(value)

    def _turn(self, step: ClosedStep) -> None:
        """Apply an announced reset, a new attempt, or steps that go back."""
        if self._announced is not None and step.step > self._announced:
            self._old_level, self._built, self._was_reset, self._announced = self._recent(), self._rows, True, None
            self._begin()
        if step.step <= self._step or (self._attempt is not None and step.attempt != self._attempt):
            highest = max(self._past.values[-EARLY:], default=0.0)
            self._fallen = [at for at in self._fallen if at < step.step]
            known = _Resumed(highest, len(self._past), self._old_level, self._built, self._not_restored, step.step)
            self._resumed = known if self._was_reset else None
            self._not_restored = ""

    def _recent(self) -> float | None:
        """Return KL right now, for a run in which it may be growing."""
        rows = self._past.values[-EARLY:]
        return median(rows) if rows else None

    def _silent(self, step: ClosedStep, kl: float) -> Finding | None:
        """Report a fall once the rows after it confirm it; an estimate that crosses zero has no falls."""
        if self._signed:
            self._fallen = []
            return None
        if not self._fallen and not self._fell(kl):
            return None
        if not self._fallen:
            self._level = self._past.get() or 0.0
        if kl > LOW * self._level:
            self._fallen = []
            return None
        self._fallen.append(step.step)
        if len(self._fallen) <= CONFIRM:
            return None
        onset, level = self._fallen[0], self._level
        self._begin()
        return self.finding(
            step,
            "silent_reference_reset",
            Severity.WARNING,
            f"KL to the reference fell from {number(level)} nats/token to nothing at step {onset}, and no reset was "
            "recorded: something made the policy its own reference",
            onset=onset,
            metric=self._metric or "",
            score=level / max(kl, FALLEN * level),
            baseline=level,
            evidence=rounded({"kl_before": level, "kl": kl}),
        )

    def _fell(self, kl: float) -> bool:
        level = self._past.get()
        if level is None or level < ESTABLISHED or kl > min(NOTHING, FALLEN * level):
            return False
        rows = self._past.values
        logs = [math.log(max(value, TINY)) for value in rows]
        fall = median(logs) - math.log(max(kl, TINY))
        return min(rows[-EARLY:]) > STEADY * level and fall > UNUSUAL * max(mad(logs), 0.3)

    def _lost(self, step: ClosedStep, kl: float) -> Finding | None:
        """Report a jump at the second row after the resume, or at once where the trainer gave a reason."""
        resumed = self._resumed
        if resumed is None:
            return None
        resumed.rows.append(kl)
        if resumed.reason or not resumed.jumped or len(resumed.rows) >= CONFIRM:
            self._resumed = None
        if not (resumed.reason or (resumed.jumped and len(resumed.rows) >= CONFIRM)):
            return None
        level, now = resumed.level, min(resumed.rows)
        words = resumed.reason or f"KL jumped from {number(level)} to {number(now)} nats/token"
        return self.finding(
            step,
            "lost_reference_reset",
            Severity.WARNING,
            f"the reset of the reference was lost when the run was resumed: {words}",
            onset=resumed.since,
            metric=self._metric or "",
            score=now / resumed.least if level > 0.0 else None,
            baseline=level,
            evidence=rounded({"kl_before": level, "kl": now, "kl_before_reset": resumed.old_level}),
        )
