"""Another rank's end of the connection to rank 0: a thread that finds rank 0, stays connected and
sends measurements.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from rlwatch.error_boundary import call_or, described, log_message, sheltered
from rlwatch.errors import RLWatchError
from rlwatch.link.rounds import WorkerMember
from rlwatch.link.wire import (
    STRANGERS_BYTES,
    Caller,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
    HubAddress,
    LinkError,
    StepKey,
    asking,
    challenge,
    connect,
    send_all,
)

logger = logging.getLogger("rlwatch")
INTERVAL_S = 0.1
"""Seconds between two reads of the queue: the training thread wakes no other thread."""
SEND_S = 60.0
WELCOME_S = 10.0
HOPE_S = 60.0
"""A rank that has looked for rank 0 for this many seconds measures nothing until it has found it; it
continues to look.
"""
RETRY_S = (0.02, 5.0)
"""Seconds until the next attempt to find rank 0: at first, and at most."""
LAST_S = 2.0
"""Seconds for which a rank that ends looks for a rank 0 that it never found or has lost."""
APART = "rank %d is not linked to rank 0: its share of the batch is not measured, and commands are refused (%s)"


class NobodyError(RLWatchError):
    """Error for a rank that cannot find rank 0: there is none, and there will be none."""


class WorkerClient:
    """Client of a rank other than 0: finds rank 0, keeps a connection to it, and sends this rank's measurements.

    It runs on a thread from :meth:`start` on, and connects again when the connection is lost. Training never waits for
    it.

    Parameters
    ----------
    rank
        This rank.
    find
        Returns the address of rank 0, or None if it is not known yet. Raises ``NobodyError`` if that will not change,
        and ``RLWatchError`` if it cannot be read.
    take
        Removes and returns the measurements to be sent, oldest first: (step, encode) pairs; ``encode()`` returns the
        bytes.
    lost
        Called with the number of steps that could not be sent.
    joined
        Called whenever a connection is made, with the number of times that training of rank 0 went back to an earlier
        step.
    hope_s
        A rank that has looked for rank 0 for this many seconds measures nothing until it has found it.
    notes
        Called many times a second: returns encoded events that this rank reports to rank 0, such as stalls. They are
        dropped while there is no connection.
    """

    def __init__(
        self,
        rank: int,
        find: Callable[[], HubAddress | None],
        take: Callable[[], list[tuple[StepKey, Callable[[], bytes]]]],
        lost: Callable[[int], None],
        joined: Callable[[int], None] = lambda _: None,
        *,
        hope_s: float = HOPE_S,
        notes: Callable[[], Sequence[bytes]] = tuple,
    ) -> None:
        self._hope_s = hope_s
        self._notes = notes
        self.member = WorkerMember()
        self._rank = rank
        self._find = find
        self._take = take
        self._lost = lost
        self._joined = joined
        self._steps: socket.socket | None = None
        self._since = time.monotonic()
        self._retry_at = 0.0
        self._wait_s = RETRY_S[0]
        self._over = False
        self._found_once = self._was_linked = False
        self._warned = False
        self._why = "it has not said where it is; rlwatch must be set up on every rank"
        self._stopping = False
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="rlwatch-spoke", daemon=True)

    def start(self) -> None:
        """Start the thread that looks for rank 0."""
        self._thread.start()

    @property
    def live(self) -> bool:
        """Return whether rank 0 receives what this rank measures, or may soon."""
        if self._over:
            return False
        return self._steps is not None or time.monotonic() - self._since < self._hope_s

    def settled(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until it is known whether rank 0 can be reached; return whether it is
        connected.
        """
        self._settled.wait(deadline_s)
        return self._steps is not None

    def close(self, deadline_s: float) -> bool:
        """Send what is waiting, disconnect and end the thread; return False if ``deadline_s`` seconds were not enough.

        Safe in a signal handler: it takes no lock that an interrupted thread could hold.
        """
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def forked(self) -> None:
        """In a forked child process, close the copies of the connections, without any effect on the parent's."""
        if self._steps is not None:
            self._steps.close()
        self.member.forked()

    def _loop(self) -> None:
        """Run the thread; its errors neither end training nor delay it."""
        sheltered(
            self._work, lambda error: log_message(logging.WARNING, "the link to rank 0 failed: %s", described(error))
        )
        self._over = True
        self.member.deserted()
        self._settled.set()
        self._leave()
        self._discard()

    def _work(self) -> None:
        ended_at: float | None = None
        while True:
            stopping = self._stopping
            if stopping and ended_at is None:
                ended_at = time.monotonic()
            if self._steps is None and not self._over:
                self._seek(hurry=stopping)
            self._send_notes()
            if self._steps is not None:
                self._send_all()
            elif self._over:
                self._discard()
            if ended_at is not None and (self._steps is not None or self._over or self._hopeless(ended_at)):
                return
            if self._steps is not None and not self.member.open:
                self._lose("it closed the connection")
            time.sleep(INTERVAL_S if self._steps is not None or self._over else min(INTERVAL_S, self._wait_s))

    def _hopeless(self, ended_at: float) -> bool:
        return (self._was_linked or not self._found_once) and time.monotonic() - ended_at > LAST_S

    def _seek(self, *, hurry: bool) -> None:
        now = time.monotonic()
        if now - self._since > self._hope_s and not self._warned:
            self._warned = True
            logger.warning(APART, self._rank, self._why)
            self._settled.set()
        if now < self._retry_at and not hurry:
            return
        try:
            address = self._find()
            if address is not None:
                self._found_once = True
                self._link(address)
                return
        except NobodyError:
            self._end()
            return
        except LinkError as error:
            self._why = str(error)
        except RLWatchError as error:
            logger.warning(APART, self._rank, error)
            self._end()
            return
        self._retry_at = time.monotonic() + self._wait_s
        self._wait_s = min(2.0 * self._wait_s, RETRY_S[1])

    def _link(self, address: HubAddress) -> None:
        """Connect to rank 0. Raises ``LinkError``."""
        steps, lap, _ = introduced(self._rank, address, "steps")
        try:
            control, _, orders = introduced(self._rank, address, "control")
        except LinkError:
            steps.close()
            raise
        self._joined(lap)
        self.member.connected(control, lap=lap, orders=orders)
        self._steps, self._was_linked = steps, True
        self._wait_s = RETRY_S[0]
        if self._warned:
            logger.warning("rank %d is linked to rank 0 now", self._rank)
        self._warned = False
        self._settled.set()

    def _end(self) -> None:
        self._over = True
        self.member.deserted()
        self._settled.set()

    def _send_all(self) -> None:
        while self._steps is not None and (waiting := self._take()):
            for moment, encode in waiting:
                self._send(moment, encode)

    def _send_notes(self) -> None:
        notes: Sequence[bytes] = call_or(self._notes, lambda _error: ())
        for body in notes:
            try:
                if self._steps is not None:
                    send_all(self._steps, Frame(FrameKind.NOTE, body=body).packed(), SEND_S)
            except (OSError, FrameError) as error:
                self._lose(str(error))

    def _send(self, moment: StepKey, encode: Callable[[], bytes]) -> None:
        """Send the measurements of a step; those that cannot be sent are counted and dropped."""

        def unread(error: Exception) -> None:
            log_message(logging.WARNING, "a step could not be sent to rank 0: %s", described(error))
            self._lost(1)

        frame = call_or(
            lambda: Frame(FrameKind.STEP, moment, encode()).packed(), unread
        )  # encoding waits for the device
        if frame is None:
            return
        try:
            if self._steps is not None:
                send_all(self._steps, frame, SEND_S)
                return
        except OSError as error:
            self._lose(str(error))
        self._lost(1)

    def _lose(self, why: str) -> None:
        """Handle a lost connection: look for rank 0 again, unless it closed in good order."""
        left = self.member.parted or (self._steps is not None and _taken_leave(self._steps))
        self._drop()
        if left:
            self._end()
            return
        self._since, self._why = time.monotonic(), why
        self._retry_at, self._wait_s = 0.0, RETRY_S[0]
        logger.warning("rank 0 takes no more: %s", why)

    def _discard(self) -> None:
        while waiting := self._take():
            self._lost(len(waiting))

    def _leave(self) -> None:
        if self._steps is not None:
            with contextlib.suppress(OSError):  # rank 0 may have been quicker
                send_all(self._steps, Frame(FrameKind.END).packed(), INTERVAL_S)
            self.member.disconnect()
        self._drop()

    def _drop(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self.member.close()


def introduced(rank: int, address: HubAddress, role: str) -> tuple[socket.socket, int, int]:
    """Connect to rank 0 at ``address`` as ``rank``; both ends prove that they know the secret of the run.

    ``role``: ``"steps"`` or ``"control"``. Returns the socket, the number of times that training of rank 0 went back to
    an earlier step, and the number of times that it has sent commands to all ranks. Raises ``LinkError``.
    """
    secret = address.secret
    connection = connect(address)
    caller = Caller(rank, role, challenge())
    inflow, end = FrameDecoder(STRANGERS_BYTES), time.monotonic() + WELCOME_S
    try:
        asked = asking(_next(connection, inflow, end))
        send_all(connection, caller.answer(asked, secret).packed(), WELCOME_S)
        lap, orders = caller.welcomed(_next(connection, inflow, end), asked, secret)
        connection.settimeout(None)
    except (OSError, FrameError) as error:
        connection.close()
        raise LinkError(f"rank 0 did not take rank {rank} in: {error}") from None
    return connection, lap, orders


def _next(connection: socket.socket, inflow: FrameDecoder, end: float) -> Frame:
    """Return the next message. Raises ``OSError`` if it is late, ``FrameError`` if the other side leaves."""
    while True:
        connection.settimeout(max(0.001, end - time.monotonic()))
        data = connection.recv(1)
        if not data:
            raise FrameError("it closed the connection: this rank does not know its secret, or it is busy")
        for frame in inflow.feed(data):
            return frame


def _taken_leave(connection: socket.socket) -> bool:
    """Return True if rank 0 sent a message that it ends."""
    with contextlib.suppress(OSError, FrameError):
        return _next(connection, FrameDecoder(), time.monotonic() + INTERVAL_S).kind is FrameKind.END
    return False
