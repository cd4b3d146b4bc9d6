"""Commands go round: all ranks carry one out at the same boundary, or none does, and nobody waits where none is.

A *boundary* is a place in the training loop that every rank comes to, where a command may be carried out. Usually
there is none, and a rank passes without a word to anybody: it looks at a number in its own memory. When rank 0 has
commands it asks every rank at which boundary it could still stop. Each answers at once, on a thread of its own,
whatever its training thread does, and from then on waits at its next boundary until it hears where all meet: at the
first that none has passed. So whoever comes first, by whatever time, only a command makes ranks wait for each other,
and only at the boundary it is carried out at. There every rank checks, votes, hears one verdict, acts and votes again.

A *place of order* is one that every rank passes where only rank 0 knows whether something is to be done (a
checkpoint keeps a reference, training resumes from one). The others wait there to hear that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rlwatch.link.frames import SMALL, Frame, FrameError, Inflow, Kind
from rlwatch.link.hub import Hub, Peer
from rlwatch.link.pace import START, Moment, Pace
from rlwatch.link.sockets import send_all
from rlwatch.seam import described, say

logger = logging.getLogger("rlwatch")
PATIENCE_S = 60.0
"""Longest a rank waits for others to come to where all meet, in seconds."""
ACTING_S = 1800.0
"""Longest rank 0 waits for the others to say that they acted (a checkpoint may take its time), in seconds."""
VERDICT_S = 3600.0
"""Longest a rank waits for the verdict, in seconds: by itself it must neither act nor go on. Rank 0 may have to wait
for others, and to finish what it is doing itself.
"""
PLACE_S = 5.0
"""Longest rank 0 waits to hear where the others are, in seconds: their threads answer whatever training does."""
NEW = b"new"
"""Of a rank that has not come to any boundary yet."""
UNDECIDED = "rank 0 gave no verdict"


@dataclass(slots=True)
class _Round:
    """What rank 0 asks of all ranks at one place; ``meet`` is the earliest moment at which they meet."""

    turn: int
    meet: Moment
    asked: dict[int, Peer] = field(default_factory=dict)
    places: dict[int, Moment] = field(default_factory=dict)
    refusal: str | None = None
    ballot: int = 0

    def tell(self, frame: Frame) -> None:
        """To all who were asked."""
        for peer in self.asked.values():
            peer.tell(frame)

    def next_word(self, peer: Peer, end: float, *kinds: Kind) -> Frame | None:
        """Of ``peer`` in this round; None when it is gone or says nothing until ``end``."""
        while (frame := peer.next_word(end - time.monotonic())) is not None:
            if frame.turn == self.turn and frame.kind in kinds:
                return frame
        return None


class Chair:
    """The training thread of rank 0 over a :class:`~rlwatch.link.hub.Hub`."""

    def __init__(self, hub: Hub, patience_s: float = PATIENCE_S, acting_s: float = ACTING_S) -> None:
        self._hub = hub
        self._patience_s = patience_s
        self._acting_s = acting_s
        self._pace = Pace()
        self._here: Moment | None = None
        self._earliest = START
        self._turns = 0
        self._round: _Round | None = None
        self._order: _Round | None = None
        self._calling = threading.Lock()
        self._in_vain = False

    def call(self) -> None:
        """On another thread, as soon as there are commands: find the first boundary that nobody has passed, so that all
        meet at their next one. Where a rank cannot come, the training thread learns so when it is at its boundary.
        """
        with self._calling:
            if self._round is None and self._order is None and not self._in_vain:
                found = self._called(self._here or self._earliest)
                self._in_vain = found.refusal is not None
                if self._in_vain:
                    found.tell(Frame(Kind.OVER, turn=found.turn))
                else:
                    self._round = found

    def meets(self, step: int, *, wanted: bool, staying: bool = False) -> bool:
        """Whether all ranks meet at this boundary, at ``step``; ``wanted``: there are commands. If not, it is passed,
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
            self._earliest, self._here = _after(self._here), None

    def offer(self, body: bytes) -> None:
        """Tell the ranks that meet here what is wanted."""
        if self._round is not None and self._round.refusal is None:
            self._round.tell(Frame(Kind.OFFER, self._round.meet, body, self._round.turn))

    def order(self, body: bytes) -> None:
        """At a place of order: say what is wanted, usually nothing. Something is for all, who are waited for."""
        with self._calling:
            found = self._order = self._begun(START)
        if body:
            self._await_all()
            found.refusal, found.asked = self._all_linked()
        linked, number = self._hub.ordered()
        for peer in linked.values():
            peer.tell(Frame(Kind.ORDER, Moment(0, number, 0), body if peer.rank in found.asked else b"", found.turn))

    def decide(self, refusal: str | None) -> str | None:
        """None if this rank and all others agree, else why not; all ranks are told."""
        under_way = self._order or self._round
        if under_way is None:
            return refusal
        under_way.ballot += 1
        verdict = refusal or under_way.refusal or self._objection(under_way)
        under_way.tell(Frame(Kind.VERDICT, START, _ballot_body(under_way.ballot, verdict), under_way.turn))
        return verdict

    def over(self) -> None:
        """Nothing more is asked in this round: whoever waits need not."""
        under_way = self._order or self._round
        if under_way is not None:
            under_way.tell(Frame(Kind.OVER, turn=under_way.turn))
        if self._order is not None:
            self._order = None  # a round that was put off to a later boundary goes on
        else:
            self._round = None

    def _begun(self, meet: Moment) -> _Round:
        self._turns += 1
        return _Round(self._turns, meet)

    def _called(self, here: Moment) -> _Round:
        """A round at the first boundary that nobody has passed."""
        found = self._begun(here)
        found.refusal, found.asked = self._all_linked()
        if found.refusal is None:
            found.tell(Frame(Kind.ASK, here, turn=found.turn))
            end = time.monotonic() + PLACE_S
            for peer in found.asked.values():
                found.refusal = self._not_coming(found, peer, end)
                if found.refusal is not None:
                    return found
            found.meet = max(here, *found.places.values())
            found.tell(Frame(Kind.MEET, found.meet, turn=found.turn))
        return found

    def _not_coming(self, found: _Round, peer: Peer, end: float) -> str | None:
        """Why there is no hope that ``peer`` comes to a boundary soon; else its place is kept."""
        frame = None if peer.silent else found.next_word(peer, end, Kind.PLACE)
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
        end = time.monotonic() + self._patience_s
        while len(self._hub.linked()) < self._hub.world_size - 1 and time.monotonic() < end:
            if any(peer.gone for peer in list(self._hub.peers.values())):
                return
            time.sleep(0.01)

    def _objection(self, under_way: _Round) -> str | None:
        end = time.monotonic() + (self._patience_s if under_way.ballot == 1 else self._acting_s)
        votes = [self._vote(under_way, peer, end) for peer in under_way.asked.values()]
        return next((vote for vote in votes if vote is not None), None)

    @staticmethod
    def _vote(under_way: _Round, peer: Peer, end: float) -> str | None:
        """What ``peer`` says of this ballot: None for yes."""
        while (frame := under_way.next_word(peer, end, Kind.VOTE, Kind.PASSED)) is not None:
            if frame.kind is Kind.PASSED:
                return f"rank {peer.rank} had gone on already"
            ballot, refusal = read_ballot(frame.body)
            if ballot == under_way.ballot:
                return None if refusal is None else f"rank {peer.rank}: {refusal}"
        if under_way.ballot == 1:
            peer.owing = under_way.places.get(peer.rank)
        return f"rank {peer.rank} does not answer"


class Member:
    """Another rank: its training thread, and a thread that listens to rank 0 for it."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._connection: socket.socket | None = None
        self._pace = Pace()
        self._here: Moment | None = None
        self._earliest = START
        self._turn = 0
        self._meet: Moment | None = None
        self._mine = 0
        self._ballot = 0
        self._said: deque[Frame] = deque(maxlen=1000)
        self._orders: dict[int, Frame] = {}
        self._order = self._orders_over = 0
        self._hoping = True
        self.open = False
        self.parted = False

    def connected(self, connection: socket.socket, *, lap: int = 0, orders: int = 0) -> None:
        """Rank 0 is in ``lap``, and ``orders`` have been given before it knew this rank."""
        with self._changed:
            self._connection, self._turn, self._meet = connection, 0, None
            self._pace.join(lap)
            self._orders_over = max(self._orders_over, orders)
            self.open, self._hoping = True, True
            self._changed.notify_all()
        threading.Thread(target=self._listen, args=(connection,), name="rlwatch-ear", daemon=True).start()

    def meets(self, step: int, *, wanted: bool = False, staying: bool = False) -> bool:
        """Whether all ranks meet at this boundary, at ``step``; else it is passed, unless this rank stays at it.

        It waits only while rank 0 is about to say where all meet; ``wanted``: and where this rank knows as well as
        rank 0 that something is due here.
        """
        passed = 0
        with self._changed:
            if self._here is None or self._here.step != step:
                self._pass()
                self._here = self._pace.next(step)
            if wanted and not self._turn and self._hoping and self.open:
                self._hoping = self._until(lambda: self._turn != 0, self._patience_s)
            if self._turn and not self._until(lambda: self._meet is not None or not self._turn, self._patience_s):
                self._turn = 0
            if self._turn and self._meet is not None and self._meet < self._earliest:
                passed, self._turn = self._turn, 0  # training left that boundary in the middle of a round
            if self._turn and self._meet is not None and self._meet <= self._here:
                self._mine, self._ballot = self._turn, 0
                return True
            if not staying:
                self._pass()
        if passed:
            self._send(Frame(Kind.PASSED, turn=passed))
        return False

    def leave(self) -> None:
        """The boundary is passed."""
        with self._changed:
            self._pass()

    def offered(self) -> bytes:
        """What rank 0 wants here, where all meet; empty if nothing, or if it does not come."""
        with self._changed:
            frame = self._hear(self._patience_s, Kind.OFFER)
            if frame is None:
                if self._turn == self._mine:
                    self._turn = 0  # what comes now comes too late, and is answered so
                    logger.warning("rank 0 asked all ranks to a boundary and did not come to it")
                self._mine = 0
            return b"" if frame is None else frame.body

    def ordered(self) -> bytes:
        """At a place of order: what rank 0 wants, usually nothing."""
        with self._changed:
            number = self._order + 1
            patience = self._patience_s if self._hoping else 0.0
            self._hoping = self._until(lambda: self._knows_order(number), patience, though_closed=True)
            self._order = number
            frame = self._orders.pop(number, None)
            if not self._hoping and patience:
                logger.warning("rank 0 did not come to where it says what a checkpoint needs; this rank goes on")
            self._mine, self._ballot = (0 if frame is None else frame.turn), 0
            return b"" if frame is None else frame.body

    def _knows_order(self, number: int) -> bool:
        lost = self._connection is not None and not self.open
        return number in self._orders or number <= self._orders_over or lost or self.parted

    def over(self) -> None:
        """Leave the round; rank 0 learns so, if it still waits for a word."""
        with self._changed:
            turn, self._mine = self._mine, 0
        if turn:
            self._send(Frame(Kind.PASSED, turn=turn))

    def vote(self, refusal: str | None) -> str | None:
        """Tell rank 0 whether this rank can and did; returns the verdict: None, or a refusal."""
        if not self._mine:
            return refusal or UNDECIDED
        self._ballot += 1
        self._send(Frame(Kind.VOTE, START, _ballot_body(self._ballot, refusal), self._mine))
        end = time.monotonic() + VERDICT_S
        with self._changed:
            while (frame := self._hear(end - time.monotonic(), Kind.VERDICT)) is not None:
                ballot, verdict = read_ballot(frame.body)
                if ballot == self._ballot:
                    return verdict
        return refusal or UNDECIDED

    def part(self) -> None:
        """Go in good order."""
        self._send(Frame(Kind.END))
        self.close()

    def deserted(self) -> None:
        """There is no rank 0 to wait for, and will be none."""
        with self._changed:
            self.parted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hear and say nothing more; rank 0 notices."""
        self.open = False
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the listening thread then sees its end
            connection.close()

    def forked(self) -> None:
        """In a forked child: close our copy and nothing else."""
        self.open = False
        if self._connection is not None:
            self._connection.close()

    def _pass(self) -> None:
        if self._here is not None:
            self._earliest, self._here = _after(self._here), None

    def _until(self, condition: Callable[[], bool], seconds: float, *, though_closed: bool = False) -> bool:
        """Wait, with the lock, for what the listening thread does; whether it did."""
        done = self._changed.wait_for(
            lambda: condition() or not (self.open or though_closed), max(0.0, min(seconds, threading.TIMEOUT_MAX))
        )
        return done and condition()

    def _hear(self, seconds: float, kind: Kind) -> Frame | None:
        """With the lock: the next word of ``kind`` in this rank's round; None if it does not come any more."""

        def found() -> Frame | None:
            return next((frame for frame in self._said if frame.turn == self._mine), None)

        while self._until(lambda: found() is not None, seconds) and (frame := found()) is not None:
            if frame.kind is not Kind.OVER:  # which stays, so that whoever asks again hears it, too
                self._said.remove(frame)
            if frame.kind in (kind, Kind.OVER):
                return frame if frame.kind is kind else None
        return None

    def _send(self, frame: Frame) -> None:
        with self._sending:
            if self.open and self._connection is not None:
                try:
                    send_all(self._connection, frame.packed(), self._patience_s)
                except OSError:
                    self.close()

    def _listen(self, connection: socket.socket) -> None:
        inflow = Inflow(SMALL)
        try:
            while data := connection.recv(2**16):
                for frame in inflow.feed(data):
                    answer = self._take(frame)
                    if answer is not None:
                        self._send(answer)
        except (OSError, FrameError):
            pass
        except BaseException as error:  # noqa: BLE001  (the seam of this thread: as if the connection had broken)
            say(logging.WARNING, "what rank 0 sent could not be taken: %s", described(error))
        with self._changed:
            if self._connection is connection:
                self.open, self._turn = False, 0
                self._changed.notify_all()

    def _take(self, frame: Frame) -> Frame | None:
        """Keep what rank 0 says; returns the answer it gets at once, if any."""
        answer = None
        with self._changed:
            if frame.kind is Kind.ASK:
                self._turn, self._meet, self._hoping = frame.turn, None, True
                new = self._here is None and self._earliest == START
                answer = Frame(Kind.PLACE, self._here or self._earliest, NEW if new else b"", frame.turn)
            elif frame.kind is Kind.MEET and frame.turn == self._turn:
                self._meet = frame.moment
            elif frame.kind is Kind.ORDER and frame.moment.step > self._order:
                self._orders[frame.moment.step], self._hoping = frame, True
            elif frame.kind is Kind.ORDER:
                self._hoping = True
                answer = Frame(Kind.PASSED, turn=frame.turn) if frame.body else None
            elif frame.kind is Kind.OFFER and frame.turn != self._turn:
                answer = Frame(Kind.PASSED, turn=frame.turn)
            elif frame.kind in (Kind.OFFER, Kind.VERDICT, Kind.OVER):
                self._said.append(frame)
                if frame.kind is Kind.OVER and frame.turn == self._turn:
                    self._turn = 0
            elif frame.kind is Kind.END:
                self.parted = True
            self._changed.notify_all()
        return answer


def _after(moment: Moment) -> Moment:
    return moment._replace(again=moment.again + 1)


def _ballot_body(ballot: int, refusal: str | None) -> bytes:
    """A vote or a verdict on the ``ballot``-th question of a round."""
    return json.dumps([ballot, refusal]).encode()


def read_ballot(body: bytes) -> tuple[int, str | None]:
    """What was written as a vote or a verdict; (0, None), which is no ballot, for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return 0, None
    match found:
        case [int(ballot), str() | None as refusal] if not isinstance(ballot, bool):
            return ballot, refusal
    return 0, None
