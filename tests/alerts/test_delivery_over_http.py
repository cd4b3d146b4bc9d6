"""The outbox and the webhook together, over a real socket; time moves only by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from outbox_examples import RUN, message, patience, put, row

from rlwatch.alerts.outbox import Deliverer
from rlwatch.clock import ManualClock
from rlwatch.notify.webhook import WebhookNotifier
from rlwatch.ports import Store
from rlwatch.records import OutboxStatus
from rlwatch.store.url import open_store
from rlwatch.testing.notifier_contract import closed_port
from rlwatch.testing.webhook_receiver import WebhookReceiver, WebhookReply

NOW = 1_700_000_000.0


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = open_store(f"memory://{request.node.name}")
    opened.open_run(RUN)
    put(opened, message("m1", at=NOW))
    yield opened
    opened.close()


def rounds(store: Store, url: str, count: int, *, total_s: float = 5.0, every_s: float = 10_000.0) -> ManualClock:
    """So many rounds of delivery, ``every_s`` apart."""
    clock = ManualClock(NOW)
    notifier = WebhookNotifier(url, secret="s3cret", clock=clock, total_s=total_s)
    deliver = Deliverer(store, {"webhook": notifier}, clock, patience=patience(max_attempts=4, max_age_s=1e9))
    for _ in range(count):
        deliver.run_once()
        clock.advance(every_s)
    return clock


def test_a_receiver_that_fails_once_gets_it_the_second_time(store: Store):
    """500, then 200: two requests with one id."""
    with WebhookReceiver(500, 200) as receiver:
        rounds(store, receiver.url, 5)

    assert [r.message_id for r in receiver.received] == ["m1", "m1"]
    assert (row(store, "m1").status, row(store, "m1").attempts) == (OutboxStatus.SENT, 2)


def test_each_try_is_signed_with_its_own_time(store: Store):
    """A retry an hour later is not refused as a replay."""
    clock = ManualClock(NOW)
    with WebhookReceiver(500, 200, secret="s3cret", clock=clock) as receiver:
        notifier = WebhookNotifier(receiver.url, secret="s3cret", clock=clock)
        deliver = Deliverer(store, {"webhook": notifier}, clock, patience=patience())
        for _ in range(2):
            deliver.run_once()
            clock.advance(3600.0)

    assert [r.verified for r in receiver.received] == [True, True]
    assert row(store, "m1").status is OutboxStatus.SENT


def test_a_receiver_that_always_fails_is_given_up(store: Store):
    """After the last try, with the reason."""
    with WebhookReceiver(500) as receiver:
        rounds(store, receiver.url, 10)

    assert len(receiver.received) == 4
    assert row(store, "m1").last_error == "HTTP 500 Internal Server Error (given up after 4 tries)"


def test_a_receiver_that_hangs_is_tried_again(store: Store):
    """Each time only for as long as the limit."""
    with WebhookReceiver(WebhookReply(hang=True), 200) as receiver:
        rounds(store, receiver.url, 2, total_s=0.2)

    assert (row(store, "m1").status, row(store, "m1").attempts) == (OutboxStatus.SENT, 2)


def test_nobody_there_is_tried_again(store: Store):
    """A closed port: the receiver is being restarted."""
    rounds(store, f"http://127.0.0.1:{closed_port()}/t0k3n-path", 2)

    assert (row(store, "m1").status, row(store, "m1").attempts) == (OutboxStatus.PENDING, 2)
    assert "t0k3n-path" not in row(store, "m1").last_error


def test_a_receiver_that_asks_for_time_gets_it(store: Store):
    """Retry-After of 500 s against our own 10 s."""
    with WebhookReceiver(WebhookReply(503, {"Retry-After": "500"}), 200) as receiver:
        rounds(store, receiver.url, 6, every_s=100.0)

        assert len(receiver.received) == 2
        assert row(store, "m1").sent_at == NOW + 500.0


def test_a_redirect_is_given_up_and_not_followed(store: Store):
    """The address in the file is wrong now: somebody has to look."""
    with WebhookReceiver(200) as elsewhere, WebhookReceiver(WebhookReply(302, {"Location": elsewhere.url})) as receiver:
        rounds(store, receiver.url, 3)

    assert (len(receiver.received), len(elsewhere.received)) == (1, 0)
    assert row(store, "m1").status is OutboxStatus.DEAD
