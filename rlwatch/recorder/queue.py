"""Bounded queue between the threads that log and the writer thread, without a lock, and its way past a full queue.

What is logged goes into the run's journal first (see :mod:`rlwatch.ports`), so that it outlives the process; then into
the queue. When the queue is full, what the journal has whole is taken from there later instead of being dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlwatch.ports import Journal
from rlwatch.recorder.awaited import Awaited
from rlwatch.recorder.counters import Counters
from rlwatch.recorder.intake import Entry, plain_numbers
from rlwatch.records import CompletionBatch, Event, SpikeBatch
from rlwatch.seam import by_a_signal

T = TypeVar("T")
FULL = "rlwatch's queue is full; records are dropped, training is not slowed"
UNKEPT = "what is logged is not kept beside the database: the last tenth of a second would be lost with the process"


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


@dataclass(slots=True)
class Numbered:
    """What is in the journal under ``number``."""

    item: SpikeBatch | CompletionBatch | Event
    number: int


Queued = Entry | SpikeBatch | CompletionBatch | Event | Awaited | Numbered


class Intake:
    """The way in for everything that is logged: :meth:`put` may be called from any thread, and never raises or waits.

    Parameters
    ----------
    queue
        What the writer thread drains.
    journal
        Where it is kept until it is stored; None: nowhere.
    """

    def __init__(self, queue: BoundedQueue[Queued], journal: Journal | None, counters: Counters) -> None:
        self.queue = queue
        self.journal = journal
        self.spilling = False
        """Whether what is logged goes into the journal alone; the writer thread ends it when it has caught up."""
        self._counters = counters

    def put(self, item: Queued) -> None:
        """Take ``item``, or count that it was dropped."""
        number, whole = self._kept(item)
        if number and whole and self.spilling:
            return
        if number and not isinstance(item, Entry | Awaited | Numbered):
            item = Numbered(item, number)
        if self.queue.offer(item):
            return
        if number and whole:
            self.spilling = True
        else:
            self._counters.warn("dropped", FULL)

    def _kept(self, item: Queued) -> tuple[int, bool]:
        """Its number in the journal (0: not there), and whether all of it is."""
        if self.journal is None or isinstance(item, Awaited | Numbered):
            return 0, False
        try:
            if isinstance(item, Entry):
                numbers, whole = plain_numbers(item)
                if not numbers:  # all of it is still on a device, or no number at all
                    return 0, False
                number = item.number = self.journal.append_record(item.step, item.ts, numbers, whole=whole)
            else:
                number, whole = self.journal.append(item), True
        except Exception as error:
            if by_a_signal(error):
                raise
            return 0, False  # an item of anybody's: the writer thread says what is wrong with it
        if not number:
            self._counters.warn("unkept", UNKEPT)
        return number, whole
