"""The end of another rank: a thread that finds rank 0 and sends to it, and the rank's part in rounds of commands."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from rlwatch.error_boundary import call_or, described, say, sheltered
from rlwatch.errors import RLWatchError
from rlwatch.link.wire import (
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
    StepKey,
    StepKeyCounter,
    after,
    asking,
    ballot_body,
    challenge,
    connect,
    read_ballot,
    send_all,
)

logger = logging.getLogger("rlwatch")
INTERVAL_S = 0.1
"""Seconds between two looks at the queue: the training thread wakes nobody."""
SEND_S = 60.0
WELCOME_S = 10.0
HOPE_S = 60.0
"""A rank that has looked for rank 0 this long measures nothing until it has found it, in seconds; it looks on."""
RETRY_S = (0.02, 5.0)
"""Seconds until it looks again: at first, and at most."""
LAST_S = 2.0
"""Longest a rank that ends looks for rank 0, which it never found or has lost, in seconds."""
APART = "rank %d is not linked to rank 0: its share of the batch is not measured, and commands are refused (%s)"


class NobodyError(RLWatchError):
    """There is no rank 0 to be found, and will be none."""


class WorkerClient:
    """Looks for rank 0 from :meth:`start` on, and again when the connection is lost. Training waits for none of it.

    Parameters
    ----------
    find
        Where rank 0 is, or None if it has not said so yet. Raises ``NobodyError`` where that will not change, and
        ``RLWatchError`` where it cannot be asked.
    take
        Removes and returns what waits to be sent: (moment, encode) pairs, oldest first; ``encode()`` gives the bytes.
    lost
        Called with the number of steps that could not be sent.
    joined
        Called with the lap rank 0 is in, whenever a connection is made.
    hope_s
        A rank that has looked for rank 0 this long measures nothing until it has found it, in seconds; it looks on.
    notes
        Called many times a second: what this rank has to tell of itself now. While there is no link it is not sent.
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
        """Begin to look for rank 0."""
        self._thread.start()

    @property
    def live(self) -> bool:
        """True while rank 0 takes what this rank measures, or may soon."""
        if self._over:
            return False
        return self._steps is not None or time.monotonic() - self._since < self._hope_s

    def settled(self, deadline_s: float) -> bool:
        """Wait until it is known whether there is a link; whether there is one."""
        self._settled.wait(deadline_s)
        return self._steps is not None

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
        if self._steps is not None:
            self._steps.close()
        self.member.forked()

    def _loop(self) -> None:
        """Nothing here may end training, nor keep it waiting."""
        sheltered(self._work, lambda error: say(logging.WARNING, "the link to rank 0 failed: %s", described(error)))
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
        """Raises ``LinkError``."""
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
        """Send a step; one that cannot be sent is counted and dropped."""

        def unread(error: Exception) -> None:
            say(logging.WARNING, "a step could not be sent to rank 0: %s", described(error))
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
        """The connection is gone: for good, where rank 0 took leave, else it is looked for again."""
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
    """A connection whose ends have both proven to be of the run, and (lap, orders) of rank 0. Raises ``LinkError``."""
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
    """The next message. Raises ``OSError`` if it does not come in time, ``FrameError`` if the other side leaves."""
    while True:
        connection.settimeout(max(0.001, end - time.monotonic()))
        data = connection.recv(1)
        if not data:
            raise FrameError("it closed the connection: this rank does not know its secret, or it is busy")
        for frame in inflow.feed(data):
            return frame


def _taken_leave(connection: socket.socket) -> bool:
    """True where rank 0 left in good order."""
    with contextlib.suppress(OSError, FrameError):
        return _next(connection, FrameDecoder(), time.monotonic() + INTERVAL_S).kind is FrameKind.END
    return False


VERDICT_S = 3600.0
"""Longest a rank waits for the verdict, in seconds: by itself it must neither act nor go on. Rank 0 may have to wait
for others, and to finish what it is doing itself.
"""
UNDECIDED = "rank 0 gave no verdict"


class WorkerMember:
    """Another rank: its training thread, and a thread that listens to rank 0 for it."""

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
        """Rank 0 is in ``lap``, and ``orders`` have been given before it knew this rank."""
        with self._changed:
            self._connection, self._turn, self._meet = connection, 0, None
            self._pace.join(lap)
            self._orders_over = max(self._orders_over, orders)
            self.open, self._hoping = True, True
            self._changed.notify_all()
        threading.Thread(target=self._listen, args=(connection,), name="rlwatch-ear", daemon=True).start()

    @property
    def here(self) -> StepKey | None:
        """The boundary at which this rank is; None between two."""
        return self._here

    @property
    def earliest(self) -> StepKey:
        """The first boundary that this rank has not passed."""
        return self._earliest

    @property
    def called(self) -> bool:
        """True while rank 0 asks all ranks to a boundary."""
        return self._turn != 0

    @property
    def meet(self) -> StepKey | None:
        """The boundary at which all ranks meet, once rank 0 has named it."""
        return self._meet

    @property
    def taking_part(self) -> bool:
        """True while this rank is in a round: it met the others, and may vote."""
        return self._mine != 0

    def meets(self, step: int, *, wanted: bool = False, staying: bool = False) -> bool:
        """True where all ranks meet at this boundary, at ``step``; else it is passed, unless this rank stays at it.

        It waits only while rank 0 is about to say where all meet; ``wanted``: and where this rank knows as well as
        rank 0 that something is due here.
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
        """The boundary is passed."""
        with self._changed:
            self._pass()

    def offered(self) -> bytes:
        """Commands of rank 0 here, where all meet; empty if there are none, or if it does not come."""
        with self._changed:
            frame = self._hear(self.patience_s, FrameKind.OFFER)
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
        """Leave the round; rank 0 learns so, if it still waits for a word."""
        with self._changed:
            turn, self._mine = self._mine, 0
        if turn:
            self._send(Frame(FrameKind.PASSED, turn=turn))

    def vote(self, refusal: str | None) -> str | None:
        """Tell rank 0 whether this rank can and did; returns the verdict: None, or a refusal."""
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
        """Go in good order."""
        self._send(Frame(FrameKind.END))
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
            self._earliest, self._here = after(self._here), None

    def _until(self, condition: Callable[[], bool], seconds: float, *, though_closed: bool = False) -> bool:
        """Wait, with the lock, for what the listening thread does; whether it did."""
        done = self._changed.wait_for(
            lambda: condition() or not (self.open or though_closed), max(0.0, min(seconds, threading.TIMEOUT_MAX))
        )
        return done and condition()

    def _hear(self, seconds: float, kind: FrameKind) -> Frame | None:
        """With the lock: the next word of ``kind`` in this rank's round; None if it does not come any more."""

        def found() -> Frame | None:
            return next((frame for frame in self._words if frame.turn == self._mine), None)

        while self._until(lambda: found() is not None, seconds) and (frame := found()) is not None:
            if frame.kind is not FrameKind.OVER:  # which stays, so that whoever asks again hears it, too
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
                say(logging.WARNING, "what rank 0 sent could not be taken: %s", described(error))

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
        """Keep what rank 0 says; returns the answer it gets at once, if any."""
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
