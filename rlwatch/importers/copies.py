"""Identical rows that several ranks print: if rows are numbered by counting, each copy would be a step of its own.

A single row does not show whether it is a copy or whether nothing changed in the training. So the first two different
rows decide: if both are printed equally often, with other measurements in the second, several ranks print, and from
then on each group of that many equal rows counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_RANKS = 16
"""Equal rows at the beginning after which no more are held back."""
_NO_MEASUREMENTS = frozenset({"epoch", "learning_rate", "lr", "num_tokens"})
"""Fields that change, rounded, even in a training in which no measurement changes."""


class Copies(Generic[T]):
    """Takes printed rows and other output in order; returns them without the copies.

    Parameters
    ----------
    left_out
        Called with each copy.
    """

    def __init__(self, left_out: Callable[[T], object]) -> None:
        self._left_out = left_out
        self._times = 0
        """Number of times that each row is printed; 0 while unknown."""
        self._first = 0
        self._row: Mapping[str, str] | None = None
        self._count = 0
        self._held: list[tuple[bool, T]] = []
        """Held output, each with True if it is a copy in case several ranks print."""

    def other(self, thing: T) -> list[T]:
        """Take output that is no row; return what can be read now."""
        if not self._held:
            return [thing]
        self._held.append((False, thing))
        return []

    def row(self, items: Mapping[str, str], thing: T) -> list[T]:
        """Take a row with its ``items``; return what can be read now."""
        again = items == self._row
        before, self._row = self._row, items
        if self._times:
            again = again and self._count < self._times
            self._count = self._count + 1 if again else 1
            if again:
                self._left_out(thing)
            return [] if again else [thing]
        self._count += 1
        if again:
            self._held.append((True, thing))
            too_many = self._count > (self._first or MOST_RANKS)
            return self._settled(1) if too_many else []
        if self._first:
            return self._settled(self._first if self._count - 1 == self._first else 1, thing)
        if self._count == 1:
            return [thing]
        self._first, self._count = self._count - 1, 1
        if self._first > 1 and before is not None and _differs(items, before):
            self._held.append((False, thing))
            return []
        return self._settled(1, thing)

    def _settled(self, times: int, *things: T) -> list[T]:
        """Return the held output, then ``things``; each row is known to be printed ``times`` times."""
        held, self._held, self._times, self._count = self._held, [], times, 1
        for copy, thing in held:
            if copy and times > 1:
                self._left_out(thing)
        return [thing for copy, thing in held if not copy or times == 1] + list(things)

    def finish(self) -> list[T]:
        """Return the held output at the end of the log."""
        if not self._held:
            return []
        return self._settled(self._first if self._count == self._first else 1)


def _differs(row: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """True if a measurement differs."""
    return any(row.get(name) != value for name, value in other.items() if name not in _NO_MEASUREMENTS)
