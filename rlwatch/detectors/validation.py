"""Scores on held-out prompts: how far below their best, and whether they still move."""

from __future__ import annotations

import math
from itertools import pairwise

from rlwatch.detectors.base import finite
from rlwatch.detectors.reward import NORMAL_80
from rlwatch.records import ClosedStep
from rlwatch.stats import Window, mad, median, quantile, theil_sen

SCORE, SETS = "val/score", "val-core/"
"""One score, or those of several held-out sets under the trainer's own names."""
LEAST = 6
"""Evaluations before anything is said."""
SINCE = 4
"""Evaluations since the best one that make a gap: fewer are chance."""
SURE = 3.0
"""Deviations of one score that the gap must have: the best of many scores was lucky."""
VISIBLE = 0.01
"""Share of the best score below which a gap is nothing."""
FLAT = 0.25
"""Share of the range the score has covered that a rise since the best must reach to be one."""
MOST = 1e9


class Validation:
    """The mean of the held-out scores of a run, one point an evaluation."""

    def __init__(self) -> None:
        self._scores = Window(rows=40, steps=10**9)
        self._best: float | None = None
        self._best_step = 0
        self._since = 0
        self._low = MOST

    def update(self, step: ClosedStep) -> None:
        """Take notice of a row, if it has scores."""
        score = _read(step)
        if score is None:
            return
        self._scores.update(step.step, score)
        self._low = min(self._low, score)
        if self._best is None or score > self._best:
            self._best, self._best_step, self._since = score, step.step, 0
        else:
            self._since += 1

    @property
    def now(self) -> float | None:
        """Median of the last three scores."""
        return median(self._scores.values[-3:]) if len(self._scores) >= 3 else None

    @property
    def best(self) -> float | None:
        """The highest score so far."""
        return self._best

    @property
    def best_step(self) -> int:
        """When that was."""
        return self._best_step

    @property
    def known(self) -> bool:
        """Whether there are enough evaluations to speak of a trend."""
        return len(self._scores) >= LEAST

    def stalls(self) -> bool:
        """Whether it fell behind its best and does not rise: a gap of ``SINCE`` evaluations, and a flat slope."""
        now, best = self.now, self._best
        if not self.known or now is None or best is None or self._since < SINCE:
            return False
        if best - now <= max(SURE * self._noise(), VISIBLE * abs(best)):
            return False
        return self._rise() <= FLAT * max(best - self._low, mad(self._scores.values))

    def rises(self) -> bool:
        """Whether it is still getting better."""
        return self.known and self._since < SINCE and self._rise() > 0.0

    @property
    def _rows(self) -> int:
        """Evaluations since the best one, that one included, but at least ``LEAST``."""
        return max(self._since + 1, LEAST)

    def _noise(self) -> float:
        """Standard deviation of one score, from the jumps since the best one."""
        jumps = [abs(b - a) for a, b in pairwise(self._scores.values[-self._since - 1 :])]
        return quantile(jumps, 0.8) / (NORMAL_80 * math.sqrt(2.0)) if jumps else 0.0

    def _rise(self) -> float:
        """Change over them, by their robust trend."""
        at, values = self._scores.at[-self._rows :], self._scores.values[-self._rows :]
        return theil_sen(at, values) * (at[-1] - at[0])


def _read(step: ClosedStep) -> float | None:
    score = finite(step, SCORE)
    if score is None:
        names = (name for name in step.metrics if name.startswith(SETS))
        scores = [value for name in names if (value := finite(step, name)) is not None]
        score = sum(scores) / len(scores) if scores else None
    return None if score is None else min(max(score, -MOST), MOST)
