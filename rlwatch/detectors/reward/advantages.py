"""Detect that the spread of advantages shrinks to a small part of that at the run's beginning."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import rounded
from rlwatch.detectors.rise import MOST, Rise, RiseDetector, RiseLimit, inverse
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

TIMES = 3.0
"""Factor by which the spread must shrink. Advantages divided by a group's spread shrink like the root of the share of
groups that differ: a third means one group in nine.
"""
LEARNING = 5.0
"""Factor up to which the fall is an effect of learning, while the reward rises."""
SOLVED = 0.95
"""Mean reward on the common 0..1 scale from which hardly any group can differ."""
ROWS, STEPS = 5, 20
"""Rows and steps for which it must last: a batch of hard data is one row."""


class AdvantageCollapse(RiseDetector):
    """Detector of collapsed advantages: their standard deviation, or that of rewards within a group, is a small part of
    its start.

    It shrinks in every run that learns, so it is ``info`` while the reward rises with it, and if the task is solved.
    """

    name: ClassVar[str] = "advantage_collapse"
    follows_reward: ClassVar[bool] = True
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit("adv/std", MOST, TIMES, inverse, text="the standard deviation of the advantages"),
        RiseLimit(
            "reward/group_std", MOST, TIMES, inverse, text="the standard deviation of the rewards within a group"
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._small = Hold(forgive=2)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Return a finding once the spread of the advantages has stayed collapsed for enough rows."""
        found = super().judge(step)
        self._small.update(step.step, bool(found))
        return found if self._small.lasted(ROWS, STEPS) else []

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step``: the spread of the advantages now and at the start; ``rise``: its
        course so far.
        """
        times, reward = rise.factor or TIMES, self._reward.now
        solved = reward is not None and SOLVED <= reward <= 1.0
        paid = self._reward.risen() and not self._reward.fallen() and times < LEARNING
        start = 1.0 / rise.began if rise.began else 0.0
        return self.finding(
            step,
            "advantage_collapse",
            Severity.INFO if solved or paid else Severity.WARNING,
            f"{rise.limit.text} fell from {number(start)} to {number(rise.level or 0.0)}{self._reward.in_words()}",
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            baseline=start,
            evidence=rounded({"spread": rise.level, "start": start, "times": times, "reward": reward}),
        )
