"""The step counter stands still: steps repeat or go back, or each takes many times the usual."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Baseline, Hold

SLOW = 15.0
"""Times the usual seconds per step: no evaluation and no long batch does that several rows on end."""
SLOW_ROWS = 3
"""Rows on end of it."""
REPEATS = 5
"""Rows on end without a new step, which no resume announced."""
RECORDS, USUAL_RECORDS = "rlwatch/records", "rlwatch/records_usual"
"""Records since the last new step, and the most an earlier step had: the monitor counts them."""
MANY, FIRST_MANY = 50, 1000
"""Records without a new step below which each micro-batch or rank may send its own; the same before any is known."""
TIMES = 10.0
"""Times the most an earlier step had."""


class StalledSteps(BaseDetector):
    """Rows without a new step, and seconds per step (the trainer's, else from the clock of the records).

    A run that sends nothing at all is for whoever watches the store (``run_silent``). A warning, not more: it may be
    only the counter that is broken.
    """

    name: ClassVar[str] = "stalled_steps"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((),)
    reads: ClassVar[tuple[str, ...]] = ("time/step",)

    def __init__(self) -> None:
        super().__init__()
        self._before: ClosedStep | None = None
        self._repeats = 0
        self._usual = Baseline()
        self._slow = Hold()

    def notice(self, event: Event) -> None:
        """After a resume steps go back, and time has passed."""
        if event.kind in ("resume", "rollback"):
            self._before = None
            self._begin()

    def _begin(self) -> None:
        self._repeats = 0
        self._slow.clear()

    def measured(self, step: ClosedStep) -> bool:  # noqa: ARG002
        """Every row tells which step it is."""
        return True

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Records that come and come while no step closes: nothing else would be told of them."""
        records = finite(step, RECORDS)
        if records is None:
            return []
        usual = finite(step, USUAL_RECORDS)
        limit = FIRST_MANY if usual is None else max(MANY, TIMES * usual)
        if records < limit:
            return []
        return [
            self.finding(
                step,
                "stalled_steps",
                Severity.WARNING,
                f"{records:.0f} records without a new step, where a step had at most {number(usual or 0.0)}: the step "
                "counter stands still or went back",
                score=records / limit,
                evidence=rounded({"records": records, "usual": usual}),
            )
        ]

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the counter, then the clock."""
        before, self._before = self._before, step
        if before is not None and before.attempt != step.attempt:
            self._begin()
            before = None
        if before is not None and step.step <= before.step:
            self._repeats += 1
            self._slow.clear()
            return [self._stands(step)] if self._repeats >= REPEATS else []
        self._repeats = 0
        return self._timed(step, before)

    def _timed(self, step: ClosedStep, before: ClosedStep | None) -> list[Finding]:
        seconds = finite(step, "time/step") or _between(before, step)
        if seconds is None or seconds <= 0.0:
            return []
        usual = self._usual.get()
        slow = usual is not None and seconds > SLOW * usual
        if not slow:
            self._usual.update(step.step, seconds)
        self._slow.update(step.step, slow)
        return [self._crawls(step, seconds, usual or 0.0)] if self._slow.lasted(SLOW_ROWS) else []

    def _stands(self, step: ClosedStep) -> Finding:
        return self.finding(
            step,
            "stalled_steps",
            Severity.WARNING,
            f"{self._repeats} rows on end without a new step: the step counter stands still or goes back",
            score=self._repeats / REPEATS,
            evidence=rounded({"rows": self._repeats}),
        )

    def _crawls(self, step: ClosedStep, seconds: float, usual: float) -> Finding:
        return self.finding(
            step,
            "stalled_steps",
            Severity.WARNING,
            f"a step takes {number(seconds)} s, usually {number(usual)} s: the run hardly moves",
            onset=self._slow.since,
            metric="time/step",
            score=seconds / (SLOW * usual) if usual > 0.0 else None,
            baseline=usual,
            evidence=rounded({"seconds": seconds, "usual": usual}),
        )


def _between(before: ClosedStep | None, step: ClosedStep) -> float | None:
    """Seconds per step by the clock of the records; None where they have none."""
    if before is None or before.ts <= 0.0 or step.ts <= before.ts:
        return None
    return (step.ts - before.ts) / (step.step - before.step)
