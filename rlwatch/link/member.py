"""How a rank other than 0 hears of commands, and votes on them."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque

from rlwatch.link.chair import ballot_body, read_ballot
from rlwatch.link.frames import START, Frame, FrameError, Inflow, Kind
from rlwatch.link.pace import Moment
from rlwatch.link.sockets import send_all

logger = logging.getLogger("rlwatch")
PATIENCE_S = 60.0
"""Longest a rank waits for rank 0 at a moment, in seconds; then it does not wait until rank 0 is heard again."""
VERDICT_S = 3600.0
"""Longest a rank waits for the verdict, in seconds: by itself it must neither act nor go on. Rank 0 may have to wait
for others, and to finish what it is doing itself.
"""
UNDECIDED = "rank 0 gave no verdict"


class Member:
    """The training thread of another rank, over its own connection to rank 0."""

    def __init__(self, connection: socket.socket, patience_s: float = PATIENCE_S) -> None:
        self._connection = connection
        self._patience_s = patience_s
        self._inflow = Inflow()
        self._heard: deque[Frame] = deque()
        self._moment = START
        self._ballot = 0
        self._waiting = True
        self.open = True

    def offered(self, moment: Moment) -> bytes:
        """What rank 0 wants at ``moment``; empty if nothing, or if rank 0 cannot be heard."""
        self._moment, self._ballot = moment, 0
        end = time.monotonic() + self._patience_s
        while (frame := self._next(end if self._waiting else 0.0)) is not None:
            if frame.kind is not Kind.OFFER:
                continue
            self._waiting = True
            if frame.moment == moment:
                return frame.body
            if frame.moment > moment:  # rank 0 is further on: we meet it there
                self._heard.appendleft(frame)
                return b""
            self._pass(frame)
        if self.open and self._waiting:
            self._waiting = False
            logger.warning("rank 0 did not come to step %d; commands reach this rank once it is heard", moment.step)
        return b""

    def vote(self, refusal: str | None) -> str | None:
        """Tell rank 0 whether this rank can and did; returns the verdict: None, or a refusal."""
        self._ballot += 1
        self._tell(Frame(Kind.VOTE, self._moment, ballot_body(self._ballot, refusal)))
        end = time.monotonic() + VERDICT_S
        while (frame := self._next(end)) is not None:
            if frame.kind is Kind.OFFER:
                self._heard.appendleft(frame)
                break
            if frame.kind is Kind.OVER and frame.moment == self._moment:
                break
            ballot, verdict = read_ballot(frame.body)
            if frame.kind is Kind.VERDICT and frame.moment == self._moment and ballot == self._ballot:
                return verdict
        return refusal or UNDECIDED

    def leave(self) -> None:
        """Go in good order."""
        self._tell(Frame(Kind.END))
        self.close()

    def close(self) -> None:
        """Hear and say nothing more; rank 0 notices."""
        self.open = False
        with contextlib.suppress(OSError):
            self._connection.close()

    def _pass(self, offer: Frame) -> None:
        """An offer that came too late: if it wanted something, say that we cannot any more."""
        if offer.body:
            self._tell(Frame(Kind.PASSED, offer.moment))

    def _tell(self, frame: Frame) -> None:
        if self.open:
            try:
                send_all(self._connection, frame.packed(), self._patience_s)
            except OSError:
                self.close()

    def _next(self, end: float) -> Frame | None:
        """The next message of rank 0; None when it is gone or did not come by ``end``."""
        while not self._heard and self.open:
            self._receive(end)
            if not self._heard and time.monotonic() >= end:
                break
        return self._heard.popleft() if self._heard else None

    def _receive(self, end: float) -> None:
        try:
            self._connection.settimeout(max(0.0, end - time.monotonic()))
            data = self._connection.recv(2**16)
            self._heard.extend(self._inflow.feed(data))
        except (BlockingIOError, TimeoutError):
            return
        except (OSError, FrameError):
            data = b""
        if not data:
            self.close()
