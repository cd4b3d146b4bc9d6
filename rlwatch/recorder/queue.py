"""A bounded queue between one training thread and one writer thread, without a lock."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """At most ``maxsize`` items; when full, the newest is refused rather than the caller kept waiting.

    ``deque.append`` and ``popleft`` are atomic, so neither side waits for the other. With several
    producers the bound may be passed by their number at most.
    """

    def __init__(self, maxsize: int) -> None:
        if maxsize < 1:
            raise ValueError(f"queue size must be >= 1, got {maxsize}")
        self.maxsize = maxsize
        self._items: deque[T] = deque()

    def offer(self, item: T) -> bool:
        """Append ``item``; False if the queue was full and it was not taken."""
        if len(self._items) >= self.maxsize:
            return False
        self._items.append(item)
        return True

    def drain(self, limit: int) -> list[T]:
        """Remove and return up to ``limit`` items, oldest first."""
        out: list[T] = []
        try:
            while len(out) < limit:
                out.append(self._items.popleft())
        except IndexError:
            pass
        return out

    def __len__(self) -> int:
        return len(self._items)
