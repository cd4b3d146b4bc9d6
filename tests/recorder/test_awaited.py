"""Steps of several ranks in the writer's queue: in order, whole where possible, never waited for without end."""

import logging
import threading
import time
from dataclasses import dataclass, field

import pytest

from rlwatch.link.hub import Inbox
from rlwatch.link.wire import StepKey
from rlwatch.recorder.intake import PATIENCE_S, RANKS, Awaited, BoundedQueue, admit
from rlwatch.recorder.losses import Counters
from rlwatch.recorder.writer import Writer
from rlwatch.records import Event, SpikeBatch, StepRecord


@dataclass
class Parcel:
    """Adds up one number of each rank."""

    step: int
    here: bool = True
    spikes: tuple = ()
    error: Exception | None = None

    def ready(self):
        return self.here

    def encode(self):
        return b""

    def merged(self, others):
        if self.error is not None:
            raise self.error
        return {"sum": 1.0 + sum(map(int, others.values()))}, self.spikes


@dataclass
class Sink:
    items: list = field(default_factory=list)
    ticks: int = 0
    ticked: threading.Event = field(default_factory=threading.Event)

    def write(self, batch):
        self.items.extend(batch)

    def tick(self):
        self.ticks += 1
        if self.ticks > 3:
            self.ticked.set()

    def close(self):
        pass


def at(step):
    return StepKey(0, step, 0)


class World:
    """A writer, and an inbox other ranks would fill."""

    def __init__(self, *ranks):
        self.inbox, self.sink, self.counters = Inbox(), Sink(), Counters()
        for rank in ranks:
            self.inbox.join(rank)
        self.queue = BoundedQueue(100)
        self.writer = Writer(self.queue, [self.sink], self.counters, attempt=2, interval=0.001)

    def step(self, step, *, patience_s=PATIENCE_S, **kwargs):
        until = time.monotonic() + patience_s
        self.queue.offer(Awaited(Parcel(step, **kwargs), self.inbox, at(step), ts=5.0, until=until))

    def log(self, step, **metrics):
        self.queue.offer(admit(metrics, step, 0.0))

    @property
    def records(self):
        return [(item.step, dict(item.metrics)) for item in self.sink.items if isinstance(item, StepRecord)]


def test_a_step_is_recorded_when_every_share_is_there():
    """With the number of ranks it holds."""
    world = World(1, 2)
    world.inbox.put(1, at(1), b"10")
    world.inbox.put(2, at(1), b"100")
    world.step(1)
    world.writer.start()

    assert world.writer.flush(10.0)
    assert world.records == [(1, {"sum": 111.0, RANKS: 3.0})]
    assert world.sink.items[0].ts == 5.0
    assert world.writer.stop(5.0)


def test_what_was_logged_after_it_waits_with_it_while_the_sinks_go_on():
    """Detectors see steps in order; commands and heartbeats do not stop for a slow rank."""
    world = World(1)
    world.step(1)
    world.log(1, loss=0.5)
    world.queue.offer(Event("note", 1))
    world.writer.start()

    assert not world.writer.flush(0.1)
    assert world.sink.ticked.wait(10.0)
    assert world.sink.items == []

    world.inbox.put(1, at(1), b"10")
    assert world.writer.flush(10.0)
    assert [type(item).__name__ for item in world.sink.items] == ["StepRecord", "StepRecord", "Event"]
    assert [item.seq for item in world.sink.items] == [1, 2, 3]
    assert world.writer.stop(5.0)


def test_a_flush_ends_when_a_held_step_is_through_the_sinks_not_when_it_is_let_go():
    """A sink that is slow to write is waited for."""

    class Slow(Sink):
        writing, may_go_on = threading.Event(), threading.Event()

        def write(self, batch):
            self.writing.set()
            assert self.may_go_on.wait(10.0)
            super().write(batch)

    world = World(1)
    world.sink = Slow()
    world.writer = Writer(world.queue, [world.sink], world.counters, interval=0.001)
    world.step(1)
    world.writer.start()
    assert not world.writer.flush(0.05)
    world.inbox.put(1, at(1), b"10")
    assert world.sink.writing.wait(10.0)

    assert not world.writer.flush(0.05)
    world.sink.may_go_on.set()
    assert world.writer.flush(10.0)
    assert len(world.sink.items) == 1
    assert world.writer.stop(5.0)


def test_a_step_waits_for_its_own_copy_from_the_device_too():
    """Reading earlier would wait for the device on the writer thread and hold up the sinks."""
    world = World()
    parcel = Parcel(1, here=False)
    step = Awaited(parcel, world.inbox, at(1), 0.0)

    assert not step.due()
    parcel.here = True
    assert step.due()


def test_a_missing_rank_is_waited_for_so_long_and_named_once(caplog):
    """Then the step is recorded without it, and the next one does not wait at all."""
    world = World(1, 2)
    for step in (1, 2, 3):
        world.inbox.put(2, at(step), b"100")
        world.step(step, patience_s=0.02)
    world.writer.start()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        assert world.writer.flush(10.0)

    assert world.records == [(step, {"sum": 101.0, RANKS: 2.0}) for step in (1, 2, 3)]
    (message,) = caplog.messages
    assert "step 1 is recorded without the share of rank 1" in message
    assert world.writer.stop(5.0)


def test_a_rank_that_keeps_up_again_is_waited_for_again():
    """It was slow once."""
    world = World(1)
    world.inbox.mark_absent([1])
    assert Awaited(Parcel(1), world.inbox, at(1), 0.0).due()

    world.inbox.put(1, at(1), b"10")
    assert not Awaited(Parcel(2), world.inbox, at(2), 0.0).due()


def test_the_end_waits_for_half_its_deadline_only():
    """An ending process stores what it has."""
    world = World(1)
    world.step(1)
    world.log(1, loss=0.5)
    world.writer.start()

    assert world.writer.stop(0.4)
    assert world.records == [(1, {"sum": 1.0, RANKS: 1.0}), (1, {"loss": 0.5})]


def test_extreme_tokens_keep_the_rank_they_came_from():
    """And get the attempt of the run."""
    world = World()
    world.step(1, spikes=(SpikeBatch(1, {"logp": [1.0]}, rank=3), SpikeBatch(1, {"logp": [2.0]}, rank=0)))
    world.writer.start()
    assert world.writer.stop(5.0)

    assert [(s.rank, s.attempt) for s in world.sink.items if isinstance(s, SpikeBatch)] == [(3, 2), (0, 2)]


@pytest.mark.parametrize("error", [ValueError("a share that cannot be read"), RuntimeError("device lost")])
def test_a_step_that_cannot_be_put_together_is_counted_and_the_next_is_recorded(error):
    """An error of ours does not end the writing."""
    world = World()
    world.step(1, error=error)
    world.step(2)
    world.writer.start()
    assert world.writer.stop(5.0)

    assert [step for step, _ in world.records] == [2]
    assert world.counters["errors"] == 1
