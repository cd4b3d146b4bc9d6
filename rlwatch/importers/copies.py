"""Rows that several ranks print, each as it is: where rows are numbered by counting, a copy would be a step of its own.

Nothing in one row tells a copy from a training in which nothing changes. So the first rows are looked at: two that are
printed equally often, with other measurements the second time, are of ranks; from then on each group of so many is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_RANKS = 16
"""Equal rows from the beginning after which nothing more is waited for."""
_TELL_NOTHING = frozenset({"epoch", "learning_rate", "lr", "num_tokens"})
"""Fields that change in a training in which nothing does, and are rounded."""


class Copies(Generic[T]):
    """Takes what was printed, rows and others, in its order; gives back what is to be read, without copies.

    Parameters
    ----------
    left_out
        Told of each copy.
    """

    def __init__(self, left_out: Callable[[T], object]) -> None:
        self._left_out = left_out
        self._times = 0
        """How often each row is printed; 0 while that is not known."""
        self._first = 0
        self._row: Mapping[str, str] | None = None
        self._count = 0
        self._held: list[tuple[bool, T]] = []
        """What waits, and whether it is a copy if there are any."""

    def beside(self, thing: T) -> list[T]:
        """Things to be read now that ``thing``, which is no row, was printed."""
        if not self._held:
            return [thing]
        self._held.append((False, thing))
        return []

    def row(self, items: Mapping[str, str], thing: T) -> list[T]:
        """The same of a row."""
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
        """The things held back, now that it is known how often each row is printed, and then ``things``."""
        held, self._held, self._times, self._count = self._held, [], times, 1
        for copy, thing in held:
            if copy and times > 1:
                self._left_out(thing)
        return [thing for copy, thing in held if not copy or times == 1] + list(things)

    def finish(self) -> list[T]:
        """The things that wait, where nothing more comes."""
        if not self._held:
            return []
        return self._settled(self._first if self._count == self._first else 1)


def _differs(row: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """True if something was measured otherwise."""
    return any(row.get(name) != value for name, value in other.items() if name not in _TELL_NOTHING)
