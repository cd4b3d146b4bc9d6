"""What receivers are sent."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from dispatch_examples import CRITICAL, RESOLVED, WARNING, alert

from rlwatch.alerts import messages
from rlwatch.alerts.engine import AlertEvent
from rlwatch.alerts.messages import AlertCase, Notification, compose_message, run_page
from rlwatch.alerts.rules import Rule
from rlwatch.diagnosis import Cause, Confidence, advice
from rlwatch.notify.payload import encode
from rlwatch.records import RunInfo

RUN = RunInfo("run-1", project="math", name="seed3", source="verl")
RULE = Rule("r", labels={"team": "rl"})
WORSE = alert(
    "entropy_collapse",
    severity=CRITICAL,
    run="run-1",
    onset_step=90,
    step=101,
    detector="entropy",
    evidence={"entropy": 0.1, "floor": math.nan},
)


def notice(of=WORSE, event: AlertEvent = AlertEvent.ESCALATED, run: RunInfo = RUN, **more: object) -> Notification:
    values = {"channel": "webhook", "severity": of.severity, "why": "became worse"} | more
    return Notification(AlertCase(of, RULE, run, live=True), event, **values)


def test_the_payload_says_what_a_person_and_a_program_need():
    """The whole of it, as documented."""
    mismatch = alert("mismatch_growth", run="run-1", onset_step=40)
    said = ("collapsed", "Collapsed at step 90: entropy fell.")
    sent = compose_message([notice()], earlier=[mismatch], headline=said, dashboard_url="http://host:8501")

    assert sent.payload == {
        "schema_version": 1,
        "event": "escalated",
        "text": "[escalated critical] math/seed3: entropy_collapse at step 101 (since step 90): "
        "entropy_collapse is bad",
        "alert": {
            "id": WORSE.alert_id,
            "rule": "r",
            "kind": "entropy_collapse",
            "detector": "entropy",
            "severity": "critical",
            "state": "firing",
            "message": "entropy_collapse is bad",
            "reason": "became worse",
            "onset_step": 90,
            "step": 101,
            "resolved_step": None,
            "fired_at": 43200.0,
            "resolved_at": None,
            "labels": {"team": "rl"},
            "run_id": "run-1",
        },
        "also": [],
        "group": {"id": WORSE.alert_id, "firing": 1},
        "earlier": [{"kind": "mismatch_growth", "severity": "warning", "onset_step": 40}],
        "state": "collapsed",
        "headline": "Collapsed at step 90: entropy fell.",
        "cause": None,
        "finding": {"detector": "entropy", "evidence": {"entropy": 0.1, "floor": "NaN"}},
        "advice": advice("entropy_collapse", "verl").to_dict(),
        "run": {"id": "run-1", "name": "seed3", "project": "math", "source": "verl"},
        "links": {"dashboard": "http://host:8501/run?run=run-1"},
    }
    assert json.loads(encode(sent.payload)) == sent.payload


def test_what_to_do_names_the_options_of_the_runs_trainer():
    """With the source and how strong its evidence is; nothing where nothing is known."""
    first = compose_message([notice()]).payload["advice"]["actions"][0]
    strange = replace(WORSE, kind="my_own_kind")

    assert first.keys() == {"name", "what", "options", "source", "strength", "evidence"}
    assert set(first["options"]) <= {"verl", "rlwatch"}
    assert compose_message([notice(strange)]).payload["advice"] is None


CAUSE = Cause("mismatch_growth", "Mismatch", 40, Confidence.STRONG, "entropy followed", "it grew from step 40", ())


def test_the_cause_is_named_with_how_sure_it_is():
    """In the line for people only where it is another thing than the alert itself."""
    published, same = (
        compose_message([notice()], cause=replace(CAUSE, kind=kind)) for kind in (CAUSE.kind, WORSE.kind)
    )

    assert published.payload["text"].endswith("is bad; most likely cause: Mismatch (high confidence)")
    assert same.payload["text"].endswith("is bad")
    assert published.payload["cause"] == {
        "kind": "mismatch_growth",
        "title": "Mismatch",
        "sure": "strong",
        "why": "entropy followed",
        "onset_step": 40,
        "summary": "it grew from step 40",
    }


def test_every_key_of_the_payload_is_documented():
    """In the module's docstring, where receivers' authors look."""
    whole = compose_message([notice()], earlier=[WORSE], cause=CAUSE, dashboard_url="http://h").payload
    nested = [key for part in ("alert", "group", "cause", "finding", "advice", "run", "links") for key in whole[part]]
    nested += [*whole["earlier"][0], *whole["advice"]["actions"][0]]

    known = [key for key in [*whole, *nested] if re.search(rf"\b{key}\b", messages.__doc__)]
    assert sorted({*whole, *nested} - set(known)) == []


def test_others_published_by_the_message_are_named_with_their_run_where_it_is_another():
    """One line says it all."""
    here, there = alert("grad_spike", run="run-1"), alert("nonfinite", run="run-2")
    other = RunInfo("run-2", project="math")
    sent = compose_message([notice(event=AlertEvent.FIRING), notice(here), notice(there, run=other)])

    assert sent.payload["text"].endswith("entropy_collapse is bad; also grad_spike, nonfinite (math/run-2)")
    assert [a["id"] for a in sent.payload["also"]] == [here.alert_id, there.alert_id]
    assert (sent.run_id, sent.alert_id) == ("run-1", WORSE.alert_id)


def test_ids_are_those_of_what_is_published_not_of_the_composing():
    """Composed again, later, with another link: the same message. Another event, channel, severity: another."""
    one, again = compose_message([notice()], now=1.0), compose_message([notice()], now=2.0, dashboard_url="http://h")
    others = [
        notice(event=AlertEvent.FIRING),
        notice(event=AlertEvent.RESOLVED),
        notice(channel="pager"),
        notice(severity=WARNING),
        notice(event=AlertEvent.REPEATED, number=1),
        notice(event=AlertEvent.REPEATED, number=2),
    ]

    assert one.message_id == again.message_id
    assert len({one.message_id, *(compose_message([each]).message_id for each in others)}) == 7
    assert (one.created_at, again.created_at) == (1.0, 2.0)


def test_a_message_is_filed_under_the_alert_its_receiver_knows():
    """So that "resolved" cannot overtake the message that said it fires."""
    sent = compose_message([notice(replace(WORSE, state=RESOLVED), AlertEvent.RESOLVED)], group="a0", firing=2)

    assert (sent.alert_id, sent.payload["group"]) == ("a0", {"id": "a0", "firing": 2})
    assert sent.payload["alert"]["id"] == WORSE.alert_id


def test_a_run_without_a_name_goes_by_its_id():
    """Something to find it by."""
    assert "default/r9: " in compose_message([notice(run=RunInfo("r9"))]).payload["text"]


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
