"""The whole of a run in a few points: pairs of numbers, averaged over ever longer stretches."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from rlwatch.stats.state import Stateful


class Thinned(Stateful):
    """Pairs (x, y) of a run of any length in at most ``points`` points.

    Each point is the mean of ``block`` rows; when there are too many, neighbours are merged and blocks become twice as
    long. A step at or below the last one (a resume) drops what lay at or after it.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "block", "_rows", "_open")

    def __init__(self, points: int = 48) -> None:
        self.skipped = 0
        self.block = 1
        self._rows: deque[tuple[float, ...]] = deque(maxlen=points)
        self._open: deque[tuple[float, ...]] = deque(maxlen=1)

    def update(self, step: int, x: float, y: float) -> None:
        """Add a row; where one of the two is not finite it is skipped and counted."""
        if not (math.isfinite(x) and math.isfinite(y)):
            self.skipped += 1
            return
        for rows in (self._open, self._rows):
            while rows and rows[-1][1] >= step:
                rows.pop()
        row = (step, step, x, y, 1)
        merged = _merged(self._open.pop(), row) if self._open else row
        if merged[4] < self.block:
            self._open.append(merged)
            return
        if len(self._rows) == self._rows.maxlen:
            self._halve()
        self._rows.append(merged)

    def _halve(self) -> None:
        rows = list(self._rows)
        self._rows.clear()
        self._rows.extend(_merged(*rows[i : i + 2]) if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2))
        self.block *= 2

    def __len__(self) -> int:
        return len(self._rows)

    def get(self) -> tuple[list[float], list[float]]:
        """The points' x and y, oldest first; the last ``block`` - 1 rows may still be missing."""
        return [row[2] for row in self._rows], [row[3] for row in self._rows]


def _merged(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    """Two points (first step, last step, x, y, rows) as one, weighted by their rows."""
    rows = left[4] + right[4]
    share = right[4] / rows
    x, y = (left[i] * (1.0 - share) + right[i] * share for i in (2, 3))
    return left[0], right[1], x, y, rows
