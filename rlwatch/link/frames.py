"""What travels over a connection: a kind, a moment and some bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from rlwatch.errors import RLWatchError
from rlwatch.link.pace import Moment

LARGEST = 256 * 2**20
"""No body is longer, in bytes."""
_HEAD = struct.Struct("!BIQII")
START = Moment(0, 0, 0)


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # who calls, and the run's secret
    WELCOME = 2  # rank 0 knows the caller now
    STEP = 3  # what a rank measured at a moment
    OFFER = 4  # commands of rank 0 at a moment; empty if there are none
    VOTE = 5  # a rank's word on a command: empty for yes, or its refusal
    PASSED = 6  # a rank heard an offer after its moment had passed
    VERDICT = 7  # rank 0's last word on a command: empty for yes, or a refusal
    END = 8  # the sender leaves in good order
    OVER = 9  # rank 0 asks nothing more at this moment


_KINDS = frozenset(map(int, Kind))


class FrameError(RLWatchError):
    """What came over a connection is no frame of ours."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    moment: Moment = START
    body: bytes = b""

    def packed(self) -> bytes:
        """As it travels. Raises ``FrameError`` for a body beyond :data:`LARGEST`."""
        if len(self.body) > LARGEST:
            raise FrameError(f"a message of {len(self.body)} bytes is too long; at most {LARGEST} can be sent")
        return _HEAD.pack(self.kind, *self.moment, len(self.body)) + self.body


class Inflow:
    """Puts the bytes of one connection together to frames."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises ``FrameError`` for what is none."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            kind, lap, step, again, length = _HEAD.unpack_from(self._bytes)
            if length > self._largest or kind not in _KINDS:
                raise FrameError(f"not a message of rlwatch: kind {kind}, {length} bytes")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield Frame(Kind(kind), Moment(lap, step, again), body)
