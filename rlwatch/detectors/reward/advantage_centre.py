"""Detect advantages that are no longer centred: their mean was exactly 0 and is not any more."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number

STEPS, ROWS = 20, 5
"""First steps, and least rows among them with responses of several lengths, in which the mean must be 0 for the run to
count as one that centres its advantages."""
ZERO = 1e-3
"""Largest |mean| over the standard deviation that counts as 0: rounding in logs. Float32 leaves 1e-8."""
OFF = 0.1
"""Least |mean| over the standard deviation that counts as off the centre."""
NEWEST, LEAST = 5, 2
"""Newest steps, and least rows in them, all of which must be off the centre, on one side."""


class AdvantageOffset(BaseDetector):
    """Detector of a mean advantage that leaves 0.

    Advantages relative to the mean of their group, or of the batch, have mean 0 for every policy and every reward. So a
    mean that was 0 in each of the first rows is 0 by construction, and one that leaves 0 shows that the computation
    changed. A mean over tokens can be 0 by chance while all responses have one length, so only a run whose lengths
    differed in those rows is judged. Neither are runs that log no spread or no lengths.
    """

    name: ClassVar[str] = "advantage_offset"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("adv/mean", "adv/std", "len/min", "len/max"),)
    reads: ClassVar[tuple[str, ...]] = ("adv/mean",)

    def __init__(self) -> None:
        super().__init__()
        self._first: int | None = None
        self._rows = 0
        self._centred = True
        self._known = False
        self._off = 0
        self._above = False
        self._since = 0

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if they log no spread, or if the run is not judged."""
        return not self._centred or "adv/std" not in rows.metrics

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge a row of a run whose advantages were centred at first; return a finding if the newest rows are all off
        the centre on one side.
        """
        ratio = self._ratio(step)
        if ratio is None or not self._centred:
            return self._held if self._centred else []
        if not self._known:
            self._begin(step, ratio)
            return []
        if abs(ratio) <= OFF:
            self._off = 0
            return []
        if not self._off or (ratio > 0) is not self._above:
            self._off, self._above, self._since = 0, ratio > 0, step.step
        self._off += 1
        lasts = self._off >= LEAST and step.step - self._since + 1 >= NEWEST
        return [self._finding(step, ratio)] if lasts else []

    def _begin(self, step: ClosedStep, ratio: float) -> None:
        """Take one of the first rows: its mean must be 0. Those in which lengths differ count."""
        shortest, longest = finite(step, "len/min"), finite(step, "len/max")
        self._first = step.step if self._first is None else self._first
        self._centred = abs(ratio) <= ZERO
        self._rows += shortest is not None and longest is not None and longest > shortest
        self._known = self._rows >= ROWS and step.step - self._first + 1 >= STEPS

    @staticmethod
    def _ratio(step: ClosedStep) -> float | None:
        """Return the mean over the standard deviation; None without a spread: then every advantage is the same."""
        mean, spread = finite(step, "adv/mean"), finite(step, "adv/std")
        if mean is None or not spread or spread < 0:
            return None
        ratio = mean / spread
        return ratio if math.isfinite(ratio) else None

    def _finding(self, step: ClosedStep, ratio: float) -> Finding:
        mean, spread = finite(step, "adv/mean") or 0.0, finite(step, "adv/std") or 0.0
        side = "above" if ratio > 0 else "below"
        return self.finding(
            step,
            "advantage_offset",
            Severity.WARNING,
            f"the mean advantage is {number(mean)}, {number(abs(ratio))} standard deviations {side} 0, where it was by "
            "construction",
            onset=self._since,
            metric="adv/mean",
            score=abs(ratio) / OFF,
            baseline=0.0,
            evidence=rounded({"mean": mean, "spread": spread, "ratio": ratio}),
        )
