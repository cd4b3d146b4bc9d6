"""What a try to deliver makes of a message, and what a silence is about: pure decisions, each by each."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.alerts.matching import silence_matches
from rlwatch.alerts.outbox import LONGEST_WISH_S, Patience, after_try, is_first, precedes
from rlwatch.ports import Delivery
from rlwatch.records import Alert, AlertState, OutboxMessage, OutboxStatus, RunInfo, Severity, Silence

HOUR = 3600.0
MESSAGE = OutboxMessage("m1", "run-1", "a1", "webhook", {"event": "firing"}, created_at=1e9)
FAILED = Delivery(ok=False, reason="HTTP 500")
PATIENCE = Patience(lambda attempts: 10.0 * attempts)
EVENTS = ("firing", "escalated", "repeated", "unacknowledged", "resolved")
PLACES = {"firing": 0, "escalated": 1, "repeated": 1, "unacknowledged": 1, "resolved": 2}
ALERT = Alert("a1", "run-1", "entropy-low", "entropy_collapse", Severity.WARNING, AlertState.FIRING, 7, 9, "low")
RUN = RunInfo("run-1", project="math", name="seed3")


def told(event, at=1e9, **more):
    return replace(MESSAGE, payload={"event": event}, created_at=at, **more)


def test_a_delivery_ends_the_story():
    """When, after how many tries; the last error is no more."""
    tried = replace(MESSAGE, attempts=3, last_error="HTTP 500")
    sent = after_try(tried, Delivery(ok=True, reason="HTTP 200"), 1e9 + 5, PATIENCE)

    assert (sent.status, sent.attempts, sent.sent_at, sent.last_error) == (OutboxStatus.SENT, 4, 1e9 + 5, "")


@pytest.mark.parametrize(
    ("wish", "waits"),
    [
        (None, 10.0),
        (0.0, 10.0),
        (3.0, 10.0),
        (60.0, 60.0),
        (1e9, LONGEST_WISH_S),
        (math.inf, LONGEST_WISH_S),
        (math.nan, 10.0),
        (-5.0, 10.0),
    ],
)
def test_a_receiver_may_put_us_off_but_not_for_ever(wish, waits):
    """Never sooner than our own backoff, and a wish that is no time is none."""
    again = after_try(MESSAGE, replace(FAILED, retry_after_s=wish), 1e9 + 1, PATIENCE)

    assert (again.status, again.next_attempt_at) == (OutboxStatus.PENDING, 1e9 + 1 + waits)
    assert again.last_error == "HTTP 500"


@pytest.mark.parametrize(
    ("attempts", "age_h", "retryable", "words"),
    [
        (0, 0.0, False, "HTTP 500 (trying again would not help)"),
        (199, 0.0, True, "HTTP 500 (given up after 200 tries)"),
        (198, 0.0, True, None),
        (0, 48.1, True, "HTTP 500 (given up after 48 h)"),
        (0, 48.0, True, None),
        (199, 99.0, False, "HTTP 500 (trying again would not help)"),
    ],
)
def test_a_message_is_given_up_with_the_reason(attempts, age_h, retryable, words):
    """Each limit by itself; exactly at the age limit it is tried again."""
    tried = replace(MESSAGE, attempts=attempts)
    after = after_try(tried, replace(FAILED, retryable=retryable), MESSAGE.created_at + age_h * HOUR, PATIENCE)

    assert after.status is (OutboxStatus.PENDING if words is None else OutboxStatus.DEAD)
    assert after.last_error == (words or "HTTP 500")
    assert after.attempts == attempts + 1


def test_a_message_of_unknown_age_is_not_too_old():
    """Time 0 is no time: it was written by an older version."""
    unknown = replace(MESSAGE, created_at=0.0)

    assert after_try(unknown, FAILED, 2e9, PATIENCE).status is OutboxStatus.PENDING
    assert not PATIENCE.stale(unknown, 2e9)


@given(st.integers(0, 3), st.floats(0.0, 14.0))
def test_only_what_nobody_tried_becomes_stale(attempts, days):
    """After a week; a message that was tried is news until it is given up."""
    message = replace(MESSAGE, attempts=attempts)

    assert PATIENCE.stale(message, 1e9 + days * 24 * HOUR) == (attempts == 0 and days * 24 * HOUR > 7 * 24 * HOUR)


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), min_size=1, max_size=7))
def test_messages_of_an_alert_have_one_order(parts):
    """By what they say, then by when: no two wait for each other, and somebody can always go."""
    messages = [told(event, 1e9 + at) for event, at in parts]
    waiting = {(i, j) for (i, a), (j, b) in product(enumerate(messages), repeat=2) if precedes(a, b)}

    assert waiting == {
        (i, j) for (i, (a, s)), (j, (b, t)) in product(enumerate(parts), repeat=2) if (PLACES[a], s) < (PLACES[b], t)
    }
    assert {j for _, j in waiting} != set(range(len(messages)))


@pytest.mark.parametrize(
    "other",
    [{"status": OutboxStatus.SENT}, {"status": OutboxStatus.DEAD}, {"alert_id": "a2"}, {"channel": "slack"}],
    ids=["was sent", "was given up", "of another alert", "to another channel"],
)
def test_what_is_settled_or_elsewhere_holds_up_nobody(other):
    """Only a pending word of the same alert on the same channel does."""
    assert precedes(told("firing"), told("resolved", 2e9))
    assert not precedes(told("firing", **other), told("resolved", 2e9))


def test_nothing_precedes_the_first_word():
    """So other messages need not be read for it; an event of another version counts as one."""
    assert [event for event in (*EVENTS, "of another version") if is_first(told(event))] == [
        "firing",
        "of another version",
    ]


FIELDS = {
    "run": ("", "run-1", "seed3", "seed"),
    "project": ("", "math", "code"),
    "kind": ("", "entropy_collapse", "kl_drift"),
    "rule": ("", "entropy-low", "kl-high"),
    "labels": ({}, {"team": "rl"}, {"team": "infra"}, {"team": "rl", "tier": "1"}),
}


RIGHT = {
    "run": ("", "run-1", "seed3"),
    "project": ("", "math"),
    "kind": ("", "entropy_collapse"),
    "rule": ("", "entropy-low"),
    "labels": ({}, {"team": "rl"}),
}


def test_a_silence_is_about_what_all_its_fields_name():
    """Every combination: empty fields fit all; a run is named by its id or its name, never by a part of it."""
    said = [dict(zip(FIELDS, values, strict=True)) for values in product(*FIELDS.values())]
    fitting = [
        one for one in said if silence_matches(Silence("s1", "ann", "", 0.0, 1.0, **one), ALERT, RUN, {"team": "rl"})
    ]

    assert fitting == [one for one in said if all(one[name] in RIGHT[name] for name in FIELDS)]


@pytest.mark.parametrize(
    ("field", "value", "fit"), [("run", "run-1", True), ("run", "seed3", False), ("project", "math", False)]
)
def test_of_a_run_that_cannot_be_read_only_the_id_is_known(field, value, fit):
    """A silence of its name or project may not be about it: people are told."""
    assert silence_matches(Silence("s1", "ann", "", 0.0, 1.0, **{field: value}), ALERT, None, {}) == fit
