"""Rank 0's end: a thread that takes what the other ranks send."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import selectors
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlwatch.link.address import Address, address_of
from rlwatch.link.frames import LARGEST, Frame, FrameError, Inflow, Kind
from rlwatch.link.inbox import Inbox
from rlwatch.link.peer import Peer
from rlwatch.link.sockets import listen, tuned

logger = logging.getLogger("rlwatch")
CHUNK = 2**18
STRANGERS_BYTES = 1024
"""Longest message from somebody who has not said the secret yet."""


@dataclass(slots=True)
class Caller:
    """A connection somebody opened; ``peer`` once we know who."""

    connection: socket.socket
    inflow: Inflow = field(default_factory=lambda: Inflow(STRANGERS_BYTES))
    peer: Peer | None = None


class Hub:
    """Listens from :meth:`start` to :meth:`close`. The training thread never waits for it.

    Parameters
    ----------
    world_size
        Ranks of the run, this one included.
    alone
        Whether all of them are on this machine: then nobody else can connect.
    """

    def __init__(self, world_size: int, *, alone: bool) -> None:
        self.world_size = world_size
        self.inbox = Inbox(range(1, world_size))
        self.peers: dict[int, Peer] = {}
        self._listener = listen(alone=alone)
        self._listener.setblocking(False)
        self.address: Address = address_of(self._listener.getsockname()[1], alone=alone)
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.PollSelector()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="rlwatch-hub", daemon=True)

    def start(self) -> None:
        """Begin to take connections."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread.start()

    def linked(self) -> Mapping[int, Peer]:
        """The ranks that can be told something."""
        return {rank: peer for rank, peer in list(self.peers.items()) if peer.reachable}

    def close(self, deadline_s: float = 1.0) -> None:
        """Take leave of everybody, within ``deadline_s`` seconds; idempotent. Takes no lock."""
        if not self._closing:
            self._closing = True
            with contextlib.suppress(OSError):  # the thread may have seen it by itself
                self._rope.send(b"!")
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def forked(self) -> None:
        """In a forked child: the connections are the parent's; close our copies, so that their end can be seen."""
        for connection in (self._listener, self._bell, self._rope):
            connection.close()
        for peer in self.peers.values():
            peer.forget()

    def _loop(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, Caller):
                    self._read(key.data)
        self._part()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            tuned(connection).setblocking(False)
        except OSError as error:  # usually whoever it was has gone again
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._selector.unregister(self._listener)
                logger.warning("rank 0 may not open more files: ranks beyond %d are not linked", len(self.peers))
            return
        self._selector.register(connection, selectors.EVENT_READ, Caller(connection))

    def _read(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(CHUNK)
            for frame in caller.inflow.feed(data):
                self._take(caller, frame)
        except BlockingIOError:
            return
        except (OSError, FrameError):
            data = b""
        if not data:
            self._drop(caller)

    def _take(self, caller: Caller, frame: Frame) -> None:
        peer = caller.peer
        if peer is None:
            self._welcome(caller, frame)
        elif frame.kind is Kind.STEP:
            self.inbox.put(peer.rank, frame.moment, frame.body)
        elif frame.kind is Kind.END:
            peer.gone = True
        else:
            peer.hear(frame)

    def _welcome(self, caller: Caller, frame: Frame) -> None:
        """Raises ``FrameError`` for whoever is not of this run."""
        rank, role = self._identified(frame)
        peer = self.peers.get(rank)
        if peer is None or peer.gone:
            peer = self.peers[rank] = Peer(rank)
        caller.peer, caller.inflow = peer, Inflow(LARGEST)
        if role == "steps":
            peer.steps = caller.connection
            self.inbox.join(rank)
        else:
            peer.control = caller.connection
        caller.connection.send(Frame(Kind.WELCOME).packed())

    def _identified(self, frame: Frame) -> tuple[int, str]:
        try:
            said = json.loads(frame.body)
            rank, role, token = int(said["rank"]), str(said["role"]), str(said["token"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise FrameError("no greeting") from None
        known = hmac.compare_digest(token.encode(errors="replace"), self.address.token.encode())
        if frame.kind is not Kind.HELLO or not known:
            raise FrameError("a stranger")
        if not 0 < rank < self.world_size:
            raise FrameError(f"there is no rank {rank}")
        return rank, role

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.connection)
        peer = caller.peer
        if peer is None:
            return caller.connection.close()
        if self.peers.get(peer.rank) is peer:  # not one that has started anew since
            self.inbox.leave(peer.rank)
        if not peer.gone:
            logger.warning("rank %d is gone: its share of the batch is missing from now on", peer.rank)
        return peer.lose()

    def _part(self) -> None:
        for peer in self.peers.values():
            peer.part()
        for connection in (self._listener, self._bell, self._rope):
            connection.close()
        self._selector.close()
