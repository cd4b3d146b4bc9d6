"""Delivery in the background: it starts, wakes, survives and ends in time."""

from __future__ import annotations

import threading

import pytest
from outbox_examples import ScriptedNotifier, message, patience, put

from rlwatch.alerts.outbox import DeliveryReport, DeliveryThread
from rlwatch.clock import ManualClock
from rlwatch.records import OutboxStatus, RunInfo
from rlwatch.store.memory import MemoryStore
from rlwatch.store.url import open_store

NEVER_S = 3600.0
NOW = ManualClock().now()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    opened = open_store(f"memory://{request.node.name}")
    opened.open_run(RunInfo("run-1"))
    return opened


def background(store: MemoryStore, notifier: ScriptedNotifier, **more: object) -> DeliveryThread:
    settings = {"clock": ManualClock(), "patience": patience(), "poll_s": NEVER_S} | more
    return DeliveryThread(store, {"webhook": notifier}, **settings)


def test_stopping_delivers_what_is_due_first(store: MemoryStore):
    """The alert of the last step is not left behind."""
    notifier = ScriptedNotifier()
    thread = background(store, notifier)
    thread.start()
    put(store, message("m1", at=NOW))

    assert thread.stop()
    assert notifier.seen == ["m1"]
    assert thread.report == DeliveryReport(sent=1)


def test_it_looks_when_it_is_woken(store: MemoryStore):
    """Without waiting for the next poll."""
    arrived = threading.Event()
    thread = background(store, ScriptedNotifier(then=arrived.set))
    thread.start()
    put(store, message("m1", at=NOW))
    thread.wake()

    assert arrived.wait(10.0)
    assert thread.stop()


def test_it_looks_by_itself(store: MemoryStore):
    """Polling finds what other processes wrote."""
    arrived = threading.Event()
    thread = background(store, ScriptedNotifier(then=arrived.set), poll_s=0.01)
    thread.start()
    put(store, message("m1", at=NOW))

    assert arrived.wait(10.0)
    assert thread.stop()


@pytest.mark.parametrize(("read_s", "rest_s"), [(0.0, 2.0), (0.05, 5.0), (3.0, 30.0)])
def test_one_slow_read_of_an_empty_outbox_does_not_delay_a_message_for_minutes(
    store: MemoryStore, read_s: float, rest_s: float
):
    """A busy disk makes a read slow; what is due to be tried again waits for the next one."""
    clock, lease = ManualClock(), store.lease_messages

    def slow(*args: object, **kwargs: object) -> list:
        clock.advance(read_s)
        return lease(*args, **kwargs)

    store.lease_messages = slow

    assert background(store, ScriptedNotifier(), clock=clock, poll_s=2.0).look() == pytest.approx(rest_s)


def test_a_receiver_that_hangs_does_not_hold_up_the_end(store: MemoryStore):
    """The message stays in the outbox for the next process."""
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(10.0)

    put(store, message("m1", at=NOW), message("m2", at=NOW, alert="a2"))
    thread = background(store, ScriptedNotifier(then=hang))
    thread.start()
    begun.wait(10.0)

    assert not thread.stop(deadline_s=0.05)
    assert {m.status for m in store.outbox()} == {OutboxStatus.PENDING}
    release.set()


def test_out_of_time_it_takes_up_no_more(store: MemoryStore):
    """A deadline of nothing delivers nothing more."""
    notifier = ScriptedNotifier()
    thread = background(store, notifier)
    put(store, message("m1", at=NOW))
    thread.stop(deadline_s=0.0)
    thread.start()

    assert thread.stop()
    assert notifier.seen == []


def test_a_broken_store_is_counted_and_does_not_end_delivery(store: MemoryStore, caplog: pytest.LogCaptureFixture):
    """Logged once; the next round works again."""
    arrived = threading.Event()
    lease, failures = store.lease_messages, iter([OSError("disk"), OSError("disk")])

    def flaky(*args: object, **kwargs: object) -> list:
        for error in failures:
            raise error
        return lease(*args, **kwargs)

    store.lease_messages = flaky
    put(store, message("m1", at=NOW))
    thread = background(store, ScriptedNotifier(then=arrived.set), poll_s=0.01)
    thread.start()

    assert arrived.wait(10.0)
    assert thread.stop()
    assert (thread.failures, len(caplog.records)) == (2, 1)


def test_stopping_twice_or_before_the_start_is_fine(store: MemoryStore):
    """Ends are messy."""
    thread = background(store, ScriptedNotifier())

    assert thread.stop()
    thread.start()
    assert thread.stop()
    assert thread.stop()


def test_it_does_not_keep_the_process_alive(store: MemoryStore):
    """A daemon: a trainer that ends without stopping it ends."""
    thread = background(store, ScriptedNotifier())
    thread.start()
    mine = [each for each in threading.enumerate() if each.name == "rlwatch-delivery"]
    assert thread.stop()

    assert mine
    assert all(each.daemon for each in mine)


def test_where_looking_is_slow_it_looks_less_often(store: MemoryStore):
    """Half a second for 500 runs is a hundredth of its time; with something to deliver it looks again soon."""
    clock = ManualClock()
    lease = store.lease_messages

    def slow(*args: object, **kwargs: object) -> list:
        clock.advance(0.25)
        return lease(*args, **kwargs)

    store.lease_messages = slow
    thread = background(store, ScriptedNotifier(), clock=clock, poll_s=2.0)
    idle = thread.look()
    put(store, message("m1", at=NOW))

    assert (idle, thread.look()) == (25.0, 2.0)
