"""One of the other ranks, as rank 0 sees it."""

from __future__ import annotations

import contextlib
import socket
from queue import Empty, SimpleQueue

from rlwatch.link.frames import Frame, Kind
from rlwatch.link.sockets import send_all

SEND_S = 1.0
"""A rank that does not take a few bytes for this long is given up, in seconds."""


class Peer:
    """``steps`` brings what it measured; over ``control`` it hears of commands and votes.

    ``silent``: it let rank 0 wait in vain, and said nothing since.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: socket.socket | None = None
        self.control: socket.socket | None = None
        self.gone = False
        self.silent = False
        self._heard: SimpleQueue[Frame | None] = SimpleQueue()

    @property
    def reachable(self) -> bool:
        """Whether it can be told something."""
        return self.control is not None and not self.gone

    def tell(self, frame: Frame) -> bool:
        """Send a small message at once; False if it did not go out."""
        if self.control is None or self.gone:
            return False
        try:
            send_all(self.control, frame.packed(), SEND_S)
        except OSError:
            self.lose()
            return False
        return True

    def hear(self, frame: Frame) -> None:
        """Keep a vote; called on the hub's thread."""
        self.silent = False
        self._heard.put(frame)

    def next_word(self, seconds: float) -> Frame | None:
        """The next message of the rank; None if it is gone, or after ``seconds``."""
        if self.gone and self._heard.empty():
            return None
        try:
            return self._heard.get(timeout=max(0.0, seconds))
        except Empty:
            return None

    def lose(self) -> None:
        """It is gone: end what is left, and let nobody wait for it.

        The files stay open as long as this object lives: the other thread may be about to write, and their numbers
        must not be given to something else before.
        """
        self.gone = True
        self._heard.put(None)
        for connection in (self.steps, self.control):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # the hub's thread then sees its end

    def forget(self) -> None:
        """In a forked child: close our copies and nothing else."""
        for connection in (self.steps, self.control):
            if connection is not None:
                connection.close()

    def part(self) -> None:
        """Take leave in good order."""
        for connection in (self.steps, self.control):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.send(Frame(Kind.END).packed())
                connection.close()
