"""Detect advantages that are no longer centred: their mean was exactly 0 and is not any more."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number

ROWS = 20
"""Rows from the first on in which the mean must be 0 for the run to count as one that centres its advantages."""
ZERO = 1e-3
"""Largest |mean| over the standard deviation that counts as 0: rounding in logs. Float32 leaves 1e-8."""
OFF = 0.1
"""Least |mean| over the standard deviation that counts as off the centre."""
NEWEST = 5
"""Newest rows, all of which must be off the centre, on one side."""


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
        self._rows = 0
        self._centred = True
        self._newest: deque[tuple[int, float]] = deque(maxlen=NEWEST)
        self._since: int | None = None

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the newest rows of a run whose advantages were centred in its first rows; return a finding if all of
        them are off the centre on one side.
        """
        ratio = self._ratio(step)
        if ratio is None or not self._centred:
            return self._held if self._centred else []
        if self._rows < ROWS:
            self._begin(step, ratio)
            return []
        self._newest.append((step.step, ratio))
        ratios = [each for _, each in self._newest]
        lasts = len(ratios) == NEWEST and min(map(abs, ratios)) > OFF and len({each > 0 for each in ratios}) == 1
        self._since = (self._newest[0][0] if self._since is None else self._since) if lasts else None
        return [self._finding(step, ratio)] if lasts else []

    def _begin(self, step: ClosedStep, ratio: float) -> None:
        """Take one of the first rows: its mean must be 0, and lengths must differ."""
        shortest, longest = finite(step, "len/min"), finite(step, "len/max")
        differ = shortest is not None and longest is not None and longest > shortest
        self._centred = abs(ratio) <= ZERO
        self._rows += differ

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
