"""Rank 0's end: a thread that takes what the other ranks send."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from rlwatch.link.frames import LARGEST, SMALL, Frame, FrameError, Inflow, Kind
from rlwatch.link.greeting import STRANGERS_BYTES, Caller, challenge, identified
from rlwatch.link.inbox import Inbox
from rlwatch.link.pace import Moment
from rlwatch.link.sockets import (
    LOOPBACK,
    Address,
    LinkError,
    Place,
    listen,
    names_of,
    own_secret,
    send_all,
    this_machine,
    tuned,
)
from rlwatch.seam import described, say, tireless

logger = logging.getLogger("rlwatch")
CHUNK = 2**18
SEND_S = 1.0
"""A rank that does not take a few bytes for this long is given up, in seconds."""
GREETING_S = 10.0
"""Longest somebody may stay without proving that it is of this run, in seconds."""
STRANGERS = 32
"""So many who have proven nothing may be connected at a time, besides two for each rank that is still to come; when one
more comes, whoever has been there longest goes.
"""
REST_S = 0.01
"""Rank 0 rests so long from taking connections after it sent a stranger away, in seconds: a flood of them costs its
training next to nothing, and honest ranks, which wait in the system's queue meanwhile, little.
"""
FULL_S = 1.0
"""How long it rests when the process may open no more files, in seconds."""


class Peer:
    """One of the other ranks, as rank 0 sees it: ``steps`` brings what it measured; over ``control`` it votes.

    ``silent``: it let rank 0 wait in vain, and said nothing since. ``owing``: it was asked to a boundary that it did
    not come to; at the earliest it could then have stopped at this one.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: socket.socket | None = None
        self.control: socket.socket | None = None
        self.gone = False
        self.silent = False
        self.owing: Moment | None = None
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
        """Keep a word about commands; called on the hub's thread."""
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
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the hub's thread then sees its end

    def forget(self) -> None:
        """In a forked child: close our copies and nothing else."""
        for connection in self._connections:
            connection.close()

    def part(self) -> None:
        """Take leave in good order."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(Frame(Kind.END).packed())
            connection.close()

    @property
    def _connections(self) -> list[socket.socket]:
        return [connection for connection in (self.steps, self.control) if connection is not None]


@dataclass(slots=True, eq=False)
class Guest:
    """A connection somebody opened; ``peer`` once we know who."""

    connection: socket.socket
    until: float
    asked: str = field(default_factory=challenge)
    inflow: Inflow = field(default_factory=lambda: Inflow(STRANGERS_BYTES))
    peer: Peer | None = None


class Hub:
    """Listens from :meth:`start` to :meth:`close`. The training thread never waits for it.

    Parameters
    ----------
    world_size
        Ranks of the run, this one included.
    place
        Where it listens. By default on the loopback, until :meth:`open_up`.

    Raises
    ------
    LinkError
        If it cannot listen there.
    """

    def __init__(self, world_size: int, place: Place | None = None) -> None:
        self.world_size = world_size
        self.place = place or Place()
        self.inbox = Inbox(range(1, world_size))
        self.peers: dict[int, Peer] = {}
        self.lap = 0
        self._orders = 0
        self._door = threading.Lock()
        known = own_secret()
        self.secret = known or secrets.token_hex(32)
        self._told = "" if known else self.secret
        self._listener = listen(self.place)
        self._listener.setblocking(False)
        self.address = self._address()
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.PollSelector()
        self._strangers: dict[Guest, None] = {}
        self._resting_until: float | None = None
        self._everywhere = threading.Event()
        self._wanted_everywhere = False
        self._said: set[str] = set()
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

    def ordered(self) -> tuple[Mapping[int, Peer], int]:
        """One order more is given: who is to be told, and its number; whoever comes later learns that it is over."""
        with self._door:
            self._orders += 1
            return self.linked(), self._orders

    def open_up(self, deadline_s: float = 5.0) -> bool:
        """Listen for other machines, too: one of the run's ranks is there. Whether it does after ``deadline_s``."""
        if self.address.hosts != (LOOPBACK,) or self.place.host:
            return True
        self._wanted_everywhere = True
        self._ring()
        return self._everywhere.wait(deadline_s)

    def close(self, deadline_s: float = 1.0) -> None:
        """Take leave of everybody, within ``deadline_s`` seconds; idempotent. Takes no lock."""
        if not self._closing:
            self._closing = True
            self._ring()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def forked(self) -> None:
        """In a forked child: the connections are the parent's; close our copies, so that their end can be seen."""
        for connection in (self._listener, self._bell, self._rope):
            connection.close()
        for peer in self.peers.values():
            peer.forget()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # the thread may be gone already
            self._rope.send(b"!")

    def _loop(self) -> None:
        tireless(self._serve, self._failed)
        self._part()

    def _failed(self, error: BaseException) -> None:
        say(logging.WARNING, "the link of rank 0 goes on after a failure: %s", described(error))

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._bell:
                    self._bell.recv(CHUNK)
                elif isinstance(key.data, Guest):
                    self._read(key.data)
            self._look_around()

    def _pause(self) -> float | None:
        """Seconds until something is due though nobody says anything."""
        due = [guest.until for guest in self._strangers] + [self._resting_until or 0.0] * bool(self._resting_until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _look_around(self) -> None:
        now = time.monotonic()
        for guest in [guest for guest in self._strangers if guest.until <= now]:
            self._drop(guest)
        if self._resting_until is not None and now >= self._resting_until:
            self._resting_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if self._wanted_everywhere and not self._everywhere.is_set():
            self._wanted_everywhere = False
            self._listen_everywhere()

    def _rest(self, seconds: float) -> None:
        if self._resting_until is None:
            self._selector.unregister(self._listener)
        self._resting_until = time.monotonic() + seconds

    def _listen_everywhere(self) -> None:
        """In place of the loopback; on the same port, if that can be had."""
        port = int(self._listener.getsockname()[1])
        self._rest(0.0)
        self._listener.close()
        for place in (Place(port=port), Place(port=self.place.port), None):
            try:
                self._listener = listen(place, everywhere=True) if place else listen(Place())
                break
            except LinkError as error:
                self._say_once(str(error))
        self._listener.setblocking(False)
        self.address = self._address()
        self._everywhere.set()

    def _address(self) -> Address:
        hosts = names_of(self.place, self._listener)
        return Address(this_machine(), hosts, int(self._listener.getsockname()[1]), self._told)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # usually whoever it was has gone again
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._say_once("rank 0 may not open more files: ranks that are not linked yet have to wait")
                for guest in list(self._strangers):
                    self._drop(guest)
                self._rest(FULL_S)
            return
        guest = Guest(connection, time.monotonic() + GREETING_S)
        try:
            tuned(connection).setblocking(False)
            connection.send(Frame(Kind.CHALLENGE, body=guest.asked.encode()).packed())
        except OSError:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, guest)
        self._strangers[guest] = None
        missing = self.world_size - 1 - len(self.linked())
        if len(self._strangers) > STRANGERS + 2 * missing:
            self._drop(next(iter(self._strangers)))
            self._rest(REST_S)

    def _read(self, guest: Guest) -> None:
        """Whatever it says, the others are served on."""
        try:
            data = guest.connection.recv(CHUNK if guest.peer else STRANGERS_BYTES)
            for frame in guest.inflow.feed(data):
                self._take(guest, frame)
        except BlockingIOError:
            return
        except (OSError, FrameError) as error:
            data = b""
            if guest.peer is None and isinstance(error, FrameError):
                self._say_once("somebody who is not of this run tried to connect to rank 0, and was sent away")
        except Exception as error:  # noqa: BLE001  (the seam of this thread)
            data = b""
            self._say_once(f"what a rank sent could not be taken: {type(error).__name__}: {error}")
        if not data:
            self._drop(guest)

    def _take(self, guest: Guest, frame: Frame) -> None:
        peer = guest.peer
        if peer is None:
            self._welcome(guest, identified(frame, guest.asked, self.secret, self.world_size))
        elif frame.kind is Kind.STEP:
            self.inbox.put(peer.rank, frame.moment, frame.body)
        elif frame.kind is Kind.END:
            peer.gone = True
        else:
            peer.hear(frame)

    def _welcome(self, guest: Guest, caller: Caller) -> None:
        """It is of this run. One that is known already has started anew, or lost its connection."""
        peer = self.peers.get(caller.rank)
        if peer is None or peer.gone or getattr(peer, caller.role) is not None:
            if peer is not None:
                peer.lose()
            peer = self.peers[caller.rank] = Peer(caller.rank)
        self._strangers.pop(guest, None)
        guest.peer, guest.inflow.largest = peer, LARGEST if caller.role == "steps" else SMALL
        with self._door:
            welcome = caller.welcome(guest.asked, self.secret, lap=self.lap, orders=self._orders)
            guest.connection.send(welcome.packed())
            setattr(peer, caller.role, guest.connection)
        if caller.role == "steps":
            self.inbox.join(caller.rank)

    def _drop(self, guest: Guest) -> None:
        self._selector.unregister(guest.connection)
        peer = guest.peer
        if peer is None:
            self._strangers.pop(guest, None)
            return guest.connection.close()
        if self.peers.get(peer.rank) is peer:  # not one that has started anew since
            self.inbox.leave(peer.rank)
            if not peer.gone:
                logger.warning("rank %d is gone: its share of the batch is missing from now on", peer.rank)
        return peer.lose()

    def _say_once(self, words: str) -> None:
        if words not in self._said and len(self._said) < 100:
            self._said.add(words)
            logger.warning("%s", words)

    def _part(self) -> None:
        for peer in self.peers.values():
            peer.part()
        for connection in (self._listener, self._bell, self._rope, *(guest.connection for guest in self._strangers)):
            connection.close()
        self._selector.close()
