"""Is the run getting better or worse? A noisy reward read with medians, for corroboration."""

from __future__ import annotations

import math
from itertools import pairwise

from rlwatch.detectors.base import finite, number
from rlwatch.records import ClosedStep
from rlwatch.stats import Baseline, Window, mad

MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""


class RewardWatch:
    """Level now against the level at the start and the best so far; noise from first differences.

    The start is the median of the first rows and also the first ``best``: a run that breaks inside its
    warm-up has then fallen from how it began.
    """

    def __init__(self) -> None:
        self.window = Window(rows=10, steps=15)
        self.noise_window = Window(rows=60, steps=10**9, least=6)
        self.base = Baseline(rows=8, steps=15, quarantine=math.inf)
        self.best: float | None = None
        self.best_step = 0

    def update(self, step: ClosedStep) -> None:
        """Take notice of ``reward/mean``."""
        value = finite(step, "reward/mean")
        if value is None:
            return
        self.base.update(step.step, value)
        self.window.update(step.step, value)
        self.noise_window.update(step.step, value)
        level, start = self.now, self.base.first
        if self.best is None:
            self.best, self.best_step = start, step.step
        elif level is not None and len(self.window) >= min(5, len(self.noise_window)) and level > self.best:
            self.best, self.best_step = level, step.step

    @property
    def now(self) -> float | None:
        """Median of the last rows."""
        return self.window.get()

    @property
    def start(self) -> float | None:
        """Median of the first rows."""
        return self.base.first

    @property
    def error(self) -> float:
        """Standard error of :attr:`now`."""
        values = self.noise_window.values
        jumps = [b - a for a, b in pairwise(values)]
        noise = mad(jumps, 0.0) / math.sqrt(2.0) if jumps else 0.0
        return MEDIAN_ERROR * noise / math.sqrt(max(len(self.window), 1))

    def fallen(self, share: float = 0.25) -> bool:
        """Whether it lost ``share`` of its best level (and more than noise explains)."""
        if self.now is None or self.best is None or self.start is None:
            return False
        scale = max(abs(self.best), self.best - self.start)
        return self.best - self.now > max(share * scale, 3.0 * self.error)

    def risen(self) -> bool:
        """Whether it is clearly above where it started."""
        if self.now is None or self.start is None:
            return False
        return self.now - self.start > max(0.1 * abs(self.start), 3.0 * self.error)

    def say(self) -> str:
        """``" while reward fell from 0.58 to 0.01"``, or nothing if unknown."""
        if self.now is None or self.best is None or self.start is None:
            return ""
        if self.fallen():
            return f" while reward fell from {number(self.best)} to {number(self.now)}"
        verb = "rose" if self.risen() else "stayed near its start,"
        return f" while reward {verb} from {number(self.start)} to {number(self.now)}"
