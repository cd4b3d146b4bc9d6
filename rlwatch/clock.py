"""Clocks that code receives as an argument, so that tests need not sleep and replays need not wait for real time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Interface of a clock: the wall time for people and stored rows, and a monotonic time for intervals."""

    def now(self) -> float:
        """Return the wall time in seconds since the Unix epoch, for people and for stored rows."""
        ...

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes back, for intervals and deadlines; its zero is arbitrary."""
        ...


class SystemClock:
    """The clock of the machine: ``time.time()`` and ``time.monotonic()``."""

    def now(self) -> float:
        """Return the wall time in seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return the seconds of the machine's monotonic clock, for intervals and deadlines."""
        return time.monotonic()


class ManualClock:
    """A clock for tests and replays that moves only when :meth:`advance` is called. It starts at ``start`` seconds."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the current time of this clock in seconds: the start plus all advances."""
        return self._now

    def monotonic(self) -> float:
        """Return the same seconds as :meth:`now`: this clock never goes back."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds`` (>= 0). Raises ``ValueError`` for a negative number."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: got {seconds} s")
        self._now += seconds
