"""A symptom whose cause is over: told once it has gone on without it, not at the moment the cause ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dispatch_examples import CRITICAL, HOOK, NOON, RESOLVED, WARNING, Office, alert
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.alerts.dispatch import settling_steps
from rlwatch.alerts.engine import AlertEngine
from rlwatch.alerts.rules import Inhibition, Rule, default_rules
from rlwatch.records import Alert, AlertState, Finding

KEEPS = Rule("r", channels=("hook",), keep_firing_for=20)
CAUSE = Inhibition(("nonfinite",), ("grad_spike", "kl_drift"))


def an_office(rule: Rule = KEEPS, **more: object) -> Office:
    """A cause fires from step 7 on and keeps a symptom of the same step back."""
    office = Office(rule, inhibitions=(CAUSE,), **more)
    published = office.reach(7, alert("nonfinite", severity=CRITICAL), alert("grad_spike"))
    assert published == ["hook firing critical nonfinite"]
    return office


def over(kind: str, step: int, severity=WARNING) -> Alert:
    return alert(kind, RESOLVED, severity, step=step, resolved_step=step, resolved_at=NOON)


def end_of_the_cause(office: Office, step: int = 60) -> list[str]:
    return office.reach(step, over("nonfinite", step, CRITICAL))


def test_a_symptom_that_ends_soon_after_its_cause_is_never_published():
    """It was no more than its echo: nobody is woken by it, nor by its end."""
    office = an_office()
    assert end_of_the_cause(office) == ["hook resolved critical nonfinite"]
    assert office.kept() == ["grad_spike: inhibited until step 80: nonfinite was over at step 60"]

    assert [office.reach(79), office.reach(80, over("grad_spike", 80)), office.reach(500)] == [[], [], []]


def test_a_symptom_that_goes_on_without_its_cause_is_published_once():
    """At the step at which it would have ended, had it gone with its cause."""
    office = an_office()
    end_of_the_cause(office)

    assert [office.reach(79), office.reach(80), office.reach(81)] == [[], ["hook firing warning grad_spike"], []]


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        (Rule("r", channels=("hook",)), 0),
        (Rule("r", channels=("hook",), for_steps=10), 10),
        (Rule("r", channels=("hook",), for_steps=10, keep_firing_for=4), 10),
        (Rule("r", channels=("hook",), for_steps=10, keep_firing_for=40), 40),
    ],
)
def test_it_waits_for_the_longer_of_what_its_rule_asks_for_to_begin_and_to_end(rule, steps):
    """A rule that asks for neither waits for nothing."""
    office = an_office(rule)
    published = [end_of_the_cause(office)[1:], *(office.reach(60 + step) for step in range(1, 50))]

    assert [step for step, messages in enumerate(published) if messages] == [steps]


def test_by_default_a_symptom_waits_until_its_alert_would_have_ended():
    """Critical ones, too: their alert outlives the condition as long."""
    rule = next(rule for rule in default_rules() if "reward_drop" in rule.kinds)

    assert {settling_steps(rule, alert("reward_drop", severity=severity)) for severity in (WARNING, CRITICAL)} == {20}


def test_what_gets_worse_or_begins_after_the_end_of_the_cause_is_published_at_once():
    """That is news, whatever was before."""
    office = an_office()
    end_of_the_cause(office)
    worse = alert("grad_spike", severity=CRITICAL, step=63)

    assert office.reach(62, alert("kl_drift", step=62)) == ["hook firing warning kl_drift"]
    assert office.reach(63, worse) == ["hook firing critical grad_spike"]


def test_a_cause_that_comes_back_keeps_its_symptom_back_again():
    """Then its second end counts."""
    office = an_office()
    end_of_the_cause(office)
    again = replace(alert("nonfinite", severity=CRITICAL, step=70), alert_id="again")
    office.reach(70, again)
    assert office.reach(85) == []
    assert office.kept() == ["grad_spike: inhibited by nonfinite since step 5"]
    office.reach(90, replace(over("nonfinite", 90, CRITICAL), alert_id="again"))

    assert [office.reach(109), office.reach(110)] == [[], ["hook firing warning grad_spike"]]


def test_what_waits_itself_lets_nobody_wait():
    """Else a new alert would be kept back by one that nobody was told of."""
    office = Office(KEEPS, inhibitions=(CAUSE, Inhibition(("kl_drift",), ("reward_drop",), WARNING)))
    office.reach(7, alert("nonfinite", severity=CRITICAL), alert("kl_drift"))
    end_of_the_cause(office)

    assert office.reach(63, alert("reward_drop", step=63)) == ["hook firing warning reward_drop"]
    assert office.kept() == ["kl_drift: inhibited until step 80: nonfinite was over at step 60"]


def test_repeats_of_a_symptom_that_was_published_before_wait_likewise_and_its_end_does_not():
    """It was told at step 7, its cause fired from 30 to 60, its repeat was due in between."""
    office = Office(replace(KEEPS, repeat_minutes=60.0), inhibitions=(CAUSE,))
    office.reach(7, alert("grad_spike"))
    office.reach(30, alert("nonfinite", severity=CRITICAL, step=30))
    office.deliver()
    office.clock.advance(3600.0)
    end_of_the_cause(office)

    assert office.reach(79) == []
    assert office.reach(80) == ["hook repeated warning grad_spike"]
    assert office.reach(81, over("grad_spike", 81)) == ["hook resolved warning grad_spike"]


def test_a_run_that_goes_no_further_waits_for_nothing():
    """At its end, or when it has fallen silent: what still fires is told, not lost."""
    for last in ("last word", "silent"):
        office = an_office()
        end_of_the_cause(office)
        office.live = last != "silent"
        assert office.publish(final=last == "last word") == ["hook firing warning grad_spike"]


def test_a_run_whose_steps_went_back_waits_for_nothing():
    """An earlier checkpoint: the steps that it would wait for may never come."""
    office = an_office()
    end_of_the_cause(office)

    assert office.reach(41) == ["hook firing warning grad_spike"]


def test_a_cause_that_notified_nobody_lets_nobody_wait():
    """Nor one that was gone before it fired."""
    mute = Rule("mute", channels=("console",))
    office = Office(KEEPS, mute, inhibitions=(CAUSE,))
    muted = alert("nonfinite", RESOLVED, CRITICAL, rule="mute", step=60, resolved_step=60)
    vanished = replace(over("nonfinite", 60, CRITICAL), fired_at=None)

    assert office.reach(61, muted, vanished, alert("grad_spike")) == ["hook firing warning grad_spike"]


def test_rows_that_were_stored_in_one_batch_are_judged_at_their_own_step():
    """The run's last row is step 100 already when what happened at step 60 is put down."""
    office = an_office()
    office.reach(100)
    assert office.publish(over("nonfinite", 60, CRITICAL)) == ["hook resolved critical nonfinite"]

    assert [office.publish(over("grad_spike", 65)), office.reach(101)] == [[], []]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=4, max_size=12), st.integers(0, 6), st.integers(0, 6))
def test_a_symptom_is_published_after_its_cause_only_if_it_held_without_it(lengths, before, keep):
    """Against the condition itself, step by step: what is told of it held when its cause had ended, or later."""
    holds = [bool(place % 2) for place, length in enumerate(lengths) for _ in range(length)]
    rule = replace(HOOK, for_steps=before, keep_firing_for=keep)
    office, engine = Office(rule, inhibitions=(CAUSE,)), AlertEngine("run", [rule])
    end = 20
    office.reach(0, alert("nonfinite", severity=CRITICAL, onset_step=0, step=0))
    for step, holding in enumerate(holds, 1):
        found = [Finding("d", "grad_spike", WARNING, step, step, "", seq=step)] if holding else []
        changed = [transition.alert for transition in engine.step(step, step, found, NOON)]
        published = office.reach(step, *changed, *([over("nonfinite", end, CRITICAL)] if step == end else []))
        if any("firing warning grad_spike" in message for message in published) and keep + before:
            [fired] = [one for one in engine.active if one.state is AlertState.FIRING]
            assert step > end
            assert fired.step > end or any(holds[end - 1 : step])
