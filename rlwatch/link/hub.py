"""Rank 0's end: a thread that takes what the other ranks send, and the training thread's part in rounds of commands."""

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

from rlwatch.error_boundary import call_or, described, run_forever, say
from rlwatch.link.limits import GREETING_S, STRANGERS
from rlwatch.link.wire import (
    LARGEST,
    LOOPBACK,
    NEW,
    PATIENCE_S,
    SMALL,
    START,
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
    StepKeyCounter,
    after,
    ballot_body,
    challenge,
    identified,
    listen,
    names_of,
    own_secret,
    read_ballot,
    send_all,
    this_machine,
    tuned,
)

MOST_STEPS = 64
MOST_BYTES = 512 * 2**20


class Inbox:
    """Payloads by moment and rank. Filled by one thread, emptied by another.

    A rank is *expected* from the start, until it leaves or keeps rank 0 waiting in vain. What nobody asks for is
    dropped: the oldest moments first, beyond ``most_steps`` of them or ``most_bytes``.
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
        """From now on ``rank`` is expected."""
        with self._lock:
            self._present.add(rank)
            self._absent.discard(rank)

    def leave(self, rank: int) -> None:
        """``rank`` will send nothing more; what it sent stays."""
        with self._lock:
            self._present.discard(rank)

    def put(self, rank: int, moment: StepKey, payload: bytes) -> None:
        """Keep what ``rank`` measured: it keeps up, and is expected. Too late for its moment, it is dropped."""
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
        """Ranks whose share of ``moment`` is still to come."""
        with self._lock:
            have = self._payloads.get(moment, {})
            gone_on = {rank for rank, newest in self._newest.items() if newest >= moment}
            return frozenset(self._present - self._absent - gone_on - have.keys())

    def take(self, moment: StepKey) -> Mapping[int, bytes]:
        """Payloads of ``moment``, by rank; older ones are dropped."""
        with self._lock:
            for older in [other for other in self._payloads if other < moment]:
                self._drop(older)
            found = self._payloads.pop(moment, {})
            self._size -= sum(map(len, found.values()))
            self._taken = moment
            return found

    def mark_absent(self, ranks: Iterable[int]) -> None:
        """Do not wait for ``ranks`` any more, until they send something."""
        with self._lock:
            self._absent.update(ranks)

    def _drop(self, moment: StepKey) -> None:
        payloads = self._payloads.pop(moment)
        self._size -= sum(map(len, payloads.values()))
        self.dropped += len(payloads)


logger = logging.getLogger("rlwatch")
CHUNK = 2**18
SEND_S = 1.0
"""A rank that does not take a few bytes for this long is given up, in seconds."""
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
        self.owing: StepKey | None = None
        self._heard: SimpleQueue[Frame | None] = SimpleQueue()

    @property
    def reachable(self) -> bool:
        """True while it can be told something."""
        return self.control is not None and not self.gone

    @property
    def waiting(self) -> bool:
        """True while words of it wait to be taken by :meth:`next_word`."""
        return not self._heard.empty()

    def send(self, frame: Frame) -> bool:
        """Send a small message at once; False if it did not go out."""
        if self.control is None or self.gone:
            return False
        try:
            send_all(self.control, frame.packed(), SEND_S)
        except OSError:
            self.lose()
            return False
        return True

    def receive(self, frame: Frame) -> None:
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

    def disconnect(self) -> None:
        """Take leave in good order."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(Frame(FrameKind.END).packed())
            connection.close()

    @property
    def _connections(self) -> list[socket.socket]:
        return [connection for connection in (self.steps, self.control) if connection is not None]


@dataclass(slots=True, eq=False)
class PendingConnection:
    """A connection somebody opened; ``peer`` once we know who."""

    connection: socket.socket
    until: float
    asked: str = field(default_factory=challenge)
    inflow: FrameDecoder = field(default_factory=lambda: FrameDecoder(STRANGERS_BYTES))
    peer: Peer | None = None


MOST_NOTES = 256
"""Notes of other ranks that may wait; of more the oldest go."""


class Hub:
    """Listens from :meth:`start` to :meth:`close`. The training thread never waits for it.

    Parameters
    ----------
    world_size
        Ranks of the run, this one included.
    place
        Where it listens. By default on the loopback, until :meth:`open_up`.
    greeting_s
        Longest somebody may stay connected without proving that it is of this run, in seconds.

    Raises
    ------
    LinkError
        If it cannot listen there.
    """

    def __init__(self, world_size: int, place: ListenAddress | None = None, *, greeting_s: float = GREETING_S) -> None:
        self.world_size = world_size
        self._greeting_s = greeting_s
        self.place = place or ListenAddress()
        self.inbox = Inbox(range(1, world_size))
        self.peers: dict[int, Peer] = {}
        self.notes: deque[tuple[int, bytes]] = deque(maxlen=MOST_NOTES)
        """What ranks told of themselves and nobody has taken: rank and body."""
        self.lap = 0
        self._orders = 0
        self._door = threading.Lock()
        known = own_secret()
        self.secret = known or secrets.token_hex(32)
        self._shared_secret = "" if known else self.secret
        self._listener = listen(self.place)
        self._listener.setblocking(False)
        self.address = self._address()
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.PollSelector()
        self._strangers: dict[PendingConnection, None] = {}
        self._resting_until: float | None = None
        self._everywhere = threading.Event()
        self._wanted_everywhere = False
        self._warned: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="rlwatch-hub", daemon=True)

    def start(self) -> None:
        """Begin to take connections."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread.start()

    @property
    def listens_at(self) -> tuple[str, int]:
        """Host and port of the interface it is bound to; ``0.0.0.0`` or ``::`` for all of them."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def strangers(self) -> int:
        """Connections of those who have not proven that they are of this run."""
        return len(self._strangers)

    @property
    def resting(self) -> bool:
        """True while it takes no new connections, so that training keeps its time and files."""
        return self._resting_until is not None

    def linked(self) -> Mapping[int, Peer]:
        """The ranks that can be told something. One that has been welcomed is among them: it may come to a boundary
        before the hub's thread has noted its connection, and would be taken for missing.
        """
        with self._door:
            return self._reachable()

    def _reachable(self) -> dict[int, Peer]:
        return {rank: peer for rank, peer in list(self.peers.items()) if peer.reachable}

    def ordered(self) -> tuple[Mapping[int, Peer], int]:
        """One order more is given: who is to be told, and its number; whoever comes later learns that it is over."""
        with self._door:
            self._orders += 1
            return self._reachable(), self._orders

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
        run_forever(self._serve, self._failed)
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
                elif isinstance(key.data, PendingConnection):
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
        for place in (ListenAddress(port=port), ListenAddress(port=self.place.port), None):
            try:
                self._listener = listen(place, everywhere=True) if place else listen(ListenAddress())
                break
            except LinkError as error:
                self._say_once(str(error))
        self._listener.setblocking(False)
        self.address = self._address()
        self._everywhere.set()

    def _address(self) -> HubAddress:
        hosts = names_of(self.place, self._listener)
        return HubAddress(this_machine(), hosts, int(self._listener.getsockname()[1]), self._shared_secret)

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
        guest = PendingConnection(connection, time.monotonic() + self._greeting_s)
        try:
            tuned(connection).setblocking(False)
            connection.send(Frame(FrameKind.CHALLENGE, body=guest.asked.encode()).packed())
        except OSError:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, guest)
        self._strangers[guest] = None
        missing = self.world_size - 1 - len(self.linked())
        if len(self._strangers) > STRANGERS + 2 * missing:  # whoever has been there longest goes
            self._drop(next(iter(self._strangers)))
            self._rest(REST_S)

    def _read(self, guest: PendingConnection) -> None:
        """Whatever it says, the others are served on."""
        if not call_or(lambda: self._received(guest), lambda error: self._untaken(guest, error)):
            self._drop(guest)

    def _received(self, guest: PendingConnection) -> bool:
        """False once it has closed the connection."""
        data = guest.connection.recv(CHUNK if guest.peer else STRANGERS_BYTES)
        for frame in guest.inflow.feed(data):
            self._take(guest, frame)
        return bool(data)

    def _untaken(self, guest: PendingConnection, error: Exception) -> bool:
        """True where it only has nothing to say yet."""
        if isinstance(error, FrameError):
            if guest.peer is None:
                self._say_once("somebody who is not of this run tried to connect to rank 0, and was sent away")
        elif not isinstance(error, OSError):
            self._say_once(f"what a rank sent could not be taken: {described(error)}")
        return isinstance(error, BlockingIOError)

    def _take(self, guest: PendingConnection, frame: Frame) -> None:
        peer = guest.peer
        if peer is None:
            self._welcome(guest, identified(frame, guest.asked, self.secret, self.world_size))
        elif frame.kind is FrameKind.STEP:
            self.inbox.put(peer.rank, frame.moment, frame.body)
        elif frame.kind is FrameKind.END:
            peer.gone = True
        elif frame.kind is FrameKind.NOTE:
            self.notes.append((peer.rank, frame.body))
        else:
            peer.receive(frame)

    def _welcome(self, guest: PendingConnection, caller: Caller) -> None:
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

    def _drop(self, guest: PendingConnection) -> None:
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
        if words not in self._warned and len(self._warned) < 100:
            self._warned.add(words)
            logger.warning("%s", words)

    def _part(self) -> None:
        for peer in self.peers.values():
            peer.disconnect()
        for connection in (self._listener, self._bell, self._rope, *(guest.connection for guest in self._strangers)):
            connection.close()
        self._selector.close()


ACTING_S = 1800.0
"""Longest rank 0 waits for the others to say that they acted (a checkpoint may take its time), in seconds."""
PLACE_S = 5.0
"""Longest rank 0 waits to hear where the others are, in seconds: their threads answer whatever training does."""


@dataclass(slots=True)
class _Round:
    """Round that rank 0 asks all ranks to at one place; ``meet`` is the earliest moment at which they meet."""

    turn: int
    meet: StepKey
    asked: dict[int, Peer] = field(default_factory=dict)
    places: dict[int, StepKey] = field(default_factory=dict)
    refusal: str | None = None
    ballot: int = 0

    def send(self, frame: Frame) -> None:
        """To all who were asked."""
        for peer in self.asked.values():
            peer.send(frame)

    def next_word(self, peer: Peer, end: float, *kinds: FrameKind) -> Frame | None:
        """Of ``peer`` in this round; None when it is gone or says nothing until ``end``."""
        while (frame := peer.next_word(end - time.monotonic())) is not None:
            if frame.turn == self.turn and frame.kind in kinds:
                return frame
        return None


class Chair:
    """The training thread of rank 0 over a :class:`~rlwatch.link.hub.Hub`; ``rounds`` counts those it has begun."""

    def __init__(
        self, hub: Hub, patience_s: float = PATIENCE_S, acting_s: float = ACTING_S, place_s: float = PLACE_S
    ) -> None:
        self._hub = hub
        self.patience_s = patience_s
        self.place_s = place_s
        self.rounds = 0
        self._acting_s = acting_s
        self._pace = StepKeyCounter()
        self._here: StepKey | None = None
        self._earliest = START
        self._round: _Round | None = None
        self._order: _Round | None = None
        self._calling = threading.Lock()
        self._in_vain = False

    @property
    def called(self) -> bool:
        """True while all ranks are asked to a boundary."""
        return self._round is not None

    @property
    def earliest(self) -> StepKey:
        """The first boundary that this rank has not passed."""
        return self._earliest

    def call(self) -> None:
        """On another thread, as soon as there are commands: find the first boundary that nobody has passed, so that all
        meet at their next one. Where a rank cannot come, the training thread learns so when it is at its boundary.
        """
        with self._calling:
            if self._round is None and self._order is None and not self._in_vain:
                found = self._called(self._here or self._earliest)
                self._in_vain = found.refusal is not None
                if self._in_vain:
                    found.send(Frame(FrameKind.OVER, turn=found.turn))
                else:
                    self._round = found

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """True where all ranks meet at this boundary, at ``step``; ``wanted``: there are commands. Else it is passed,
        unless this rank stays at it (it is paused).

        With commands rank 0 asks where the others are: where one has passed already, all meet at a later boundary.
        """
        with self._calling:
            return self._meets(step, wanted=wanted, staying=staying)

    def _meets(self, step: int, *, wanted: bool, staying: bool) -> bool:
        self._in_vain = False
        if self._here is None or self._here.step != step:
            self.leave()
            self._here = self._pace.next(step)
            self._hub.lap = self._pace.lap
        if self._round is not None and self._round.meet < self._earliest:
            self.over()  # training left that boundary in the middle of a round
        if self._round is None and self._order is None and wanted:
            self._round = self._called(self._here)
        if self._round is not None and self._round.meet <= self._here:
            return True
        if not staying:
            self.leave()
        return False

    def leave(self) -> None:
        """The boundary is passed."""
        if self._here is not None:
            self._earliest, self._here = after(self._here), None

    def offer(self, body: bytes) -> None:
        """Tell the ranks that meet here what is wanted."""
        if self._round is not None and self._round.refusal is None:
            self._round.send(Frame(FrameKind.OFFER, self._round.meet, body, self._round.turn))

    def order(self, body: bytes) -> None:
        """At a place of order: say what is wanted, usually nothing. Something is for all, who are waited for."""
        with self._calling:
            found = self._order = self._begun(START)
        if body:
            self._await_all()
            found.refusal, found.asked = self._all_linked()
        linked, number = self._hub.ordered()
        for peer in linked.values():
            peer.send(
                Frame(FrameKind.ORDER, StepKey(0, number, 0), body if peer.rank in found.asked else b"", found.turn)
            )

    def decide(self, refusal: str | None) -> str | None:
        """None if this rank and all others agree, else why not; all ranks are told."""
        under_way = self._order or self._round
        if under_way is None:
            return refusal
        under_way.ballot += 1
        verdict = refusal or under_way.refusal or self._objection(under_way)
        under_way.send(Frame(FrameKind.VERDICT, START, ballot_body(under_way.ballot, verdict), under_way.turn))
        return verdict

    def over(self) -> None:
        """Nothing more is asked in this round: whoever waits need not."""
        under_way = self._order or self._round
        if under_way is not None:
            under_way.send(Frame(FrameKind.OVER, turn=under_way.turn))
        if self._order is not None:
            self._order = None  # a round that was put off to a later boundary goes on
        else:
            self._round = None

    def _begun(self, meet: StepKey) -> _Round:
        self.rounds += 1
        return _Round(self.rounds, meet)

    def _called(self, here: StepKey) -> _Round:
        """A round at the first boundary that nobody has passed."""
        found = self._begun(here)
        found.refusal, found.asked = self._all_linked()
        if found.refusal is None:
            found.send(Frame(FrameKind.ASK, here, turn=found.turn))
            end = time.monotonic() + self.place_s
            for peer in found.asked.values():
                found.refusal = self._not_coming(found, peer, end)
                if found.refusal is not None:
                    return found
            found.meet = max(here, *found.places.values())
            found.send(Frame(FrameKind.MEET, found.meet, turn=found.turn))
        return found

    def _not_coming(self, found: _Round, peer: Peer, end: float) -> str | None:
        """Reason to give up hope that ``peer`` comes to a boundary soon; else its place is kept."""
        frame = None if peer.silent else found.next_word(peer, end, FrameKind.PLACE)
        if frame is None:
            peer.silent = not peer.gone
            return f"rank {peer.rank} does not answer"
        if peer.owing is not None and frame.moment <= peer.owing:
            return f"rank {peer.rank} has not come to a boundary since it was last waited for"
        if frame.body == NEW and self._earliest > START:
            return f"rank {peer.rank} has not come to its first boundary yet (every rank must call obey)"
        peer.owing, found.places[peer.rank] = None, frame.moment
        return None

    def _all_linked(self) -> tuple[str | None, dict[int, Peer]]:
        linked = dict(self._hub.linked())
        for rank in range(1, self._hub.world_size):
            if rank not in linked:
                return f"rank {rank} is not connected, and all ranks must act together", {}
        return None, linked

    def _await_all(self) -> None:
        """An order can be the first thing ranks do: give those time to link who are about to."""
        end = time.monotonic() + self.patience_s
        while len(self._hub.linked()) < self._hub.world_size - 1 and time.monotonic() < end:
            if any(peer.gone for peer in list(self._hub.peers.values())):
                return
            time.sleep(0.01)

    def _objection(self, under_way: _Round) -> str | None:
        end = time.monotonic() + (self.patience_s if under_way.ballot == 1 else self._acting_s)
        votes = [self._vote(under_way, peer, end) for peer in under_way.asked.values()]
        return next((vote for vote in votes if vote is not None), None)

    @staticmethod
    def _vote(under_way: _Round, peer: Peer, end: float) -> str | None:
        """Vote of ``peer`` in this ballot: None for yes."""
        while (frame := under_way.next_word(peer, end, FrameKind.VOTE, FrameKind.PASSED)) is not None:
            if frame.kind is FrameKind.PASSED:
                return f"rank {peer.rank} had gone on already"
            ballot, refusal = read_ballot(frame.body)
            if ballot == under_way.ballot:
                return None if refusal is None else f"rank {peer.rank}: {refusal}"
        if under_way.ballot == 1:
            peer.owing = under_way.places.get(peer.rank)
        return f"rank {peer.rank} does not answer"
