"""The end of a rank other than 0: a thread that sends what was measured."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable

from rlwatch.link.address import Address
from rlwatch.link.frames import Frame, FrameError, Inflow, Kind
from rlwatch.link.member import Member
from rlwatch.link.pace import Moment
from rlwatch.link.sockets import LinkError, connect, send_all

logger = logging.getLogger("rlwatch")
INTERVAL_S = 0.1
"""Seconds between two looks at the queue: the training thread wakes nobody."""
SEND_S = 60.0
WELCOME_S = 10.0


class Spoke:
    """Connects to rank 0 when made. Raises ``LinkError`` if that fails.

    Parameters
    ----------
    take
        Removes and returns what waits to be sent: (moment, encode) pairs, oldest first; ``encode()`` gives the bytes.
    lost
        Called with the number of steps that could not be sent.
    """

    def __init__(
        self,
        rank: int,
        address: Address,
        take: Callable[[], list[tuple[Moment, Callable[[], bytes]]]],
        lost: Callable[[int], None],
    ) -> None:
        self._take = take
        self._lost = lost
        self._connection = _introduced(rank, address, "steps")
        self.member = Member(_introduced(rank, address, "control"))
        self._open = True
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="rlwatch-spoke", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        """Send what waits, leave and end the thread; False when ``deadline_s`` seconds were not enough.

        Safe in a signal handler: it takes no lock that an interrupted thread could hold.
        """
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def forked(self) -> None:
        """In a forked child: the connections are the parent's; close our copies."""
        self._connection.close()
        self.member.close()

    def _loop(self) -> None:
        stopping = False
        while not stopping:
            time.sleep(INTERVAL_S)
            stopping = self._stopping
            while waiting := self._take():
                for moment, encode in waiting:
                    self._send(moment, encode)
        self._leave()

    def _send(self, moment: Moment, encode: Callable[[], bytes]) -> None:
        """The seam of this thread: what cannot be sent is counted and dropped."""
        try:
            frame = Frame(Kind.STEP, moment, encode())
        except Exception as error:  # noqa: BLE001  (this rank's writer thread: encoding waits for the device)
            logger.warning("a step could not be sent to rank 0: %s: %s", type(error).__name__, error)
            self._lost(1)
            return
        try:
            if self._open:
                send_all(self._connection, frame.packed(), SEND_S)
        except (OSError, FrameError) as error:
            self._open = False
            if not _taken_leave(self._connection):
                logger.warning("rank 0 takes no more: %s", error)
        if not self._open:
            self._lost(1)

    def _leave(self) -> None:
        if self._open:
            with contextlib.suppress(OSError):  # rank 0 may have been quicker
                send_all(self._connection, Frame(Kind.END).packed(), INTERVAL_S)
        self._connection.close()
        self.member.leave()


def _introduced(rank: int, address: Address, role: str) -> socket.socket:
    """A connection over which rank 0 knows who we are. Raises ``LinkError``."""
    connection = connect(address)
    greeting = json.dumps({"rank": rank, "role": role, "token": address.token}).encode()
    try:
        send_all(connection, Frame(Kind.HELLO, body=greeting).packed(), WELCOME_S)
        if Kind.WELCOME in _kinds(connection, WELCOME_S):
            return connection
    except (OSError, FrameError) as error:
        connection.close()
        raise LinkError(f"rank 0 did not take rank {rank} in: {error}") from None
    connection.close()
    raise LinkError(f"rank 0 did not take rank {rank} in")


def _kinds(connection: socket.socket, seconds: float) -> list[Kind]:
    """The kinds of the next messages; nothing if the other side is gone."""
    inflow, end = Inflow(), time.monotonic() + seconds
    while True:
        connection.settimeout(max(0.001, end - time.monotonic()))
        data = connection.recv(2**16)
        frames = [frame.kind for frame in inflow.feed(data)]
        if frames or not data:
            return frames


def _taken_leave(connection: socket.socket) -> bool:
    """Whether rank 0 left in good order."""
    try:
        return Kind.END in _kinds(connection, INTERVAL_S)
    except (OSError, FrameError):
        return False
