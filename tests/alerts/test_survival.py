"""An alert outlives the process in which it fired."""

from __future__ import annotations

from pathlib import Path

from preloaded import run_program

from rlwatch.alerts.outbox import Deliverer, DeliveryReport
from rlwatch.notify.webhook import WebhookNotifier
from rlwatch.records import AlertState, OutboxStatus
from rlwatch.store.url import open_store
from rlwatch.testing.webhook_receiver import WebhookReceiver

DIES_AFTER_THE_ROW = """
import os, sys, time
from rlwatch.alerts.engine import AlertEngine
from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.rules import AlertingConfig
from rlwatch.alerts.rules import default_rules
from rlwatch.records import Finding, RunInfo, Severity
from rlwatch.store.url import open_store

store = open_store(sys.argv[1])
writer = store.open_run(RunInfo("run-1", project="math"))
collapse = Finding("entropy", "entropy_collapse", Severity.CRITICAL, 7, 5, "entropy is gone")
[fired] = AlertEngine("run-1", default_rules()).step(1, 7, [collapse], ts=time.time())
Dispatcher(store, AlertingConfig()).publish("run-1", [fired.alert])
os._exit(9)
"""

DIES_AFTER_THE_DELIVERY = """
import os, sys, time
from rlwatch.alerts.outbox import Deliverer
from rlwatch.notify.webhook import WebhookNotifier
from rlwatch.store.url import open_store

store = open_store(sys.argv[1])
store.settle_message = lambda message: os._exit(9)
Deliverer(store, {"webhook": WebhookNotifier(sys.argv[2], secret="s3cret")}).run_once()
"""


def run_to_its_death(script: str, *args: str) -> None:
    done = run_program(script, *args, having="rlwatch")
    assert done.returncode == 9, done.stderr


def test_an_alert_whose_process_died_after_its_row_is_delivered_by_the_next(tmp_path: Path):
    """The whole way: a real process, a real file, a real receiver that checks the signature."""
    run_to_its_death(DIES_AFTER_THE_ROW, str(tmp_path))
    store = open_store(tmp_path)
    with WebhookReceiver(secret="s3cret") as receiver:
        deliver = Deliverer(store, {"webhook": WebhookNotifier(receiver.url, secret="s3cret")})

        assert deliver.run_once() == DeliveryReport(sent=1)
        assert deliver.run_once() == DeliveryReport()

    [received] = receiver.received
    assert received.verified
    assert (received.payload["event"], received.payload["alert"]["kind"]) == ("firing", "entropy_collapse")
    assert [a.state for a in store.alerts()] == [AlertState.FIRING]
    store.close()


def test_a_process_that_died_after_the_delivery_makes_a_recognisable_second_one(tmp_path: Path):
    """At least once, and the id is the same: a receiver can drop it."""
    run_to_its_death(DIES_AFTER_THE_ROW, str(tmp_path))
    with WebhookReceiver(secret="s3cret") as receiver:
        run_to_its_death(DIES_AFTER_THE_DELIVERY, str(tmp_path), receiver.url)
        store = open_store(tmp_path)
        deliver = Deliverer(store, {"webhook": WebhookNotifier(receiver.url, secret="s3cret")})

        assert deliver.run_once() == DeliveryReport(sent=1)

    assert (len(receiver.received), len(receiver.deliveries)) == (2, 1)
    assert [m.status for m in store.outbox()] == [OutboxStatus.SENT]
    store.close()
