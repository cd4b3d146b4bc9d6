"""What travels over a connection: a kind, the number of a round, a moment and some bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from rlwatch.errors import RLWatchError
from rlwatch.link.pace import START, Moment

LARGEST = 256 * 2**20
"""No body is longer, in bytes."""
SMALL = 2**20
"""No body about commands is longer, in bytes."""
_HEAD = struct.Struct("!BIIQII")


class Kind(IntEnum):
    """What a frame says."""

    CHALLENGE = 1  # rank 0 to whoever connects: prove that you know the secret
    ANSWER = 2  # the caller: who it is, its proof, and its own challenge
    WELCOME = 3  # rank 0: its proof, and where it is
    STEP = 4  # what a rank measured at a moment
    ASK = 5  # rank 0 has commands: at which boundary, at the earliest, can you still stop?
    PLACE = 6  # at the first one that is not before this moment; I wait at it until I hear where we meet
    MEET = 7  # all ranks meet at the first boundary that is not before this moment
    OFFER = 8  # the commands, at the boundary where all meet
    ORDER = 9  # what rank 0 decided at a place that every rank passes; empty if nothing
    VOTE = 10  # a rank's word on a command
    PASSED = 11  # a rank had gone on already
    VERDICT = 12  # rank 0's last word on a command
    OVER = 13  # rank 0 asks nothing more in this round
    END = 14  # the sender leaves in good order


_KINDS = frozenset(map(int, Kind))


class FrameError(RLWatchError):
    """What came over a connection is no frame of ours."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message; ``turn`` is the number of the round it belongs to, 0 for none."""

    kind: Kind
    moment: Moment = START
    body: bytes = b""
    turn: int = 0

    def packed(self) -> bytes:
        """As it travels. Raises ``FrameError`` for a body beyond :data:`LARGEST`."""
        if len(self.body) > LARGEST:
            raise FrameError(f"a message of {len(self.body)} bytes is too long; at most {LARGEST} can be sent")
        return _HEAD.pack(self.kind, self.turn, *self.moment, len(self.body)) + self.body


class Inflow:
    """Puts the bytes of one connection together to frames."""

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises ``FrameError`` for what is none."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            kind, turn, lap, step, again, length = _HEAD.unpack_from(self._bytes)
            if length > self.largest or kind not in _KINDS:
                raise FrameError(f"not a message of rlwatch: kind {kind}, {length} bytes")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield Frame(Kind(kind), Moment(lap, step, again), body, turn)
