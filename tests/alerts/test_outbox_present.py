"""Channels that deliver from some processes only."""

from __future__ import annotations

from outbox_examples import RUN, ScriptedNotifier, message, patience, put, row

from rlwatch.alerts.outbox import Deliverer, DeliveryReport
from rlwatch.clock import ManualClock
from rlwatch.records import OutboxStatus
from rlwatch.store.url import open_store


def test_what_cannot_be_delivered_from_here_is_not_touched_until_it_can():
    """No try is counted, nothing is put off: the trainer's own process finds it due."""
    store, clock = open_store("memory://present"), ManualClock()
    store.open_run(RUN)
    put(store, message("m1", at=clock.now()))
    notifier, here = ScriptedNotifier(), [False]
    notifier.present = lambda: here[0]
    deliver = Deliverer(store, {"webhook": notifier}, clock, patience=patience())

    assert deliver.run_once() == DeliveryReport()
    assert (row(store, "m1").attempts, row(store, "m1").lease_until) == (0, 0.0)
    here[0] = True
    assert deliver.run_once() == DeliveryReport(sent=1)
    assert row(store, "m1").status is OutboxStatus.SENT
    store.close()
