"""The last stretch of a series, sized in rows and in steps at once.

Trainers log every step, every fifth or every tenth. A window of ``steps`` steps keeps that meaning at any
cadence, ``rows`` bounds the memory and ``least`` keeps enough rows for a median when rows are far apart.
"""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from rlwatch.stats.robust import mad, median
from rlwatch.stats.state import Stateful


class Window(Stateful):
    """Rows of the last ``steps`` steps: at least ``least`` of them (older if need be), at most ``rows``.

    A step at or below the last one (a resume from a checkpoint) drops what lay at or after it.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "_rows")

    def __init__(self, *, rows: int, steps: int, least: int = 3) -> None:
        self.least = least
        self.steps = steps
        self.skipped = 0
        self._rows: deque[tuple[int, float]] = deque(maxlen=rows)

    def update(self, step: int, value: float) -> None:
        """Add a row; non-finite values are skipped and counted."""
        if not math.isfinite(value):
            self.skipped += 1
            return
        while self._rows and self._rows[-1][0] >= step:
            self._rows.pop()
        self._rows.append((step, value))
        while len(self._rows) > self.least and self._rows[0][0] <= step - self.steps:
            self._rows.popleft()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def values(self) -> list[float]:
        """Finite values, oldest first."""
        return [value for _, value in self._rows]

    @property
    def at(self) -> list[int]:
        """Their steps."""
        return [step for step, _ in self._rows]

    def get(self) -> float | None:
        """Median; None before ``least`` rows."""
        return median(self.values) if len(self._rows) >= self.least else None

    @property
    def mean(self) -> float | None:
        """Arithmetic mean, for shares in [0, 1]; None before ``least`` rows."""
        return sum(self.values) / len(self._rows) if len(self._rows) >= self.least else None

    @property
    def spread(self) -> float:
        """Scaled median absolute deviation; 0 when empty."""
        return mad(self.values) if self._rows else 0.0
