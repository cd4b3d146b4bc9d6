"""Time as a dependency, so that no test sleeps and no replay depends on the wall."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clock from which code reads the time."""

    def now(self) -> float:
        """Seconds since the Unix epoch (wall time: for people and for rows)."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back (for intervals and deadlines)."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only by :meth:`advance`; for tests and replays."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time last set."""
        return self._now

    def monotonic(self) -> float:
        """The time last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: got {seconds} s")
        self._now += seconds
