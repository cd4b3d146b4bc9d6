"""The last stretch of a series, sized in rows and in steps at once.

Trainers log every step, every fifth or every tenth. A window of ``steps`` steps keeps that meaning at any
cadence, ``rows`` bounds the memory and ``least`` keeps enough rows for a median when rows are far apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from rlwatch.stats.robust import mad, median
from rlwatch.stats.state import Stateful


class Window(Stateful):
    """Rows of the last ``steps`` steps: at least ``least`` of them (older if need be), at most ``rows``.

    A step at or below the last one (a resume from a checkpoint) drops what lay at or after it.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "_steps", "_values")

    def __init__(self, *, rows: int, steps: int, least: int = 3) -> None:
        self.least = least
        self.steps = steps
        self.skipped = 0
        self._steps: deque[int] = deque(maxlen=rows)
        self._values: deque[float] = deque(maxlen=rows)
        self._median: float | None = None
        """Of the rows as they are; None: not asked for since the last one."""

    def update(self, step: int, value: float) -> None:
        """Add a row; non-finite values are skipped and counted."""
        if not math.isfinite(value):
            self.skipped += 1
            return
        steps, values = self._steps, self._values
        self._median = None
        while steps and steps[-1] >= step:
            steps.pop()
            values.pop()
        steps.append(step)
        values.append(value)
        while len(steps) > self.least and steps[0] <= step - self.steps:
            steps.popleft()
            values.popleft()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self._median = None

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> list[float]:
        """Finite values, oldest first."""
        return list(self._values)

    @property
    def at(self) -> list[int]:
        """Their steps."""
        return list(self._steps)

    def get(self) -> float | None:
        """Median; None before ``least`` rows."""
        if self._median is None and len(self._values) >= self.least:
            self._median = median(self._values)
        return self._median

    @property
    def mean(self) -> float | None:
        """Arithmetic mean, for shares in [0, 1]; None before ``least`` rows."""
        return sum(self._values) / len(self._values) if len(self._values) >= self.least else None

    @property
    def spread(self) -> float:
        """Scaled median absolute deviation; 0 when empty."""
        return mad(self._values) if self._values else 0.0
