"""How a run holds on to its other ranks: rank 0 gathers and passes on, the others send and listen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from rlwatch.link.address import Address
from rlwatch.link.chair import Chair
from rlwatch.link.frames import Frame, Kind
from rlwatch.link.hub import Hub
from rlwatch.link.pace import Moment, Pace
from rlwatch.link.spoke import Spoke
from rlwatch.ports import Parcel
from rlwatch.recorder.awaited import Awaited
from rlwatch.recorder.counters import Counters
from rlwatch.recorder.queue import BoundedQueue
from rlwatch.records import Command, CommandStatus

FULL = "rlwatch's queue is full; records are dropped, training is not slowed"
QUEUE_SIZE = 64
"""Steps of another rank that may wait to be sent."""
BATCH = 8


class Link(Protocol):
    """One rank's end. All but :meth:`close` is called on the training thread, at the same steps on every rank.

    ``latest`` holds each metric as of the last whole step that measured it; it stays empty on ranks other than 0.
    """

    latest: dict[str, float]

    def send(self, parcel: Parcel) -> None:
        """What this rank measured of a step."""
        ...

    def share(self, commands: Sequence[Command], step: int) -> list[Command]:
        """The commands of rank 0 at ``step``, on every rank that hears it."""
        ...

    def agree(self, refusal: str | None) -> str | None:
        """None if no rank refuses, else why one does."""
        ...

    def over(self) -> None:
        """Nothing more is asked about the commands last shared."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Leave; False when ``deadline_s`` seconds were not enough to send what waits."""
        ...

    def forked(self) -> None:
        """In a forked child: let go of the parent's connections."""
        ...


class FirstRank:
    """Rank 0, over its hub."""

    def __init__(self, hub: Hub, offer: Callable[[Awaited], object]) -> None:
        self._hub = hub
        self._offer = offer
        self._chair = Chair(hub)
        self.latest: dict[str, float] = {}
        self._measured, self._told = Pace(), Pace()

    def send(self, parcel: Parcel) -> None:
        """Into the queue of the writer thread, where the step awaits the others' shares."""
        moment = self._measured.next(parcel.step)
        self._offer(Awaited(parcel, self._hub.inbox, moment, time.time(), self.latest.update))

    def share(self, commands: Sequence[Command], step: int) -> list[Command]:
        """As passed; the others are told."""
        body = _packed(commands) if commands else b""
        self._chair.offer(Frame(Kind.OFFER, self._told.next(step), body))
        return list(commands)

    def agree(self, refusal: str | None) -> str | None:
        """The verdict, which the others are told."""
        return self._chair.decide(refusal)

    def over(self) -> None:
        """Whoever still waits for a verdict need not."""
        self._chair.over()

    def close(self, deadline_s: float) -> bool:
        """Take leave of the others."""
        self._hub.close(min(1.0, deadline_s))
        return True

    def forked(self) -> None:
        """Close our copies of the connections."""
        self._hub.forked()


class OtherRank:
    """Any other rank, over its spoke."""

    def __init__(self, rank: int, address: Address, counters: Counters) -> None:
        self._counters = counters
        self._queue: BoundedQueue[tuple[Moment, Callable[[], bytes]]] = BoundedQueue(QUEUE_SIZE)
        self._spoke = Spoke(rank, address, lambda: self._queue.drain(BATCH), lambda n: counters.add("dropped", n))
        self._measured, self._told = Pace(), Pace()
        self.latest: dict[str, float] = {}
        self._spoke.start()

    def send(self, parcel: Parcel) -> None:
        """Into the queue of the sending thread."""
        if not self._queue.offer((self._measured.next(parcel.step), parcel.encode)):
            self._counters.warn("dropped", FULL)

    def share(self, commands: Sequence[Command], step: int) -> list[Command]:  # noqa: ARG002  (only rank 0 has any)
        """What rank 0 wants now."""
        body = self._spoke.member.offered(self._told.next(step))
        return _unpacked(body) if body else []

    def agree(self, refusal: str | None) -> str | None:
        """The verdict of rank 0."""
        return self._spoke.member.vote(refusal)

    def over(self) -> None:
        """Only rank 0 has somebody to tell."""

    def close(self, deadline_s: float) -> bool:
        """Send what waits and leave."""
        return self._spoke.close(deadline_s)

    def forked(self) -> None:
        """Close our copies of the connections."""
        self._spoke.forked()


def _packed(commands: Sequence[Command]) -> bytes:
    return json.dumps([asdict(command) for command in commands], default=str).encode()


def _unpacked(body: bytes) -> list[Command]:
    return [Command(**{**row, "status": CommandStatus(row["status"])}) for row in json.loads(body)]
