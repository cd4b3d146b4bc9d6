"""A degenerate batch: every response equally long, at the limit, and rewarded alike."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.company import silent_share
from rlwatch.detectors.reward import RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold

ALIKE = 1e-6
"""Spread of lengths, relative to the mean, that is none."""
ALL = 0.999
"""Share of responses cut, or of groups that agree, that is all."""

SOON, LATER = 5, 10
"""Rows it must last where the reward has fallen, and where it has not: batches of two responses are often alike."""
FIRST = 3
"""Rows at the start that may be otherwise in a run that was always like this."""


class DegenerateBatch(BaseDetector):
    """Shortest, mean and longest response are one, all are cut, and no reward differs: NaN sampling looks like this.

    Agent-R1's log of it: lengths 257/257/257, clip ratio 1, score -1. Needs no text: lengths and rewards are logged
    by every trainer. Small batches of hard prompts look like it for some rows, so it must last; critical where the
    reward has fallen too.
    """

    name: ClassVar[str] = "degenerate_batch"
    reads: ClassVar[tuple[str, ...]] = ("len/min",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        ("len/min", "len/mean", "len/max", "len/clipped", *said)
        for said in (("reward/std",), ("reward/zero_std_frac",), ("adv/min", "adv/max"))
    )

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._holds = Hold(forgive=1)
        self._rows = 0
        self._length = 0.0

    def listen(self, step: ClosedStep) -> None:
        """Follow the reward."""
        self._reward.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the row, and how many there have been."""
        low, mean, high = (finite(step, f"len/{what}") for what in ("min", "mean", "max"))
        clipped, silent = finite(step, "len/clipped"), silent_share(step)
        if low is None or mean is None or high is None or clipped is None or silent is None:
            return []
        self._rows += 1
        same = max(high - low, abs(mean - high)) <= ALIKE * max(high, 1.0)
        if high != self._length:
            # A limit that depends on the prompt: one prompt a batch, whose responses are often alike.
            self._holds.clear()
        self._length = high
        self._holds.update(step.step, same and clipped >= ALL and silent >= ALL)
        fallen = self._reward.fallen()
        if not self._holds.lasted(SOON if fallen else LATER, SOON):
            return []
        return [self._finding(step, high, self._severity(fallen))]

    def _severity(self, fallen: bool) -> Severity:
        """A run that began like this, and has not fallen, has a setting too small: nothing broke."""
        if fallen:
            return Severity.CRITICAL
        return Severity.INFO if self._holds.rows >= self._rows - FIRST else Severity.WARNING

    def _finding(self, step: ClosedStep, length: float, severity: Severity) -> Finding:
        return self.finding(
            step,
            "degenerate_batch",
            severity,
            f"all responses are exactly {number(length)} tokens long, all cut at the limit, and all rewarded alike"
            f"{self._reward.say()}: there is nothing to learn from, and sampling from NaN looks like this",
            onset=self._holds.since,
            metric="len/min",
            score=float(self._holds.rows),
            evidence=rounded({"length": length, "reward": self._reward.now, "rows": self._holds.rows}),
        )
