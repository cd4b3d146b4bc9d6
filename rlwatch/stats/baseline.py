"""A run's own normal: what it looked like at first, which later values cannot talk it out of."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from rlwatch.stats.robust import mad, median, quantile
from rlwatch.stats.state import Stateful

FIRST = 3
"""Rows that tell how a run began: the smallest number whose median shrugs off one bad row."""
TRUSTED = 8
"""Rows from which the spread is known well enough to keep a value out."""
QUARANTINE = 2.0
"""Widths of the range between the deciles by which a value may lie outside it (about 6 sigma if normal)."""


class Baseline(Stateful):
    """Robust level and spread of the first rows of a run, then frozen.

    It is ready after ``FIRST`` rows and goes on learning until it has ``rows`` rows, or at least 5 rows
    over ``steps`` steps (coarse logs). Values far outside the deciles so far do not enter, so a spike
    cannot vaccinate it; two-level series (batches with and without gradient) are no spikes. ``first``
    remembers the very first rows apart: a run that breaks inside its own warm-up is judged by how it
    began.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "quarantined", "_values", "_start", "_done")

    def __init__(self, *, rows: int = 20, steps: int = 50, floor: float = 0.0) -> None:
        self.steps = steps
        self.floor = floor
        self.skipped = 0
        self.quarantined = 0
        self._values: deque[float] = deque(maxlen=rows)
        self._start: int | None = None
        self._done = False

    def update(self, step: int, value: float) -> None:
        """Take the next row of the run; non-finite values are skipped and counted."""
        if not math.isfinite(value):
            self.skipped += 1
            return
        if self._done:
            return
        self._start = step if self._start is None else self._start
        if self._far(value):
            self.quarantined += 1
        else:
            self._values.append(value)
        count, span = len(self._values), step - self._start
        self._done = count == self._values.maxlen or (count >= 5 and span >= self.steps)

    def _far(self, value: float) -> bool:
        if len(self._values) < TRUSTED:
            return False
        low, high = quantile(self._values, 0.1), quantile(self._values, 0.9)
        reach = QUARANTINE * max(high - low, self.floor)
        # No spread at all says nothing about what is far.
        return reach > 0.0 and not low - reach <= value <= high + reach

    @property
    def ready(self) -> bool:
        """Whether there are enough rows to speak of a level."""
        return len(self._values) >= FIRST

    @property
    def done(self) -> bool:
        """Whether it is frozen."""
        return self._done

    def get(self) -> float | None:
        """Median; None before ``FIRST`` rows."""
        return median(self._values) if self.ready else None

    @property
    def first(self) -> float | None:
        """Median of the first ``FIRST`` rows; None before."""
        return median([self._values[i] for i in range(FIRST)]) if self.ready else None

    @property
    def spread(self) -> float:
        """Scaled median absolute deviation, at least ``floor``."""
        return max(mad(self._values), self.floor) if self._values else self.floor

    def upper(self, share: float = 0.75) -> float | None:
        """Upper quantile, for series that are often near nothing; None before ``FIRST`` rows."""
        return quantile(self._values, share) if self.ready else None
