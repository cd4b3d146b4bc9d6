"""What no store can hold is dropped by itself; what a store cannot hold now is kept."""

from itertools import pairwise

import pytest

from rlwatch.clock import ManualClock
from rlwatch.errors import StoreError, StoreFullError, UnstorableError
from rlwatch.recorder.losses import Counters
from rlwatch.recorder.writer import FIRST_RETRY_S, HEARTBEAT_S, LONGEST_RETRY_S, StoreSink
from rlwatch.records import RunInfo, StepRecord


class PickyWriter:
    """Refuses batches with a negative step; its disk has room for ``room`` more items."""

    journal = None

    def __init__(self, room=1000):
        self.run, self.last_seq, self.room, self.steps, self.beats, self.calls = RunInfo("r"), 0, room, [], [], 0

    def write(self, items, progress=None):
        self.calls += 1
        if any(item.step < 0 for item in items):
            raise UnstorableError("cannot store StepRecord of step -1")
        if len(items) > self.room:
            raise StoreFullError("no room")
        self.room -= len(items)
        self.steps += [item.step for item in items]

    def heartbeat(self, now, stage="", since=None):
        self.beats.append(now)


def made(room=1000):
    writer, counters, clock = PickyWriter(room), Counters(), ManualClock(100.0)
    return writer, counters, clock, StoreSink(writer, counters, clock)


def records(*steps):
    return [StepRecord(step, {"m": 1.0}) for step in steps]


def test_only_the_unstorable_items_of_a_batch_are_lost():
    """Each once, in whatever place; the order of the others stays."""
    writer, counters, _, sink = made()
    sink.write(records(-1, 1, 2, -2, 3))
    sink.write(records(4))

    assert writer.steps == [1, 2, 3, 4]
    assert (counters["dropped"], counters["errors"]) == (2, 0)


class NoMemory(list):
    """Numbers for which there is no memory."""

    def __iter__(self):
        raise MemoryError


def test_a_batch_is_taken_with_its_numbers_or_not_at_all():
    """Else the journal would give its rows once more."""
    writer, _, _, sink = made()
    with pytest.raises(MemoryError):
        sink.write(records(1), NoMemory([1]))
    sink.write(records(1), [1])

    assert writer.steps == [1]


def test_a_disk_that_fills_up_while_sifting_keeps_the_rest():
    """What was written is not written again, what was dropped does not come back."""
    writer, counters, clock, sink = made(room=1)
    sink.write(records(1, -1, 2, 3))
    kept = list(writer.steps)
    writer.room = 10
    clock.advance(FIRST_RETRY_S)
    sink.write(records(4))

    assert kept == [1]
    assert writer.steps == [1, 2, 3, 4]
    assert (counters["dropped"], counters["errors"]) == (1, 1)


def test_other_trouble_of_the_store_keeps_the_batch_whole():
    """It is tried again as it was."""
    writer, counters, clock, sink = made()
    whole = writer.write

    def locked(items):
        raise StoreError("held by a backup")

    writer.write = locked
    sink.write(records(1, 2))
    writer.write = whole
    clock.advance(FIRST_RETRY_S)
    sink.write(records(3))

    assert (writer.steps, writer.calls) == ([1, 2, 3], 1)
    assert (counters["dropped"], counters["errors"]) == (0, 1)


def test_the_heartbeat_comes_at_the_first_tick_and_every_five_seconds():
    """With the wall time, whether or not something waits to be tried again."""
    writer, _, clock, sink = made(room=0)
    sink.tick()
    sink.write(records(1))
    writer.room = 10
    clock.advance(0.7 * FIRST_RETRY_S - 0.01)
    sink.tick()
    before = list(writer.steps)
    clock.advance(0.3 * FIRST_RETRY_S + 0.01)
    sink.tick()
    after = list(writer.steps)
    clock.advance(HEARTBEAT_S - FIRST_RETRY_S)
    sink.tick()

    assert (before, after) == ([], [1])
    assert writer.beats == [100.0, 105.0]


def test_a_store_that_refuses_is_asked_ever_less_often(caplog):
    """Whatever is logged and found meanwhile: pauses double up to a bound, no two sinks keep the same time, and it is
    said once. Once it takes something, the next refusal is met with a short pause again.
    """
    tries = {}
    for name in ("one", "other"):
        writer, counters, clock, sink = made(room=0)
        asked = writer.write
        tries[name] = found = []

        def noting(items, asked=asked, found=found, clock=clock):
            found.append(clock.monotonic())
            asked(items)

        writer.write = noting
        for step in range(6000):  # a minute, ten batches a second
            if step % 10 == 0:
                sink.write(records(step))
                sink.found(records(step))
            sink.tick()
            clock.advance(0.01)
        pauses = [b - a for a, b in pairwise(found)]
        for pause, bound in zip(pauses, (0.25, 0.5, 1.0, 2.0, 4.0, *[LONGEST_RETRY_S] * 100), strict=False):
            assert 0.7 * bound - 1e-6 <= pause <= bound + 0.011
        assert counters["errors"] == len(found)
        writer.room = 10_000
        clock.advance(LONGEST_RETRY_S)
        sink.tick()
        assert not sink.failing
        writer.room = 0
        sink.write(records(1))
        writer.room = 10
        clock.advance(FIRST_RETRY_S)
        sink.tick()
        assert not sink.failing

    assert tries["one"] != tries["other"]
    said = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert len(said) == len(tries)


@pytest.mark.parametrize("error", [OSError(5, "input/output error"), MemoryError()])
def test_trouble_that_is_not_the_stores_own_keeps_the_batch_too(error):
    """The disk's and the machine's own errors: nothing is lost uncounted."""
    writer, counters, clock, sink = made()
    whole = writer.write
    writer.write = lambda items: (_ for _ in ()).throw(error)
    sink.write(records(1, 2))
    writer.write = whole
    clock.advance(FIRST_RETRY_S)
    sink.write(records(3))

    assert writer.steps == [1, 2, 3]
    assert (counters["dropped"], counters["errors"]) == (0, 1)


def test_closing_writes_what_waits_and_asks_nothing_when_nothing_does():
    """One last try."""
    writer, counters, _, sink = made(room=0)
    sink.write(records(1, 2))
    writer.room = 10
    sink.close()
    calls = writer.calls
    sink.close()

    assert (writer.steps, writer.calls, counters["dropped"]) == ([1, 2], calls, 0)
