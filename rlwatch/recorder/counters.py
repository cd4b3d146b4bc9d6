"""What rlwatch lost or swallowed, counted: each counter is itself a metric of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger("rlwatch")


class Counters:
    """Named counters that only grow, with one warning for each name.

    Written from the training and the writer thread; a lost increment under a race is harmless.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._warned: set[str] = set()

    def add(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of ``name``."""
        self._counts[name] = self._counts.get(name, 0) + n

    def warn(self, name: str, message: str, n: int = 1) -> None:
        """Count, and log ``message`` the first time only."""
        self.add(name, n)
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s (further ones are counted as %r, not logged)", message, name)

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def snapshot(self) -> Mapping[str, int]:
        """All counters now."""
        return dict(self._counts)
