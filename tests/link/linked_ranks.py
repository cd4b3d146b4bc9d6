"""Ranks of one run in one process, over real connections."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rlwatch.link.chair import Chair
from rlwatch.link.frames import Frame, Kind
from rlwatch.link.hub import Hub
from rlwatch.link.pace import Moment
from rlwatch.link.spoke import Spoke
from rlwatch.recorder.queue import BoundedQueue

DEADLINE_S = 20.0


def at(step, lap=0, again=0):
    return Moment(lap, step, again)


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

    def __init__(self, rank, address):
        self.rank = rank
        self.queue = BoundedQueue(100)
        self.lost = []
        self.spoke = Spoke(rank, address, lambda: self.queue.drain(10), self.lost.append)
        self.member = self.spoke.member
        self.spoke.start()

    def send(self, step, payload=b"x"):
        self.queue.offer((at(step), lambda: payload))

    def die(self):
        """As a killed process does: the connections close without a word."""
        self.spoke._connection.shutdown(2)
        self.member._connection.shutdown(2)


class Ranks:
    """Rank 0 with its hub and chair, and the others."""

    def __init__(self, size, patience_s=DEADLINE_S):
        self.hub = Hub(size, alone=True)
        self.hub.start()
        self.chair = Chair(self.hub, patience_s)
        self.others = [Other(rank, self.hub.address) for rank in range(1, size)]
        for other in self.others:
            other.member._patience_s = patience_s

    def offer(self, step, body=b""):
        self.chair.offer(Frame(Kind.OFFER, at(step), body))

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
