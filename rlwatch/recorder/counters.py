"""Counters of what rlwatch lost or swallowed: each is itself a metric of the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from threading import get_ident

from rlwatch.redaction import redacted
from rlwatch.seam import say


class Counters:
    """Named counters that only grow, with one warning for each name. Nothing here raises.

    Written from any thread, without a lock (a signal may arrive while one is held, a fork copies it locked): each
    thread has counts of its own, and they are added up when somebody asks.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._warned: set[str] = set()

    def add(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of ``name``."""
        key = (name, get_ident())
        self._counts[key] = self._counts.get(key, 0) + n

    def warn(self, name: str, message: str, n: int = 1) -> None:
        """Count, and log ``message`` the first time only."""
        self.add(name, n)
        if name not in self._warned:
            self._warned.add(name)
            say(logging.WARNING, "%s (further ones are counted as %r, not logged)", redacted(message), name)

    def __getitem__(self, name: str) -> int:
        return sum(n for (counted, _), n in self._counts.copy().items() if counted == name)

    def snapshot(self) -> Mapping[str, int]:
        """All counters now."""
        total: Counter[str] = Counter()
        for (name, _), n in self._counts.copy().items():
            total[name] += n
        return dict(total)
