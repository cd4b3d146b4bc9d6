"""Rank 0's end of the connections between ranks: a thread that accepts the other ranks and receives their data.

:class:`Admission` accepts connections that prove that they belong to the run, :class:`Inbox` keeps what ranks measured,
and a :class:`Peer` is a connected rank. Votes on commands are in :mod:`~rlwatch.link.rounds`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from rlwatch.error_boundary import call_or, described, log_message, run_forever
from rlwatch.link.limits import GREETING_S, STRANGERS
from rlwatch.link.wire import (
    LARGEST,
    LOOPBACK,
    SMALL,
    STRANGERS_BYTES,
    Caller,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
    HubAddress,
    LinkError,
    ListenAddress,
    StepKey,
    challenge,
    identified,
    listen,
    names_of,
    own_secret,
    send_all,
    this_machine,
    tuned,
)

MOST_STEPS = 64
MOST_BYTES = 512 * 2**20


class Inbox:
    """Measurements that other ranks sent to rank 0, by step and rank. One thread fills it and another one empties it.

    A rank is *expected* from the start, until it leaves, or until rank 0 has waited for it in vain. Data that are not
    read are dropped, the oldest steps first.

    Parameters
    ----------
    ranks
        Ranks that are expected.
    most_steps, most_bytes
        Largest number of steps, and of bytes, that are kept.
    """

    def __init__(
        self, ranks: Iterable[int] = (), *, most_steps: int = MOST_STEPS, most_bytes: int = MOST_BYTES
    ) -> None:
        self._most_steps, self._most_bytes = most_steps, most_bytes
        self._lock = threading.Lock()
        self._payloads: dict[StepKey, dict[int, bytes]] = {}
        self._size = 0
        self._newest: dict[int, StepKey] = {}
        self._taken: StepKey | None = None
        self._present = set(ranks)
        self._absent: set[int] = set()
        self.dropped = 0

    def join(self, rank: int) -> None:
        """Expect measurements of ``rank`` from now on."""
        with self._lock:
            self._present.add(rank)
            self._absent.discard(rank)

    def leave(self, rank: int) -> None:
        """Expect no further measurements of ``rank``; those that it has sent are kept."""
        with self._lock:
            self._present.discard(rank)

    def put(self, rank: int, moment: StepKey, payload: bytes) -> None:
        """Keep the measurements (``payload``) of ``rank`` at the step ``moment``; the rank is expected again.

        They are dropped, and counted in ``dropped``, if the step was already taken.
        """
        with self._lock:
            self._newest[rank] = moment
            if self._taken is not None and moment <= self._taken:
                self.dropped += 1
                return
            self._absent.discard(rank)
            self._payloads.setdefault(moment, {})[rank] = payload
            self._size += len(payload)
            while self._payloads and (len(self._payloads) > self._most_steps or self._size > self._most_bytes):
                self._drop(min(self._payloads))

    def awaited(self, moment: StepKey) -> frozenset[int]:
        """Return the ranks whose measurements of the step ``moment`` are still expected."""
        with self._lock:
            have = self._payloads.get(moment, {})
            gone_on = {rank for rank, newest in self._newest.items() if newest >= moment}
            return frozenset(self._present - self._absent - gone_on - have.keys())

    def take(self, moment: StepKey) -> Mapping[int, bytes]:
        """Remove and return the measurements of the step ``moment``, by rank; older ones are dropped."""
        with self._lock:
            for older in [other for other in self._payloads if other < moment]:
                self._drop(older)
            found = self._payloads.pop(moment, {})
            self._size -= sum(map(len, found.values()))
            self._taken = moment
            return found

    def mark_absent(self, ranks: Iterable[int]) -> None:
        """Do not expect ``ranks`` any more, until they send something."""
        with self._lock:
            self._absent.update(ranks)

    def _drop(self, moment: StepKey) -> None:
        payloads = self._payloads.pop(moment)
        self._size -= sum(map(len, payloads.values()))
        self.dropped += len(payloads)


logger = logging.getLogger("rlwatch")
CHUNK = 2**18
SEND_S = 1.0
"""A rank that does not accept a few bytes for this long, in seconds, is disconnected."""
REST_S = 0.01
"""Seconds for which rank 0 accepts no connections after it rejected one that does not belong to the run.

A flood of such connections then costs its training next to nothing, and ranks of the run, which wait in the system's
queue meanwhile, little.
"""
FULL_S = 1.0
"""Seconds without new connections after the process ran out of file descriptors."""


class Peer:
    """One of the other ranks as rank 0 sees it, with its two connections.

    ``steps`` carries its measurements and ``control`` its votes on commands; None until connected. ``gone``: it has
    disconnected. ``silent``: rank 0 waited for it in vain, and it has sent nothing since. ``owing``: point of training
    at which it was asked to vote and did not come, or None.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: socket.socket | None = None
        self.control: socket.socket | None = None
        self.gone = False
        self.silent = False
        self.owing: StepKey | None = None
        self._heard: SimpleQueue[Frame | None] = SimpleQueue()

    @property
    def reachable(self) -> bool:
        """Return whether messages can be sent to the rank."""
        return self.control is not None and not self.gone

    @property
    def waiting(self) -> bool:
        """Return whether messages of the rank wait to be read by :meth:`next_word`."""
        return not self._heard.empty()

    def send(self, frame: Frame) -> bool:
        """Send a small message to the rank at once; return False if that failed."""
        if self.control is None or self.gone:
            return False
        try:
            send_all(self.control, frame.packed(), SEND_S)
        except OSError:
            self.lose()
            return False
        return True

    def receive(self, frame: Frame) -> None:
        """Keep a message of the rank about commands for :meth:`next_word`; called on the hub's thread."""
        self.silent = False
        self._heard.put(frame)

    def next_word(self, seconds: float) -> Frame | None:
        """Return the next message of the rank about commands; None if the rank is gone, or after ``seconds`` without
        one.
        """
        if self.gone and self._heard.empty():
            return None
        try:
            return self._heard.get(timeout=max(0.0, seconds))
        except Empty:
            return None

    def lose(self) -> None:
        """Close the connections of a rank that is gone, and end any wait for it.

        The sockets remain open as long as this object lives: another thread may be about to write, and their file
        descriptors must not be reused before.
        """
        self.gone = True
        self._heard.put(None)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the hub's thread then sees its end

    def forget(self) -> None:
        """In a forked child process, close the copies of the connections, without any effect on the parent's."""
        for connection in self._connections:
            connection.close()

    def disconnect(self) -> None:
        """Send the rank a message that rank 0 ends, and close the connections."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(Frame(FrameKind.END).packed())
            connection.close()

    @property
    def _connections(self) -> list[socket.socket]:
        return [connection for connection in (self.steps, self.control) if connection is not None]


@dataclass(slots=True, eq=False)
class PendingConnection:
    """A new connection to rank 0; ``peer`` is None until the connection has proven which rank of the run it is.

    ``until``: monotonic time (seconds) by which it must have proven it. ``asked``: random text that rank 0 sent, to
    which the proof refers. ``inflow``: decoder of its messages.
    """

    connection: socket.socket
    until: float
    asked: str = field(default_factory=challenge)
    inflow: FrameDecoder = field(default_factory=lambda: FrameDecoder(STRANGERS_BYTES))
    peer: Peer | None = None


class Admission:
    """Connections that have not proven yet that they belong to the run, and the check of the proof. Used from one
    thread.

    The proof is made with the run's secret. ``greeting_s``: seconds for which a connection may stay open without it.
    """

    def __init__(self, greeting_s: float) -> None:
        known = own_secret()
        self.secret = known or secrets.token_hex(32)
        self.shared_secret = "" if known else self.secret
        """The secret, where other ranks learn it from rank 0's address; empty where they have it already."""
        self._greeting_s = greeting_s
        self._strangers: dict[PendingConnection, None] = {}

    def __len__(self) -> int:
        return len(self._strangers)

    def waiting(self) -> list[PendingConnection]:
        """Return the connections that have not proven yet that they belong to the run, the oldest first."""
        return list(self._strangers)

    def challenge(self, connection: socket.socket) -> PendingConnection | None:
        """Send a new connection a random text that only a rank of the run can answer; return the connection, or None if
        it has closed already.
        """
        guest = PendingConnection(connection, time.monotonic() + self._greeting_s)
        try:
            tuned(connection).setblocking(False)
            connection.send(Frame(FrameKind.CHALLENGE, body=guest.asked.encode()).packed())
        except OSError:
            connection.close()
            return None
        self._strangers[guest] = None
        return guest

    def overdue(self, now: float) -> list[PendingConnection]:
        """Return the connections that have not proven in time that they belong to the run; ``now``: monotonic time,
        seconds.
        """
        return [guest for guest in self._strangers if guest.until <= now]

    def identified(self, guest: PendingConnection, answer: Frame, world_size: int) -> Caller:
        """Return the rank that answered the challenge on the connection ``guest``.

        ``answer``: its message. ``world_size``: number of ranks of the run. Raises ``FrameError`` if the answer proves
        nothing.
        """
        return identified(answer, guest.asked, self.secret, world_size)

    def remove(self, guest: PendingConnection) -> None:
        """Remove the connection ``guest``, because its rank is identified or it is closed."""
        self._strangers.pop(guest, None)


MOST_NOTES = 256
"""Largest number of unread notes of other ranks; the oldest ones are dropped."""


class Hub:
    """Rank 0's server for the other ranks; it runs on its own thread from :meth:`start` to :meth:`close`.

    The training thread never waits for it.

    Parameters
    ----------
    world_size
        Number of ranks of the run, with this one.
    place
        Address to listen on. By default the loopback, until :meth:`open_up`.
    greeting_s
        Seconds for which a connection may stay open without proof that it belongs to this run.

    Raises
    ------
    LinkError
        If it cannot listen at this address.
    """

    def __init__(self, world_size: int, place: ListenAddress | None = None, *, greeting_s: float = GREETING_S) -> None:
        self.world_size = world_size
        self.place = place or ListenAddress()
        self.inbox = Inbox(range(1, world_size))
        self.peers: dict[int, Peer] = {}
        self.notes: deque[tuple[int, bytes]] = deque(maxlen=MOST_NOTES)
        """Notes that ranks sent and that were not read yet: rank and body."""
        self.lap = 0
        self._orders = 0
        self._door = threading.Lock()
        self._admission = Admission(greeting_s)
        self._listener = listen(self.place)
        self._listener.setblocking(False)
        self.address = self._address()
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.PollSelector()
        self._resting_until: float | None = None
        self._everywhere = threading.Event()
        self._wanted_everywhere = False
        self._warned: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="rlwatch-hub", daemon=True)

    def start(self) -> None:
        """Start the thread that accepts connections of the other ranks."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread.start()

    @property
    def listens_at(self) -> tuple[str, int]:
        """Host and port on which the server listens; the host is ``0.0.0.0`` or ``::`` for all interfaces."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def secret(self) -> str:
        """Secret that all ranks of the run share and that a connection must prove to know."""
        return self._admission.secret

    @property
    def strangers(self) -> int:
        """Number of open connections that have not proven that they belong to this run."""
        return len(self._admission)

    @property
    def resting(self) -> bool:
        """Return whether the server accepts no new connections for the moment, to spare training time and file
        descriptors.
        """
        return self._resting_until is not None

    def linked(self) -> Mapping[int, Peer]:
        """Return rank -> connection, for the ranks to which messages can be sent.

        A rank that was accepted is included at once: it may reach a point at which commands are executed before the
        server's thread has noted its connection, and would be taken for missing.
        """
        with self._door:
            return self._reachable()

    def _reachable(self) -> dict[int, Peer]:
        return {rank: peer for rank, peer in list(self.peers.items()) if peer.reachable}

    def ordered(self) -> tuple[Mapping[int, Peer], int]:
        """Begin an order of rank 0: commands for a point in training that every rank passes.

        Return rank -> connection of its recipients, and the number of the order. Ranks that connect later learn that
        this order is over.
        """
        with self._door:
            self._orders += 1
            return self._reachable(), self._orders

    def open_up(self, deadline_s: float = 5.0) -> bool:
        """Listen for ranks on other machines, too; return whether that has begun after ``deadline_s`` seconds."""
        if self.address.hosts != (LOOPBACK,) or self.place.host:
            return True
        self._wanted_everywhere = True
        self._ring()
        return self._everywhere.wait(deadline_s)

    def close(self, deadline_s: float = 1.0) -> None:
        """Disconnect all ranks and end the thread, within ``deadline_s`` seconds; idempotent. Takes no lock."""
        if not self._closing:
            self._closing = True
            self._ring()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def forked(self) -> None:
        """In a forked child process, close the copies of the connections, so that the parent's end can be noticed."""
        for connection in (self._listener, self._bell, self._rope):
            connection.close()
        for peer in self.peers.values():
            peer.forget()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # the thread may be gone already
            self._rope.send(b"!")

    def _loop(self) -> None:
        run_forever(self._serve, self._failed)
        self._part()

    def _failed(self, error: BaseException) -> None:
        log_message(logging.WARNING, "the link of rank 0 goes on after a failure: %s", described(error))

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._bell:
                    self._bell.recv(CHUNK)
                elif isinstance(key.data, PendingConnection):
                    self._read(key.data)
            self._look_around()

    def _pause(self) -> float | None:
        """Return the seconds until something is due without incoming data; None: nothing is."""
        due = [guest.until for guest in self._admission.waiting()] + [self._resting_until or 0.0] * bool(
            self._resting_until
        )
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _look_around(self) -> None:
        now = time.monotonic()
        for guest in self._admission.overdue(now):
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
        """Listen on all addresses instead of the loopback; on the same port, if possible."""
        port = int(self._listener.getsockname()[1])
        self._rest(0.0)
        self._listener.close()
        for place in (ListenAddress(port=port), ListenAddress(port=self.place.port), None):
            try:
                self._listener = listen(place, everywhere=True) if place else listen(ListenAddress())
                break
            except LinkError as error:
                self._warn_once(str(error))
        self._listener.setblocking(False)
        self.address = self._address()
        self._everywhere.set()

    def _address(self) -> HubAddress:
        hosts = names_of(self.place, self._listener)
        return HubAddress(this_machine(), hosts, int(self._listener.getsockname()[1]), self._admission.shared_secret)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # usually the other side has disconnected again
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._warn_once("rank 0 may not open more files: ranks that are not linked yet have to wait")
                for guest in self._admission.waiting():
                    self._drop(guest)
                self._rest(FULL_S)
            return
        stranger = self._admission.challenge(connection)
        if stranger is None:
            return
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        missing = self.world_size - 1 - len(self.linked())
        if len(self._admission) > STRANGERS + 2 * missing:  # the oldest connection is closed
            self._drop(self._admission.waiting()[0])
            self._rest(REST_S)

    def _read(self, guest: PendingConnection) -> None:
        """Read from a connection; its errors do not affect the others."""
        if not call_or(lambda: self._received(guest), lambda error: self._untaken(guest, error)):
            self._drop(guest)

    def _received(self, guest: PendingConnection) -> bool:
        """Take the frames of a connection; return False once it is closed."""
        data = guest.connection.recv(CHUNK if guest.peer else STRANGERS_BYTES)
        for frame in guest.inflow.feed(data):
            self._take(guest, frame)
        return bool(data)

    def _untaken(self, guest: PendingConnection, error: Exception) -> bool:
        """Report an error of a connection; returns True if there was merely nothing to read yet."""
        if isinstance(error, FrameError):
            if guest.peer is None:
                self._warn_once("somebody who is not of this run tried to connect to rank 0, and was sent away")
        elif not isinstance(error, OSError):
            self._warn_once(f"what a rank sent could not be taken: {described(error)}")
        return isinstance(error, BlockingIOError)

    def _take(self, guest: PendingConnection, frame: Frame) -> None:
        peer = guest.peer
        if peer is None:
            self._welcome(guest, self._admission.identified(guest, frame, self.world_size))
        elif frame.kind is FrameKind.STEP:
            self.inbox.put(peer.rank, frame.moment, frame.body)
        elif frame.kind is FrameKind.END:
            peer.gone = True
        elif frame.kind is FrameKind.NOTE:
            self.notes.append((peer.rank, frame.body))
        else:
            peer.receive(frame)

    def _welcome(self, guest: PendingConnection, caller: Caller) -> None:
        """Accept a rank of this run. If it is known already, it was restarted or lost its connection."""
        peer = self.peers.get(caller.rank)
        if peer is None or peer.gone or getattr(peer, caller.role) is not None:
            if peer is not None:
                peer.lose()
            peer = self.peers[caller.rank] = Peer(caller.rank)
        self._admission.remove(guest)
        guest.peer, guest.inflow.largest = peer, LARGEST if caller.role == "steps" else SMALL
        with self._door:
            welcome = caller.welcome(guest.asked, self.secret, lap=self.lap, orders=self._orders)
            guest.connection.send(welcome.packed())
            setattr(peer, caller.role, guest.connection)
        if caller.role == "steps":
            self.inbox.join(caller.rank)

    def _drop(self, guest: PendingConnection) -> None:
        self._selector.unregister(guest.connection)
        peer = guest.peer
        if peer is None:
            self._admission.remove(guest)
            return guest.connection.close()
        if self.peers.get(peer.rank) is peer:  # not one that has started anew since
            self.inbox.leave(peer.rank)
            if not peer.gone:
                logger.warning("rank %d is gone: its share of the batch is missing from now on", peer.rank)
        return peer.lose()

    def _warn_once(self, words: str) -> None:
        if words not in self._warned and len(self._warned) < 100:
            self._warned.add(words)
            logger.warning("%s", words)

    def _part(self) -> None:
        for peer in self.peers.values():
            peer.disconnect()
        for connection in (
            self._listener,
            self._bell,
            self._rope,
            *(guest.connection for guest in self._admission.waiting()),
        ):
            connection.close()
        self._selector.close()
