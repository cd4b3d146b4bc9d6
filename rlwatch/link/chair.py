"""Rank 0 passes commands on, and asks whether everybody can and did carry them out."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from rlwatch.link.frames import START, Frame, Kind
from rlwatch.link.peer import Peer

if TYPE_CHECKING:
    from rlwatch.link.hub import Hub

PATIENCE_S = 60.0
"""Longest rank 0 waits for the others to say that they can carry a command out, in seconds."""
ACTING_S = 1800.0
"""Longest it waits for them to say that they did (a checkpoint may take its time), in seconds."""


class Chair:
    """The training thread of rank 0 over a :class:`~rlwatch.link.hub.Hub`."""

    def __init__(self, hub: Hub, patience_s: float = PATIENCE_S, acting_s: float = ACTING_S) -> None:
        self._hub = hub
        self._patience_s = patience_s
        self._acting_s = acting_s
        self._moment = START
        self._ballot = 0
        self._asking = False

    def offer(self, frame: Frame) -> None:
        """Tell every rank what is wanted at this moment; usually nothing."""
        self._moment, self._ballot, self._asking = frame.moment, 0, bool(frame.body)
        self._tell(frame)

    def decide(self, refusal: str | None) -> str | None:
        """None if this rank and all others agree, else why not; all ranks are told."""
        self._ballot += 1
        verdict = refusal or self._objection()
        self._tell(Frame(Kind.VERDICT, self._moment, ballot_body(self._ballot, verdict)))
        return verdict

    def over(self) -> None:
        """Nothing more is asked at this moment: whoever still waits for a verdict need not."""
        if self._asking:
            self._asking = False
            self._tell(Frame(Kind.OVER, self._moment))

    def _tell(self, frame: Frame) -> None:
        for peer in self._hub.linked().values():
            peer.tell(frame)

    def _objection(self) -> str | None:
        linked = self._hub.linked()
        absent = [rank for rank in range(1, self._hub.world_size) if rank not in linked]
        if absent:
            return f"rank {absent[0]} is not connected, and all ranks must act together"
        end = time.monotonic() + (self._patience_s if self._ballot == 1 else self._acting_s)
        votes = [self._vote(peer, end) for peer in linked.values()]
        return next((vote for vote in votes if vote is not None), None)

    def _vote(self, peer: Peer, end: float) -> str | None:
        """What ``peer`` says of this ballot: None for yes."""
        while not peer.silent:
            frame = peer.next_word(end - time.monotonic())
            if frame is None:
                peer.silent = not peer.gone
                break
            if frame.moment != self._moment:
                continue  # of an earlier command
            if frame.kind is Kind.PASSED:
                return f"rank {peer.rank} had gone on already"
            ballot, refusal = read_ballot(frame.body)
            if frame.kind is Kind.VOTE and ballot == self._ballot:
                return None if refusal is None else f"rank {peer.rank}: {refusal}"
        return f"rank {peer.rank} does not answer"


def ballot_body(ballot: int, refusal: str | None) -> bytes:
    """A vote or a verdict on the ``ballot``-th question of a moment."""
    return json.dumps([ballot, refusal]).encode()


def read_ballot(body: bytes) -> tuple[int, str | None]:
    """What :func:`ballot_body` wrote; (0, None), which is no ballot, for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return 0, None
    match found:
        case [int(ballot), str() | None as refusal] if not isinstance(ballot, bool):
            return ballot, refusal
    return 0, None
