"""A run's own normal: what it looked like at first, which later values cannot talk it out of."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

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
        self._forget()

    def _forget(self) -> None:
        """Drop the answers computed from the rows: they have changed. Once frozen, each is computed once."""
        self._quantiles: dict[float, float] = {}
        self._first: float | None = None
        self._spread: float | None = None

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
            self._forget()
        count, span = len(self._values), step - self._start
        self._done = count == self._values.maxlen or (count >= 5 and span >= self.steps)

    def _far(self, value: float) -> bool:
        if len(self._values) < TRUSTED:
            return False
        low, high = self._quantile(0.1), self._quantile(0.9)
        reach = QUARANTINE * max(high - low, self.floor)
        # No spread at all says nothing about what is far.
        return reach > 0.0 and not low - reach <= value <= high + reach

    def _quantile(self, share: float) -> float:
        if share not in self._quantiles:
            self._quantiles[share] = quantile(self._values, share)
        return self._quantiles[share]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self._forget()

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
        return self._quantile(0.5) if self.ready else None

    @property
    def first(self) -> float | None:
        """Median of the first ``FIRST`` rows; None before."""
        if self._first is None and self.ready:
            self._first = median([self._values[i] for i in range(FIRST)])
        return self._first

    @property
    def spread(self) -> float:
        """Scaled median absolute deviation, at least ``floor``."""
        if self._spread is None:
            self._spread = max(mad(self._values), self.floor) if self._values else self.floor
        return self._spread

    def upper(self, share: float = 0.75) -> float | None:
        """Upper quantile, for series that are often near nothing; None before ``FIRST`` rows."""
        return self._quantile(share) if self.ready else None
