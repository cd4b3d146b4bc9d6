"""Samples that are many optimizer updates old, while the age that bounds them counts few versions."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, Window
from rlwatch.wording import number

UPDATES, VERSIONS = "staleness/updates", "staleness/mean"
FAR = 4.0
"""Updates between rollout and update from which it is worth a warning."""
TIMES = 2.0
"""Updates over versions: 1 where each version is one update."""
ASYNC = 0.5
"""Versions from which samples are from an earlier policy at all; several updates of one fresh batch hide nothing."""
ROWS, LASTING = 8, 3
"""Rows whose means are compared, several batches; and rows in which they must be far."""


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
