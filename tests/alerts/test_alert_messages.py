"""What receivers are sent."""

from __future__ import annotations

import json
import math
import re

import pytest
from alert_examples import CRITICAL, WARNING, finding, told

from rlwatch.alerts import messages
from rlwatch.alerts.engine import AlertEngine
from rlwatch.alerts.messages import messages_for, payload, run_page
from rlwatch.alerts.rules import Rule
from rlwatch.alerts.transitions import Transition
from rlwatch.notify.encode import encode
from rlwatch.records import RunInfo, Severity

RUN = RunInfo("run-1", project="math", name="seed3", source="verl")


def story(**rule: object) -> list[Transition]:
    """Fires at 100, escalates at 101, resolves at 102."""
    rows = [
        (100, [finding(severity=WARNING, step=100, onset=90, evidence={"entropy": 0.1, "floor": math.nan})]),
        (101, [finding(severity=CRITICAL, step=101, onset=90)]),
        (102, []),
    ]
    return told(AlertEngine("run-1", [Rule("entropy", labels={"team": "rl"}, **rule)]), rows)


def test_there_is_one_message_for_each_event_and_channel():
    """In the order of the rule's channels."""
    sent = [
        (m.payload["event"], m.channel)
        for t in story(channels=("console", "webhook", "console"))
        for m in messages_for(t, RUN)
    ]

    assert sent == [(e, c) for e in ("firing", "escalated", "resolved") for c in ("console", "webhook")]


def test_only_channels_that_exist_get_one():
    """No row waits for ever for a webhook nobody configured."""
    assert [m.channel for m in messages_for(story()[0], RUN, channels={"webhook", "pager"})] == ["webhook"]
    assert messages_for(story()[0], RUN, channels=()) == []


def test_what_tells_nobody_makes_no_message():
    """Pending, and the end of a pending one; a rule without channels."""
    pending, gone, _, _ = (
        *told(AlertEngine("r", [Rule("r", for_steps=5)]), [(0, [finding()]), (1, [])]),
        *story()[:2],
    )

    assert [messages_for(t, RUN) for t in (pending, gone)] == [[], []]
    assert [t.notify for t in story(channels=())] == [False] * 3


def test_ids_are_those_of_the_event_not_of_the_composing():
    """A replay, or a second monitor, makes the same messages; different events make different ones."""
    first = [m.message_id for t in story() for m in messages_for(t, RUN, now=1.0)]
    again = [m.message_id for t in story() for m in messages_for(t, RUN, now=2.0, dashboard_url="http://h")]

    assert first == again
    assert len(set(first)) == 6


def test_two_escalations_of_one_alert_are_two_messages():
    """Info, warning, critical."""
    rows = [(s, [finding(severity=v, step=s)]) for s, v in enumerate(Severity)]
    transitions = told(AlertEngine("r", [Rule("r", min_severity="info", channels=("webhook",))]), rows)

    assert len({m.message_id for t in transitions for m in messages_for(t, RUN)}) == 3


def test_a_message_is_written_now_or_when_its_step_was():
    """``ts`` of the step, unless the caller knows better."""
    fired = story()[0]

    assert (messages_for(fired, RUN)[0].created_at, messages_for(fired, RUN, now=7.0)[0].created_at) == (1100.0, 7.0)


def test_the_payload_says_what_a_person_and_a_program_need():
    """The whole of it, as documented."""
    assert payload(story()[1], RUN, "http://host:8501") == {
        "schema_version": 1,
        "event": "escalated",
        "text": "[escalated critical] math/seed3: entropy_collapse at step 101 (since step 90): entropy_collapse at 101",
        "alert": {
            "id": story()[0].alert.alert_id,
            "rule": "entropy",
            "kind": "entropy_collapse",
            "detector": "entropy",
            "severity": "critical",
            "state": "firing",
            "message": "entropy_collapse at 101",
            "reason": "became worse at step 101; was warning",
            "onset_step": 90,
            "step": 101,
            "resolved_step": None,
            "fired_at": 1100.0,
            "resolved_at": None,
            "labels": {"team": "rl"},
        },
        "finding": {"detector": "entropy", "evidence": {}},
        "run": {"id": "run-1", "name": "seed3", "project": "math", "source": "verl"},
        "links": {"dashboard": "http://host:8501/run?run=run-1"},
    }


def test_every_key_of_the_payload_is_documented():
    """In the module's docstring, where receivers' authors look."""
    whole = payload(story()[2], RUN, "http://h")
    nested = [key for part in ("alert", "finding", "run", "links") for key in whole[part]]

    assert [key for key in [*whole, *nested] if not re.search(rf"\b{key}\b", messages.__doc__)] == []


def test_a_value_that_is_not_finite_is_a_word():
    """Strict JSON, whatever the evidence holds."""
    evidence = payload(story()[0], RUN)["finding"]["evidence"]

    assert evidence == {"entropy": 0.1, "floor": "NaN"}
    assert json.loads(encode(payload(story()[0], RUN)))["finding"]["evidence"]["floor"] == "NaN"


def test_a_run_without_a_name_goes_by_its_id():
    """Something to find it by."""
    assert "default/r9: " in payload(story()[0], RunInfo("r9"))["text"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "http://h:1/run?run=a%2Fb"),
        ("http://h:1/", "http://h:1/run?run=a%2Fb"),
        ("https://me:pw@h/app/?token=s3cret#x", "https://h/app/run?run=a%2Fb"),
    ],
)
def test_the_link_carries_no_token(url: str, expected: str):
    """Messages leave the house."""
    assert run_page(url, "a/b") == expected
