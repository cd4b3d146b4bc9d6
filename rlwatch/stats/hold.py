"""For how long a condition has held, in rows and in steps, forgiving a single miss."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.stats.state import Stateful


class Hold(Stateful):
    """Counts the rows since a condition began; more than ``forgive`` misses in a row end it.

    A step at or below the last one (a resume) starts anew.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("since", "rows", "_misses", "_last")

    def __init__(self, forgive: int = 0) -> None:
        self.forgive = forgive
        self.since: int | None = None
        self.rows = 0
        self._misses = 0
        self._last: int | None = None

    def update(self, step: int, condition: bool) -> None:
        """Take the next row."""
        if self._last is not None and step <= self._last:
            self.clear()
        self._last = step
        if condition:
            self.since = step if self.since is None else self.since
            self.rows += 1
            self._misses = 0
            return
        self._misses += 1
        if self._misses > self.forgive:
            self.since, self.rows = None, 0

    def get(self) -> int:
        """Steps since it began; 0 if it does not hold."""
        return 0 if self.since is None or self._last is None else self._last - self.since

    def lasted(self, rows: int, steps: int = 0) -> bool:
        """Whether it has held for at least so many rows, spanning at least so many steps."""
        return self.rows >= rows and self.get() >= steps

    def clear(self) -> None:
        """Forget."""
        self.since, self.rows, self._misses, self._last = None, 0, 0, None
