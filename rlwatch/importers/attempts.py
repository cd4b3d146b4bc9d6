"""When a row belongs to a new attempt: the one rule for every format.

A trainer that resumes from a checkpoint logs steps it has already logged. A tracker that logs a step in several
calls also goes back, but with other metrics.
"""

from __future__ import annotations

from collections.abc import Iterable


class Attempts:
    """Numbers attempts from 1.

    A row is a **rewind**, the start of the next attempt, if its step lies before one already seen in this attempt
    and it repeats a metric already seen at that step. A row for an earlier step with only new metrics is a late
    record of the same attempt.

    >>> attempts = Attempts()
    >>> [attempts.of(step, [name]) for step, name in [(1, "loss"), (2, "loss"), (1, "val"), (1, "loss")]]
    [1, 1, 1, 2]
    """

    def __init__(self) -> None:
        self.attempt = 1
        self._seen: dict[int, frozenset[str]] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        """One of each: most steps have the same names."""
        self._furthest = -1
        self._restarted = False

    def of(self, step: int, names: Iterable[str]) -> int:
        """The attempt that the next row, with metrics ``names`` at ``step``, belongs to."""
        names = frozenset(names)
        names = self._sets.setdefault(names, names)
        seen = self._seen.get(step, frozenset())
        if self._restarted or (step < self._furthest and not seen.isdisjoint(names)):
            self._begin()
            seen = frozenset()
        together = seen | names
        self._seen[step] = self._sets.setdefault(together, together)
        self._furthest = max(self._furthest, step)
        return self.attempt

    def restart(self) -> None:
        """Say that the trainer was started again: the next row begins a new attempt, whatever its step."""
        self._restarted = self._furthest >= 0

    def _begin(self) -> None:
        self.attempt += 1
        self._seen, self._furthest, self._restarted = {}, -1, False
