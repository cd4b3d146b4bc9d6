"""A step whose other parts are still on their way from the other ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlwatch.ports import Parcel
from rlwatch.recorder.intake import Entry
from rlwatch.records import SpikeBatch

if TYPE_CHECKING:
    from rlwatch.link.inbox import Inbox
    from rlwatch.link.pace import Moment

logger = logging.getLogger("rlwatch")
PATIENCE_S = 30.0
"""Longest a step waits for the shares of other ranks, in seconds; training does not wait at all."""
RANKS = "rlwatch/ranks"


@dataclass(slots=True)
class Awaited:
    """Rank 0's own share of a step in the writer's queue; what is queued behind it waits with it.

    ``seen`` is told the metrics of the whole step.
    """

    parcel: Parcel
    inbox: Inbox
    moment: Moment
    ts: float
    seen: Callable[[Mapping[str, float]], object] = dict
    until: float = field(default_factory=lambda: time.monotonic() + PATIENCE_S)

    def due(self, *, hurry: bool = False) -> bool:
        """Whether every share is here, or none is waited for any more. ``hurry``: take what there is."""
        missing = self.inbox.awaited(self.moment)
        if not missing and self.parcel.ready():
            return True
        if not hurry and time.monotonic() < self.until:
            return False
        if missing:
            self.inbox.excuse(missing)
            named = ", ".join(map(str, sorted(missing)))
            logger.warning(
                "step %d is recorded without the share of rank %s, which did not come; it is not waited for until it "
                "keeps up again",
                self.moment.step,
                named,
            )
        return True

    def opened(self) -> tuple[Entry, Sequence[SpikeBatch]]:
        """The whole step: its metrics, and the extreme tokens of each rank that has any."""
        others = self.inbox.take(self.moment)
        metrics, spikes = self.parcel.merged(others)
        self.seen(metrics)
        return Entry(self.parcel.step, {**metrics, RANKS: 1 + len(others)}, self.ts), spikes
