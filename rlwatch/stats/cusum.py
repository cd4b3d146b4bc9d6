"""Cumulative sum: small persistent shifts, and when they began."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.stats.state import Stateful


class Cusum(Stateful):
    """One-sided CUSUM of a standardised series (Page 1954): S = max(0, S + z - drift).

    ``drift`` is half the shift worth noticing, in standard deviations; ``cap`` bounds what a single row
    can add, so that one spike is not a shift. ``since`` is the first step of the current excursion: the
    usual estimate of the change point.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("skipped", "sum", "since")

    def __init__(self, drift: float = 0.5, cap: float = 3.0) -> None:
        self.drift = drift
        self.cap = cap
        self.skipped = 0
        self.sum = 0.0
        self.since: int | None = None

    def update(self, step: int, z: float) -> None:
        """Take the next standardised value; non-finite ones are skipped and counted."""
        if not math.isfinite(z):
            self.skipped += 1
            return
        # The ceiling lets an ended shift be forgotten in bounded time.
        self.sum = min(max(0.0, self.sum + min(z, self.cap) - self.drift), 20.0 * self.cap)
        if self.sum == 0.0:
            self.since = None
        elif self.since is None:
            self.since = step

    def get(self) -> float:
        """The current sum, >= 0, in standard deviations."""
        return self.sum
