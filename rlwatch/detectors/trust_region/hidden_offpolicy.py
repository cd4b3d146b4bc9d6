"""Detector of samples that are many optimizer updates old, while the age that limits them counts few policy
versions.
"""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, Window
from rlwatch.wording import number

UPDATES, VERSIONS = "staleness/updates", "staleness/mean"
FAR = 4.0
"""Mean number of optimizer updates between sampling and learning from which a warning is due."""
TIMES = 2.0
"""Least ratio of updates to versions for a finding; the ratio is 1 if each version is one update."""
ASYNC = 0.5
"""Mean age in versions from which samples are from an earlier policy at all; several updates on a fresh batch hide
nothing.
"""
ROWS, LASTING = 8, 3
"""Number of newest rows whose means are compared, and number of rows for which a finding's condition must hold."""


class HiddenOffPolicy(BaseDetector):
    """Detector of samples that are many optimizer updates old although their age in policy versions is small.

    A version may consist of several updates, and an age limit that counts versions then hides how far the policy has
    moved since sampling. Means over the newest rows are compared.
    """

    name: ClassVar[str] = "hidden_offpolicy"
    reads: ClassVar[tuple[str, ...]] = (UPDATES,)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((UPDATES, VERSIONS),)

    def __init__(self) -> None:
        super().__init__()
        self._updates = Window(rows=ROWS, steps=10**9)
        self._versions = Window(rows=ROWS, steps=10**9)
        self._far = Hold()

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Compare mean updates and mean versions since sampling over the newest rows that have both; return a finding,
        if any.
        """
        updates, versions = finite(step, UPDATES), finite(step, VERSIONS)
        if updates is None or versions is None:
            return []
        self._updates.update(step.step, updates)
        self._versions.update(step.step, versions)
        rows = len(self._updates.values)
        mean, age = sum(self._updates.values) / rows, sum(self._versions.values) / rows
        far = rows == ROWS and age >= ASYNC and mean >= max(FAR, TIMES * age)
        self._far.update(step.step, far)
        if not self._far.lasted(LASTING):
            return []
        return [
            self.finding(
                step,
                self.name,
                Severity.WARNING,
                f"samples are {number(age)} versions old, but {number(mean)} optimizer updates lie between rollout and "
                "update: each version is several updates, and those of a batch add up",
                onset=self._far.since,
                metric=UPDATES,
                score=mean / FAR,
                baseline=age,
                evidence=rounded({"updates": mean, "versions": age}),
            )
        ]
