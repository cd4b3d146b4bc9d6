"""Every message keeps the published schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from dispatch_examples import CRITICAL, RESOLVED, alert

from rlwatch.alerts.engine import AlertEvent
from rlwatch.alerts.messages import SCHEMA_VERSION, TRIAL_EVENT, AlertCase, Notification, compose_message, trial_message
from rlwatch.alerts.rules import Rule
from rlwatch.diagnosis import kinds
from rlwatch.notify.payload import SCHEMA_FILE, alert_schema
from rlwatch.notify.webhook import WebhookNotifier
from rlwatch.records import OutboxMessage, RunInfo
from rlwatch.testing.webhook_receiver import WebhookReceiver

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = jsonschema.Draft202012Validator(alert_schema())


def composed(
    event: AlertEvent = AlertEvent.FIRING, kind: str = "entropy_collapse", source: str = "verl"
) -> OutboxMessage:
    """A message of two alerts with everything in it."""
    first = alert(kind, severity=CRITICAL, run="run-1", onset_step=90, step=101, evidence={"floor": float("nan")})
    if event is AlertEvent.RESOLVED:
        first = replace(first, state=RESOLVED, resolved_step=120, resolved_at=5.0)
    run = RunInfo("run-1", project="math", name="seed3", source=source)
    notices = [
        Notification(
            AlertCase(each, Rule("r", labels={"team": "rl"}), run, live=True), event, "webhook", each.severity, "why"
        )
        for each in (first, alert("kl_drift", run="run-1"))
    ]
    earlier = [alert("mismatch_growth", run="run-1", onset_step=40)]
    return compose_message(notices, firing=2, earlier=earlier, dashboard_url="http://host:8501")


def received(*messages: OutboxMessage) -> list[dict]:
    """As a webhook's receiver parses them."""
    with WebhookReceiver() as receiver:
        notifier = WebhookNotifier(receiver.url)
        assert all(notifier.deliver(each).ok for each in messages)
    return [json.loads(request.body) for request in receiver.received]


def test_the_schema_is_one_and_is_published_with_the_documents():
    """Valid by itself, the same in both places."""
    SCHEMA.check_schema(SCHEMA.schema)

    assert json.loads((DOCS / SCHEMA_FILE).read_text()) == SCHEMA.schema
    assert SCHEMA.schema["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert set(SCHEMA.schema["properties"]["event"]["enum"]) == {*AlertEvent, TRIAL_EVENT}


def test_what_a_receiver_gets_keeps_it():
    """Every event, every kind there is advice for, a kind without, and the trial message."""
    messages = [composed(event) for event in AlertEvent]
    messages += [composed(kind=kind, source=("", "trl/grpo", "verl")[n % 3]) for n, kind in enumerate(kinds())]
    messages += [composed(kind="no_advice"), trial_message("webhook", "http://host:8501/?token=hush", 1.0)]

    for payload in received(*messages):
        SCHEMA.validate(payload)


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"event": "exploded"},
        {"message_id": ""},
        {"alert": {}},
        {"group": {"id": "a", "firing": -1}},
        {"advice": {"title": "t"}},
        {"run": None},
        {"also": [{"id": "x"}]},
    ],
)
def test_what_does_not_keep_it_is_found(change: dict):
    """The schema can fail."""
    [payload] = received(composed())

    assert not SCHEMA.is_valid(payload | change)


def test_a_trial_message_carries_no_token_of_the_dashboard():
    """Its address may hold one."""
    assert "hush" not in json.dumps(trial_message("webhook", "http://host:8501/?token=hush", 1.0).payload)


def test_receivers_may_meet_keys_they_do_not_know():
    """New ones come without a new version."""
    [payload] = received(composed())

    assert SCHEMA.is_valid(payload | {"new": 1} | {"run": payload["run"] | {"new": 2}})
