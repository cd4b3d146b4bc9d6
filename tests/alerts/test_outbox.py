"""Delivering the outbox: retries as rows, nothing lost, nothing told out of order."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from outbox_examples import (
    LATER,
    NEVER,
    OK,
    RUN,
    ScriptedNotifier,
    message,
    patience,
    put,
    row,
    statuses,
)

from rlwatch.alerts.outbox import LEASE_S, Deliverer, DeliveryReport
from rlwatch.clock import ManualClock
from rlwatch.errors import MissingExtraError, StoreBusyError
from rlwatch.notify.registry import ConsoleNotifier
from rlwatch.ports import Delivery, Store
from rlwatch.records import Alert, AlertState, OutboxMessage, OutboxStatus, Severity, Silence
from rlwatch.store.url import open_store

NOW = 1_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    url = tmp_path if request.param == "sqlite" else f"memory://{tmp_path.name}"
    opened = open_store(url, clock=clock)
    writer = opened.open_run(RUN)
    yield opened
    writer.close()
    opened.close()


def deliverer(store: Store, clock: ManualClock, *answers: Delivery | Exception, **more: float):
    notifier = ScriptedNotifier(list(answers) or [OK])
    return Deliverer(store, {"webhook": notifier}, clock, patience=patience(**more)), notifier


def test_what_is_due_is_delivered_once_and_stays_sent(store: Store, clock: ManualClock):
    """The second round has nothing to do."""
    put(store, message("m1", at=NOW), message("m2", at=NOW, alert="a2"))
    deliver, notifier = deliverer(store, clock)

    assert (deliver.run_once(), deliver.run_once()) == (DeliveryReport(sent=2), DeliveryReport())
    assert notifier.seen == ["m1", "m2"]
    assert (row(store, "m1").status, row(store, "m1").sent_at) == (OutboxStatus.SENT, NOW)


def test_a_failure_is_tried_again_when_its_time_has_come(store: Store, clock: ManualClock):
    """Not before: the time is in the row, nobody sleeps."""
    put(store, message("m1", at=NOW))
    deliver, notifier = deliverer(store, clock, LATER, LATER, OK)
    reports = []
    for seconds in (0.0, 9.0, 1.0, 19.0, 1.0):
        clock.advance(seconds)
        reports.append(deliver.run_once())

    retried, nothing, sent = DeliveryReport(retried=1), DeliveryReport(), DeliveryReport(sent=1)
    assert reports == [retried, nothing, retried, nothing, sent]
    assert notifier.seen == ["m1"] * 3
    assert (row(store, "m1").attempts, row(store, "m1").last_error) == (3, "")


def test_another_process_goes_on_where_this_one_ended(store: Store, clock: ManualClock):
    """Attempts and the time of the next are in the row."""
    put(store, message("m1", at=NOW))
    deliverer(store, clock, LATER)[0].run_once()
    successor, notifier = deliverer(store, clock, LATER)

    assert (successor.run_once(), notifier.seen) == (DeliveryReport(), [])
    clock.advance(10.0)

    assert successor.run_once() == DeliveryReport(retried=1)
    assert (row(store, "m1").attempts, row(store, "m1").next_attempt_at) == (2, NOW + 10.0 + 20.0)


def test_a_refusal_is_given_up_loudly(store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture):
    """Once, at ERROR, with the reason and without the address."""
    put(store, message("m1", at=NOW))
    deliver, _ = deliverer(store, clock, NEVER)

    assert deliver.run_once() == DeliveryReport(dead=1)
    assert (row(store, "m1").status, row(store, "m1").last_error) == (
        OutboxStatus.DEAD,
        "HTTP 404 (trying again would not help)",
    )
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_a_message_is_given_up_after_so_many_tries(store: Store, clock: ManualClock):
    """And not before."""
    put(store, message("m1", at=NOW))
    deliver, notifier = deliverer(store, clock, LATER, max_attempts=3)
    for _ in range(5):
        deliver.run_once()
        clock.advance(1000.0)

    assert len(notifier.seen) == 3
    assert row(store, "m1").last_error == "HTTP 500 (given up after 3 tries)"


def test_a_message_is_given_up_when_it_is_old_and_fails(store: Store, clock: ManualClock):
    """But an old one that was never tried gets its try."""
    put(store, message("old", at=NOW), message("older", at=NOW, alert="a2"), message("no-time", at=0.0, alert="a3"))
    clock.advance(7 * 24 * 3600.0)
    deliver, _ = deliverer(store, clock, OK, LATER, LATER, max_age_s=3600.0)

    assert deliver.run_once() == DeliveryReport(sent=1, dead=1, retried=1)
    assert "given up after 168 h" in " ".join(m.last_error for m in store.outbox())


def test_the_receivers_wish_is_heeded_within_reason(store: Store, clock: ManualClock):
    """Retry-After beyond our own wait counts, up to an hour."""
    put(store, message("m1", at=NOW), message("m2", at=NOW, alert="a2"), message("m3", at=NOW, alert="a3"))
    wishes = [Delivery(ok=False, retry_after_s=s) for s in (120.0, 1.0, 1e9)]
    deliverer(store, clock, *wishes)[0].run_once()

    assert sorted(m.next_attempt_at - NOW for m in store.outbox()) == [10.0, 120.0, 3600.0]


def test_a_channel_of_another_process_is_left_alone(store: Store, clock: ManualClock):
    """Not leased, not tried, not burnt, and no obstacle for the rest."""
    put(store, message("theirs", channel="pager", at=NOW), message("ours", at=NOW))
    deliver, _ = deliverer(store, clock)

    assert deliver.run_once() == DeliveryReport(sent=1)
    assert (row(store, "theirs").status, row(store, "theirs").attempts) == (OutboxStatus.PENDING, 0)

    theirs = Deliverer(store, {"pager": ScriptedNotifier()}, clock, patience=patience())
    assert theirs.run_once() == DeliveryReport(sent=1)


def test_a_message_of_an_unknown_channel_goes_back_with_the_reason(store: Store, clock: ManualClock):
    """Even if a store hands it out."""
    put(store, message("m1", channel="pager", at=NOW))
    lease = store.lease_messages
    store.lease_messages = lambda now, *, lease_s, limit=10, channels=None: lease(now, lease_s=lease_s, limit=limit)
    deliver, notifier = deliverer(store, clock)

    assert deliver.run_once() == DeliveryReport(waiting=1)
    assert (row(store, "m1").attempts, row(store, "m1").status, notifier.seen) == (0, OutboxStatus.PENDING, [])
    assert "'pager'" in row(store, "m1").last_error


def test_nobody_reads_firing_after_resolved(store: Store, clock: ManualClock):
    """While the first word waits for its retry, the last word waits for the first."""
    put(store, message("m1", "firing", at=NOW))
    deliver, notifier = deliverer(store, clock, LATER, OK)
    deliver.run_once()
    put(store, message("m2", "escalated", at=NOW), message("m3", "resolved", at=NOW))
    put(store, message("m4", "resolved", at=NOW, alert="another"))

    assert deliver.run_once() == DeliveryReport(waiting=2, sent=1)
    for _ in range(4):
        clock.advance(10.0)
        deliver.run_once()

    assert notifier.seen == ["m1", "m4", "m1", "m2", "m3"]


def test_when_the_first_word_is_given_up_the_last_is_still_said(store: Store, clock: ManualClock):
    """A dead message holds up nothing."""
    put(store, message("m1", "firing", at=NOW), message("m2", "resolved", at=NOW))
    deliver, notifier = deliverer(store, clock, NEVER, OK)

    assert deliver.run_once() == DeliveryReport(dead=1, sent=1)
    assert notifier.seen == ["m1", "m2"]


def test_a_notifier_that_raises_is_retried_counted_and_logged_once_without_its_words(
    store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
):
    """The error boundary: its message could hold an address."""
    put(store, message("m1", at=NOW), message("m2", at=NOW, alert="a2"))
    deliver, _ = deliverer(store, clock, ValueError("https://hush"))

    assert deliver.run_once() == DeliveryReport(retried=2)
    assert (deliver.errors, len(caplog.records)) == (2, 1)
    assert "hush" not in caplog.text + row(store, "m1").last_error
    assert row(store, "m1").last_error == "the notifier raised ValueError"


def test_a_busy_store_at_leasing_ends_the_round_quietly(clock: ManualClock):
    """The next round tries again."""

    class Busy:
        def lease_messages(self, *_: object, **__: object) -> list[OutboxMessage]:
            raise StoreBusyError("locked")

    assert deliverer(Busy(), clock)[0].run_once() == DeliveryReport(busy=1)


@pytest.mark.parametrize("later", [1.0, LEASE_S + 1.0])
def test_a_busy_store_after_the_delivery_does_not_make_a_second_delivery(
    store: Store, clock: ManualClock, later: float
):
    """The outcome is kept in memory and written when the row is free, lease or no lease."""
    put(store, message("m1", at=NOW))
    deliver, notifier = deliverer(store, clock)
    settle, store.settle_message = store.settle_message, _busy

    assert deliver.run_once() == DeliveryReport(busy=1)
    store.settle_message = settle
    clock.advance(later)

    assert deliver.run_once() == DeliveryReport(sent=1)
    assert (notifier.seen, statuses(store)) == (["m1"], {"m1": OutboxStatus.SENT})


def test_a_row_that_stays_busy_is_not_tried_twice_and_holds_up_nobody(store: Store, clock: ManualClock):
    """Its lease ends, we lease it again: what became of it is known, under the new lease."""
    put(store, message("m1", at=NOW), message("m2", at=NOW, alert="a2"))
    deliver, notifier = deliverer(store, clock, replace(LATER, retry_after_s=600.0), OK)
    settle, busy = store.settle_message, iter([True, True])
    store.settle_message = lambda m: _busy(m) if m.message_id == "m1" and next(busy, False) else settle(m)
    deliver.run_once()
    clock.advance(LEASE_S + 1.0)

    assert deliver.run_once() == DeliveryReport(busy=1, retried=1, sent=1)
    assert notifier.seen == ["m1", "m2"]
    assert (row(store, "m1").attempts, row(store, "m1").last_error) == (1, "HTTP 500")


def _busy(_: OutboxMessage) -> None:
    raise StoreBusyError("locked")


def test_two_deliverers_at_once_deliver_each_message_once(store: Store, clock: ManualClock):
    """One delivers in the middle of the other's round: the lease keeps them apart."""
    put(store, *(message(f"m{i}", at=NOW, alert=f"a{i}") for i in range(6)))
    other, theirs = deliverer(store, clock)
    ours = ScriptedNotifier(then=other.run_once)
    Deliverer(store, {"webhook": ours}, clock, patience=patience()).run_once()

    assert sorted(ours.seen + theirs.seen) == [f"m{i}" for i in range(6)]
    assert set(statuses(store).values()) == {OutboxStatus.SENT}


def test_a_round_ends_when_it_is_told_that_it_is_enough(store: Store, clock: ManualClock):
    """The rest stays for the next process."""
    put(store, *(message(f"m{i}", at=NOW, alert=f"a{i}") for i in range(5)))
    deliver, notifier = deliverer(store, clock)

    assert deliver.run_once(enough=lambda: len(notifier.seen) >= 2) == DeliveryReport(sent=2)


def test_a_slow_round_tries_a_message_once_although_it_is_due_again(store: Store, clock: ManualClock):
    """Receivers that time out make a round longer than the first wait."""
    put(store, message("m1", at=NOW), message("m2", at=NOW, alert="a2"))
    deliver, notifier = deliverer(store, clock, LATER)
    quick = notifier.deliver

    def slow(one: OutboxMessage) -> Delivery:
        clock.advance(600.0)
        return quick(one)

    notifier.deliver = slow  # type: ignore[method-assign]

    assert deliver.run_once() == DeliveryReport(retried=2)
    assert notifier.seen == ["m1", "m2"]
    assert {one.status for one in store.outbox()} == {OutboxStatus.PENDING}
    assert deliver.run_once() == DeliveryReport(retried=2)


def test_the_console_alone_needs_no_extra(store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch):
    """It never fails, so there is nothing to try again; a webhook says what to install."""
    monkeypatch.setitem(sys.modules, "tenacity", None)
    put(store, message("m1", channel="console", at=NOW))

    assert Deliverer(store, {"console": ConsoleNotifier()}, clock).run_once() == DeliveryReport(sent=1)
    with pytest.raises(MissingExtraError, match=r"tenacity.*\[alerts\]"):
        Deliverer(store, {"webhook": ScriptedNotifier()}, clock)


def test_a_message_nobody_tried_for_a_week_is_no_news(store: Store, clock: ManualClock):
    """Who configures a webhook today is not told of last month's crashes; last weekend's they are."""
    put(store, message("old", at=NOW - 8 * 86400.0), message("young", at=NOW - 2 * 86400.0, alert="a2"))
    deliver, notifier = deliverer(store, clock)

    deliver.run_once()

    assert statuses(store) == {"old": OutboxStatus.DEAD, "young": OutboxStatus.SENT}
    assert notifier.seen == ["young"]


def test_a_silence_stops_what_was_written_before_it_and_lets_it_go_again(store: Store, clock: ManualClock):
    """Whichever process delivers; ended before its time, it ends within a minute. Trials are never silenced."""
    fired = replace(message("m1", at=NOW), payload={"event": "firing", "alert": {"id": "a1", "kind": "kl_drift"}})
    put(store, fired, message("m2", "test", at=NOW, alert="a2"))
    silence = Silence("s", "ann", "repair", NOW - 1.0, NOW + 3600.0, kind="kl_drift")
    store.put_silence(silence)
    deliver, notifier = deliverer(store, clock)

    assert deliver.run_once() == DeliveryReport(sent=1, waiting=1)
    assert (notifier.seen, row(store, "m1").last_error) == (["m2"], "kept back: silenced by ann: repair")
    clock.advance(61.0)
    assert deliver.run_once() == DeliveryReport(waiting=1)
    store.put_silence(replace(silence, until=NOW + 62.0))
    clock.advance(61.0)
    assert deliver.run_once() == DeliveryReport(sent=1)


def test_what_was_over_before_its_silence_is_not_told_afterwards(store: Store, clock: ManualClock, caplog):
    """That it fired is no news any more; nobody is alarmed about that."""
    over = Alert("a1", RUN.run_id, "r", "kl_drift", Severity.WARNING, AlertState.RESOLVED, 1, 2, "", resolved_step=5)
    told = {"event": "firing", "alert": {"id": "a1", "kind": "kl_drift"}}
    store.put_alerts([over], [replace(message("m1", at=NOW), payload=told)])
    store.put_silence(Silence("s", "ann", "repair", NOW - 1.0, NOW + 10.0))
    deliver, notifier = deliverer(store, clock)
    deliver.run_once()
    clock.advance(11.0)

    assert deliver.run_once() == DeliveryReport(dead=1)
    assert (notifier.seen, caplog.text) == ([], "")
    assert row(store, "m1").last_error == "resolved before it could be sent (kept back: silenced by ann: repair)"
