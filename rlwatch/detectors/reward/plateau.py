"""The reward has stood still for long, well below what it can reach, and the budget goes on."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.standing import STILL, SeriesHistory
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

LONG = 150
"""Steps without a gain that are long whatever the run did before: learning has pauses."""
PART = 0.5
"""Of the run so far that must have brought nothing."""
ROWS = 10
"""Rows for which that must hold."""


class Plateau(BaseDetector):
    """A remark and no failure: the last half of the run, ``LONG`` steps at least, certainly gained next to nothing.

    Certainly, as noise that could hide a gain is none. What went wrong, if anything did, is for others to say, and a
    reward near what it can reach is nothing to be told of.
    """

    name: ClassVar[str] = "plateau"
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("reward/mean",),)

    def __init__(self) -> None:
        super().__init__()
        self._reward = SeriesHistory()
        self._start: int | None = None
        self._stands = Hold(forgive=2)

    def notice(self, event: Event) -> None:
        """A run that goes on from a checkpoint begins to count anew."""
        if event.kind in ("resume", "rollback"):
            self._reward, self._start = SeriesHistory(), None

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge what the last half of the run brought."""
        value = finite(step, *self.reads)
        if value is None:
            return []
        self._start = step.step if self._start is None else min(self._start, step.step)
        self._reward.update(step.step, value)
        since = step.step - max(PART * (step.step - self._start), LONG)
        gained = self._reward.gained(since) if since > self._start and self._reward.room else None
        self._stands.update(step.step, gained is not None and gained[0] > -STILL and gained[1] < STILL)
        if gained is None or not self._stands.lasted(ROWS):
            return []
        return [
            self.finding(
                step,
                "plateau",
                Severity.INFO,
                f"the reward has stood at {number(self._reward.level)} for {step.step - int(since)} steps: it gained "
                f"{max(gained[1], 0.0):.0%} of its range at most",
                onset=int(since),
                metric="reward/mean",
                evidence=rounded({"reward": self._reward.level, "steps": step.step - int(since), "gained": gained[1]}),
            )
        ]
