"""What the other ranks sent of each step, until rank 0 has use for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from rlwatch.link.pace import Moment

MOST_STEPS = 64
MOST_BYTES = 512 * 2**20


class Inbox:
    """Payloads by moment and rank. Filled by one thread, emptied by another.

    A rank is *expected* from the start, until it leaves or keeps rank 0 waiting in vain. What nobody asks for is
    dropped: the oldest moments first, beyond 64 of them or 512 MiB.
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._lock = threading.Lock()
        self._payloads: dict[Moment, dict[int, bytes]] = {}
        self._size = 0
        self._newest: dict[int, Moment] = {}
        self._taken: Moment | None = None
        self._present = set(ranks)
        self._absent: set[int] = set()
        self.dropped = 0

    def join(self, rank: int) -> None:
        """From now on ``rank`` is expected."""
        with self._lock:
            self._present.add(rank)
            self._absent.discard(rank)

    def leave(self, rank: int) -> None:
        """``rank`` will send nothing more; what it sent stays."""
        with self._lock:
            self._present.discard(rank)

    def put(self, rank: int, moment: Moment, payload: bytes) -> None:
        """Keep what ``rank`` measured: it keeps up, and is expected. Too late for its moment, it is dropped."""
        with self._lock:
            self._newest[rank] = moment
            if self._taken is not None and moment <= self._taken:
                self.dropped += 1
                return
            self._absent.discard(rank)
            self._payloads.setdefault(moment, {})[rank] = payload
            self._size += len(payload)
            while self._payloads and (len(self._payloads) > MOST_STEPS or self._size > MOST_BYTES):
                self._drop(min(self._payloads))

    def awaited(self, moment: Moment) -> frozenset[int]:
        """Ranks whose share of ``moment`` is still to come."""
        with self._lock:
            have = self._payloads.get(moment, {})
            gone_on = {rank for rank, newest in self._newest.items() if newest >= moment}
            return frozenset(self._present - self._absent - gone_on - have.keys())

    def take(self, moment: Moment) -> Mapping[int, bytes]:
        """What came of ``moment``, by rank; what is older is dropped."""
        with self._lock:
            for older in [other for other in self._payloads if other < moment]:
                self._drop(older)
            found = self._payloads.pop(moment, {})
            self._size -= sum(map(len, found.values()))
            self._taken = moment
            return found

    def excuse(self, ranks: Iterable[int]) -> None:
        """Do not wait for ``ranks`` any more, until they send something."""
        with self._lock:
            self._absent.update(ranks)

    def _drop(self, moment: Moment) -> None:
        payloads = self._payloads.pop(moment)
        self._size -= sum(map(len, payloads.values()))
        self.dropped += len(payloads)
