"""Detect a reward that has been flat for long, well below what it can reach, while the run continues."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import STILL, BaseDetector, SeriesHistory, rounded
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

LONG = 150
"""Steps without a gain that are long for any run: learning has pauses."""
PART = 0.5
"""Share of the run so far in which nothing was gained."""
ROWS = 10
"""Rows for which that must hold."""


class Plateau(BaseDetector):
    """Detector of a plateau: the last half of the run, at least ``LONG`` steps, gained next to nothing.

    It is ``info``, not a failure. The bound is certain: noise large enough to hide a gain is not reported. Other
    detectors report the cause, if there is one. A reward near its maximum is not reported.
    """

    name: ClassVar[str] = "plateau"
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("reward/mean",),)

    def __init__(self) -> None:
        super().__init__()
        self._reward = SeriesHistory()
        self._start: int | None = None
        self._flat = Hold(forgive=2)

    def notice(self, event: Event) -> None:
        """Start anew if the run continues from a checkpoint."""
        if event.kind in ("resume", "rollback"):
            self._reward, self._start = SeriesHistory(), None

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the gain of reward over the last half of the run; return the plateau, if there is one."""
        value = step.numbers["reward/mean"]
        self._start = step.step if self._start is None else min(self._start, step.step)
        self._reward.update(step.step, value)
        since = step.step - max(PART * (step.step - self._start), LONG)
        gained = self._reward.gained(since) if since > self._start and self._reward.room else None
        self._flat.update(step.step, gained is not None and gained[0] > -STILL and gained[1] < STILL)
        if gained is None or not self._flat.lasted(ROWS):
            return []
        level, steps = self._reward.level, step.step - int(since)
        return [
            self.finding(
                step,
                "plateau",
                Severity.INFO,
                f"the reward has stood at {number(level)} for {steps} steps: it gained "
                f"{max(gained[1], 0.0):.0%} of its range at most",
                onset=int(since),
                metric="reward/mean",
                evidence=rounded({"reward": level, "steps": steps, "gained": gained[1]}),
            )
        ]
