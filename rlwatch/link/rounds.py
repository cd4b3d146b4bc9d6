"""Rounds of votes on commands: all ranks meet at one boundary of the training loop, vote, and execute a command or not.

A boundary is a point that every rank reaches, such as the end of an optimizer step. :class:`Chair` belongs to the
training thread of rank 0, :class:`WorkerMember` to that of another rank.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rlwatch.error_boundary import described, log_message, sheltered
from rlwatch.link.hub import Hub, Peer
from rlwatch.link.wire import (
    NEW,
    PATIENCE_S,
    SMALL,
    START,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
    StepKey,
    StepKeyCounter,
    after,
    ballot_body,
    read_ballot,
    send_all,
)

logger = logging.getLogger("rlwatch")

# Rank 0.

ACTING_S = 1800.0
"""Seconds for which rank 0 waits for the other ranks to report that they acted (a checkpoint may take its time)."""
PLACE_S = 5.0
"""Seconds for which rank 0 waits to learn where the other ranks are: their threads answer whatever training does."""


@dataclass(slots=True)
class _Round:
    """One round of votes on commands; ``meet`` is the earliest boundary at which all ranks meet."""

    turn: int
    meet: StepKey
    asked: dict[int, Peer] = field(default_factory=dict)
    places: dict[int, StepKey] = field(default_factory=dict)
    refusal: str | None = None
    ballot: int = 0

    def send(self, frame: Frame) -> None:
        """Send a message to all ranks that were asked to this round."""
        for peer in self.asked.values():
            peer.send(frame)

    def next_word(self, peer: Peer, end: float, *kinds: FrameKind) -> Frame | None:
        """Return the next message of ``peer`` in this round; None if it is gone or sends none until ``end`` (monotonic
        seconds).
        """
        while (frame := peer.next_word(end - time.monotonic())) is not None:
            if frame.turn == self.turn and frame.kind in kinds:
                return frame
        return None


class Chair:
    """Rank 0's side of the votes on commands: it lets all ranks meet at a boundary, sends commands, counts votes and
    decides.

    A boundary is a point of training at which commands may be executed. The training thread of rank 0 uses this object,
    and :meth:`call` another thread. ``rounds`` counts the rounds of votes begun.

    Parameters
    ----------
    hub
        The server to which the other ranks are connected.
    patience_s
        Seconds to wait for the other ranks to come to the boundary.
    acting_s
        Seconds to wait for their reports that they executed the command.
    place_s
        Seconds to wait to learn which boundary they have reached.
    """

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
        """Return whether rank 0 has asked all ranks to meet at a boundary, a point of training at which commands may be
        executed.
        """
        return self._round is not None

    @property
    def earliest(self) -> StepKey:
        """First boundary (point of training at which commands may be executed) that this rank has not passed."""
        return self._earliest

    def call(self) -> None:
        """Find the first boundary that no rank has passed; runs on another thread, as soon as there are commands.

        All ranks then meet at this boundary (a point of training at which commands may be executed). If a rank cannot
        come, the training thread learns of it at its next boundary.
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
        """Return whether all ranks meet at the boundary that this rank has reached at ``step``; otherwise it is passed.

        A boundary is a point of training at which commands may be executed. If there are commands, rank 0 asks which
        boundary the other ranks have reached. If one has passed this one already, all meet at a later boundary.

        Parameters
        ----------
        step
            Optimizer step of this boundary.
        wanted
            Whether there are commands.
        staying
            Whether this rank remains at the boundary (it is paused), so that it is not passed.
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
        """Note that this rank has passed its boundary (the point of training at which commands may be executed)."""
        if self._here is not None:
            self._earliest, self._here = after(self._here), None

    def offer(self, body: bytes) -> None:
        """Send the encoded commands ``body`` to the ranks that meet at this boundary, a point of training at which
        commands may be executed.
        """
        if self._round is not None and self._round.refusal is None:
            self._round.send(Frame(FrameKind.OFFER, self._round.meet, body, self._round.turn))

    def order(self, body: bytes) -> None:
        """Send the encoded commands ``body`` to all ranks, at a point of training that every rank passes; usually it is
        empty: there are none.

        If there are commands, wait until all ranks are connected.
        """
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
        """Collect the votes, send the verdict to all ranks and return it: None if all agree, else the reason for the
        refusal.

        ``refusal``: reason why rank 0 itself refuses; None: it agrees.
        """
        under_way = self._order or self._round
        if under_way is None:
            return refusal
        under_way.ballot += 1
        verdict = refusal or under_way.refusal or self._objection(under_way)
        under_way.send(Frame(FrameKind.VERDICT, START, ballot_body(under_way.ballot, verdict), under_way.turn))
        return verdict

    def over(self) -> None:
        """End the round of votes on commands, so that no rank waits for it any longer."""
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
        """Return a round at the first boundary that no rank has passed."""
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
        """Return the reason why ``peer`` will not come to a boundary soon; None if it will, and then
        keep its position.
        """
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
        """Wait for ranks that are about to connect: an order can be the first thing ranks do."""
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
        """Return the vote of ``peer`` in this ballot: None if it agrees, else the reason."""
        while (frame := under_way.next_word(peer, end, FrameKind.VOTE, FrameKind.PASSED)) is not None:
            if frame.kind is FrameKind.PASSED:
                return f"rank {peer.rank} had gone on already"
            ballot, refusal = read_ballot(frame.body)
            if ballot == under_way.ballot:
                return None if refusal is None else f"rank {peer.rank}: {refusal}"
        if under_way.ballot == 1:
            peer.owing = under_way.places.get(peer.rank)
        return f"rank {peer.rank} does not answer"


# The other ranks.

VERDICT_S = 3600.0
"""Seconds for which a rank waits for the verdict: by itself it must neither act nor continue.

Rank 0 may have to wait for other ranks, and to finish its own work.
"""
UNDECIDED = "rank 0 gave no verdict"


class WorkerMember:
    """Another rank's side of the votes on commands: for its training thread, with a thread that listens to rank 0.

    ``patience_s``: seconds to wait for rank 0 at a point of training at which commands may be executed.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._connection: socket.socket | None = None
        self._pace = StepKeyCounter()
        self._here: StepKey | None = None
        self._earliest = START
        self._turn = 0
        self._meet: StepKey | None = None
        self._mine = 0
        self._ballot = 0
        self._words: deque[Frame] = deque(maxlen=1000)
        self._orders: dict[int, Frame] = {}
        self._order = self._orders_over = 0
        self._hoping = True
        self.open = False
        self.parted = False

    def connected(self, connection: socket.socket, *, lap: int = 0, orders: int = 0) -> None:
        """Use a new connection to rank 0 and start the thread that listens to it.

        ``lap``: number of times that training of rank 0 went back to an earlier step. ``orders``: number of times that
        rank 0 has sent commands to all ranks (:meth:`Chair.order`) before this rank connected.
        """
        with self._changed:
            self._connection, self._turn, self._meet = connection, 0, None
            self._pace.join(lap)
            self._orders_over = max(self._orders_over, orders)
            self.open, self._hoping = True, True
            self._changed.notify_all()
        threading.Thread(target=self._listen, args=(connection,), name="rlwatch-ear", daemon=True).start()

    @property
    def here(self) -> StepKey | None:
        """Boundary (point of training at which commands may be executed) at which this rank is; None between two
        boundaries.
        """
        return self._here

    @property
    def earliest(self) -> StepKey:
        """First boundary (point of training at which commands may be executed) that this rank has not passed."""
        return self._earliest

    @property
    def called(self) -> bool:
        """Return whether rank 0 asks all ranks to meet at a boundary, a point of training at which commands may be
        executed.
        """
        return self._turn != 0

    @property
    def meet(self) -> StepKey | None:
        """Boundary (point of training at which commands may be executed) at which all ranks meet, once rank 0 has named
        it; else None.
        """
        return self._meet

    @property
    def taking_part(self) -> bool:
        """Return whether this rank is in a round of votes: it met the other ranks, and may vote."""
        return self._mine != 0

    def meets(self, step: int, *, wanted: bool = False, staying: bool = False) -> bool:
        """Return whether all ranks meet at the boundary that this rank has reached at ``step``; otherwise it is passed.

        A boundary is a point of training at which commands may be executed. The call waits only while rank 0 is about
        to name the boundary at which all meet.

        Parameters
        ----------
        step
            Optimizer step of this boundary.
        wanted
            Whether this rank knows as well as rank 0 that a command is due here; then it waits for rank 0.
        staying
            Whether this rank remains at the boundary (it is paused), so that it is not passed.
        """
        passed = 0
        with self._changed:
            if self._here is None or self._here.step != step:
                self._pass()
                self._here = self._pace.next(step)
            if wanted and not self._turn and self._hoping and self.open:
                self._hoping = self._until(lambda: self._turn != 0, self.patience_s)
            if self._turn and not self._until(lambda: self._meet is not None or not self._turn, self.patience_s):
                self._turn = 0
            if self._turn and self._meet is not None and self._meet < self._earliest:
                passed, self._turn = self._turn, 0  # training left that boundary in the middle of a round
            if self._turn and self._meet is not None and self._meet <= self._here:
                self._mine, self._ballot = self._turn, 0
                return True
            if not staying:
                self._pass()
        if passed:
            self._send(Frame(FrameKind.PASSED, turn=passed))
        return False

    def leave(self) -> None:
        """Note that this rank has passed its boundary (the point of training at which commands may be executed)."""
        with self._changed:
            self._pass()

    def offered(self) -> bytes:
        """Return the encoded commands that rank 0 sends where all ranks meet; empty if there are none, or if rank 0
        does not come.
        """
        with self._changed:
            frame = self._hear(self.patience_s, FrameKind.OFFER)
            if frame is None:
                if self._turn == self._mine:
                    self._turn = 0  # what comes now comes too late, and is answered so
                    logger.warning("rank 0 asked all ranks to a boundary and did not come to it")
                self._mine = 0
            return b"" if frame is None else frame.body

    def ordered(self) -> bytes:
        """Wait for the encoded commands that rank 0 sends at a point of training that every rank passes, and return
        them; usually empty.
        """
        with self._changed:
            number = self._order + 1
            patience = self.patience_s if self._hoping else 0.0
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
        """Leave the round of votes on commands; if rank 0 still waits for this rank, it is informed."""
        with self._changed:
            turn, self._mine = self._mine, 0
        if turn:
            self._send(Frame(FrameKind.PASSED, turn=turn))

    def vote(self, refusal: str | None) -> str | None:
        """Send rank 0 the vote of this rank and return the verdict: None if all ranks agree, else the reason for the
        refusal.

        ``refusal``: reason why this rank cannot, or could not, execute the command; None: it agrees.
        """
        if not self._mine:
            return refusal or UNDECIDED
        self._ballot += 1
        self._send(Frame(FrameKind.VOTE, START, ballot_body(self._ballot, refusal), self._mine))
        end = time.monotonic() + VERDICT_S
        with self._changed:
            while (frame := self._hear(end - time.monotonic(), FrameKind.VERDICT)) is not None:
                ballot, verdict = read_ballot(frame.body)
                if ballot == self._ballot:
                    return verdict
        return refusal or UNDECIDED

    def disconnect(self) -> None:
        """Send rank 0 a message that this rank ends, and close the connection."""
        self._send(Frame(FrameKind.END))
        self.close()

    def deserted(self) -> None:
        """Note that there is no rank 0 and that there will be none, so that this rank waits for none."""
        with self._changed:
            self.parted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connection to rank 0, which notices it."""
        self.open = False
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the listening thread then sees its end
            connection.close()

    def forked(self) -> None:
        """In a forked child process, close the copy of the connection, without any effect on the parent's."""
        self.open = False
        if self._connection is not None:
            self._connection.close()

    def _pass(self) -> None:
        if self._here is not None:
            self._earliest, self._here = after(self._here), None

    def _until(self, condition: Callable[[], bool], seconds: float, *, though_closed: bool = False) -> bool:
        """Wait, with the lock, until ``condition`` holds by the listening thread's work; return whether it does."""
        done = self._changed.wait_for(
            lambda: condition() or not (self.open or though_closed), max(0.0, min(seconds, threading.TIMEOUT_MAX))
        )
        return done and condition()

    def _hear(self, seconds: float, kind: FrameKind) -> Frame | None:
        """Return the next frame of ``kind`` in this rank's round; None if none comes any more. Needs the lock."""

        def found() -> Frame | None:
            return next((frame for frame in self._words if frame.turn == self._mine), None)

        while self._until(lambda: found() is not None, seconds) and (frame := found()) is not None:
            if frame.kind is not FrameKind.OVER:  # which stays, so that the next call reads it, too
                self._words.remove(frame)
            if frame.kind in (kind, FrameKind.OVER):
                return frame if frame.kind is kind else None
        return None

    def _send(self, frame: Frame) -> None:
        with self._sending:
            if self.open and self._connection is not None:
                try:
                    send_all(self._connection, frame.packed(), self.patience_s)
                except OSError:
                    self.close()

    def _listen(self, connection: socket.socket) -> None:
        def untaken(error: BaseException) -> None:  # whatever it is: as if the connection had broken
            if not isinstance(error, OSError | FrameError):
                log_message(logging.WARNING, "what rank 0 sent could not be taken: %s", described(error))

        sheltered(lambda: self._hear_all(connection), untaken)
        with self._changed:
            if self._connection is connection:
                self.open, self._turn = False, 0
                self._changed.notify_all()

    def _hear_all(self, connection: socket.socket) -> None:
        inflow = FrameDecoder(SMALL)
        while data := connection.recv(2**16):
            for frame in inflow.feed(data):
                answer = self._take(frame)
                if answer is not None:
                    self._send(answer)

    def _take(self, frame: Frame) -> Frame | None:
        """Store a message of rank 0; return the answer that it gets at once, or None."""
        answer = None
        with self._changed:
            if frame.kind is FrameKind.ASK:
                self._turn, self._meet, self._hoping = frame.turn, None, True
                new = self._here is None and self._earliest == START
                answer = Frame(FrameKind.PLACE, self._here or self._earliest, NEW if new else b"", frame.turn)
            elif frame.kind is FrameKind.MEET and frame.turn == self._turn:
                self._meet = frame.moment
            elif frame.kind is FrameKind.ORDER and frame.moment.step > self._order:
                self._orders[frame.moment.step], self._hoping = frame, True
            elif frame.kind is FrameKind.ORDER:
                self._hoping = True
                answer = Frame(FrameKind.PASSED, turn=frame.turn) if frame.body else None
            elif frame.kind is FrameKind.OFFER and frame.turn != self._turn:
                answer = Frame(FrameKind.PASSED, turn=frame.turn)
            elif frame.kind in (FrameKind.OFFER, FrameKind.VERDICT, FrameKind.OVER):
                self._words.append(frame)
                if frame.kind is FrameKind.OVER and frame.turn == self._turn:
                    self._turn = 0
            elif frame.kind is FrameKind.END:
                self.parted = True
            self._changed.notify_all()
        return answer
