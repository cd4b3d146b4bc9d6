"""Ranks of one run in one process, over real connections."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rlwatch.link.hub import Hub
from rlwatch.link.rounds import Chair
from rlwatch.link.spoke import WorkerClient, introduced
from rlwatch.link.wire import Frame, FrameDecoder, StepKey, send_all
from rlwatch.recorder.intake import BoundedQueue

DEADLINE_S = 20.0


def at(step, lap=0, again=0):
    return StepKey(lap, step, again)


def until(condition, deadline_s=DEADLINE_S):
    """Wait for what another thread is about to do; False when it does not."""
    never = threading.Event()
    for _ in range(int(deadline_s / 0.005)):
        if condition():
            return True
        never.wait(0.005)
    return False


class Other:
    """A rank other than 0."""

    def __init__(self, rank, find, patience_s=DEADLINE_S):
        self.rank = rank
        self.queue = BoundedQueue(100)
        self.lost = []
        self.find = find if callable(find) else lambda: find
        self.spoke = WorkerClient(rank, lambda: self.find(), lambda: self.queue.drain(10), self.lost.append)  # noqa: PLW0108  (changes)
        self.member = self.spoke.member
        self.member.patience_s = patience_s
        self.spoke.start()

    def send(self, step, payload=b"x"):
        self.queue.offer((at(step), lambda: payload))

    def boundary(self, step, *refusals, wanted=False):
        """What is heard at a boundary and the verdict on each vote; None where nothing is asked."""
        if not self.member.meets(step, wanted=wanted):
            return None
        heard = self.member.offered()
        verdicts = [self.member.vote(refusal) for refusal in refusals]
        self.member.over()
        self.member.leave()
        return heard, *verdicts

    def die(self):
        """As a killed process does: the connections close without a word, and it never comes back."""
        self.find = lambda: None
        self.member.close()


class Mute:
    """A rank that is linked and answers nothing by itself, as one whose thread is dead."""

    def __init__(self, rank, address):
        self._steps, _, _ = introduced(rank, address, "steps")
        self._control, _, _ = introduced(rank, address, "control")
        self._control.settimeout(DEADLINE_S)
        self._inflow = FrameDecoder()
        self._frames = []

    def hear(self, kind):
        """The next word of rank 0 that is of ``kind``."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.kind is kind:
                    return frame
            self._frames += self._inflow.feed(self._control.recv(2**16))

    def say(self, kind, **more):
        send_all(self._control, Frame(kind, **more).packed(), DEADLINE_S)

    def close(self):
        self._steps.close()
        self._control.close()


class Ranks:
    """Rank 0 with its hub and chair, and the others, all linked but ``missing``, the last ones, which are yet to come."""

    def __init__(self, size, patience_s=DEADLINE_S, missing=0, **hub):
        self.hub = Hub(size, **hub)
        self.hub.start()
        self.chair = Chair(self.hub, patience_s)
        self.others = [Other(rank, self.hub.address, patience_s) for rank in range(1, size - missing)]
        assert until(lambda: len(self.hub.linked()) == size - 1 - missing)
        assert all(other.spoke.settled(DEADLINE_S) for other in self.others)

    def comes(self, find=None):
        """One more rank sets up; returns it once it is linked, or at once if it has to look for rank 0."""
        late = Other(len(self.others) + 1, find or self.hub.address)
        self.others.append(late)
        if find is None:
            assert late.spoke.settled(DEADLINE_S)
            assert until(lambda: late.rank in self.hub.linked())
        return late

    @contextmanager
    def mute(self):
        """The rank that is missing is linked now, and silent until the end of the block; then it is gone."""
        rank = len(self.others) + 1
        mute = Mute(rank, self.hub.address)
        try:
            assert until(lambda: rank in self.hub.linked())
            yield mute
        finally:
            mute.close()

    def boundary(self, step, *refusals, body=b"x", wanted=True):
        """Rank 0 at a boundary where it has commands: the verdict on each of its words; None where all meet later."""
        if not self.chair.meets(step, wanted=wanted):
            return None
        try:
            self.chair.offer(body)
            return body, *(self.chair.decide(refusal) for refusal in refusals)
        finally:
            self.chair.over()
            self.chair.leave()

    def calls(self, step):
        """Rank 0 asks all to a boundary, whatever becomes of it."""
        assert self.chair.meets(step, wanted=True)

    def heard_of(self, other):
        """Whether ``other`` knows where all meet."""
        return until(lambda: other.member.meet is not None)

    def close(self):
        for other in self.others:
            other.spoke.close(5.0)
        self.hub.close(5.0)


@contextmanager
def ranks(size, **kwargs):
    world = Ranks(size, **kwargs)
    try:
        yield world
    finally:
        world.close()


def together(*calls):
    """What each call returns, when every one has a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(call) for call in calls]]


def said(**words):
    return json.dumps(words).encode()
