"""What must be true of the alert engine for every run."""

from __future__ import annotations

from collections import Counter

from alert_examples import finding, told
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.alerts.engine import AlertEngine, AlertEvent, Transition
from rlwatch.alerts.rules import Rule
from rlwatch.records import AlertState, Finding, Severity

KINDS = ("nonfinite", "grad_spike", "kl_drift")
severities = st.sampled_from(Severity)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    for_steps = draw(st.integers(0, 25))
    return Rule(
        draw(st.sampled_from("abc")),
        kinds=draw(st.sampled_from([(), ("nonfinite",), ("grad_spike", "kl_drift")])),
        min_severity=draw(severities),
        for_steps=for_steps,
        for_critical=draw(st.none() | st.integers(0, for_steps)),
        keep_firing_for=draw(st.integers(0, 25)),
        severity=draw(st.none() | severities),
    )


rule_sets = st.lists(rules(), min_size=1, max_size=3, unique_by=lambda rule: rule.name)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, list[Finding]]]:
    gap = draw(st.sampled_from([1, 5, 10]))
    holding = st.dictionaries(st.sampled_from(KINDS), severities, max_size=3)
    history = draw(st.lists(holding, max_size=40))
    return [(gap * i, [finding(kind, v, step=gap * i) for kind, v in now.items()]) for i, now in enumerate(history)]


@given(rule_sets, runs(), st.integers(0, 40))
def test_a_prefix_of_a_run_says_a_prefix_of_what_the_run_says(rules: list[Rule], run: list, cut: int):
    """Causal: nothing later changes what was said."""
    whole, part = told(AlertEngine("r", rules), run), told(AlertEngine("r", rules), run[:cut])

    assert part == whole[: len(part)]


@given(rule_sets, runs())
def test_a_replay_says_the_same(rules: list[Rule], run: list):
    """Deterministic, ids included."""
    assert told(AlertEngine("r", rules), run) == told(AlertEngine("r", rules), run)


@given(rule_sets, runs())
def test_nobody_is_notified_twice_that_an_alert_fires_at_a_severity(rules: list[Rule], run: list):
    """Each word but the last is of another severity than the one before, however the condition flickers."""
    words = [t for t in told(AlertEngine("r", rules), run) if t.event not in (None, AlertEvent.RESOLVED)]
    ranks: dict[str, int] = {}
    for t in words:
        change = t.alert.severity.rank - ranks.get(t.alert.alert_id, -1)
        ranks[t.alert.alert_id] = t.alert.severity.rank
        assert (change > 0) is (t.event is not AlertEvent.EASED)
        assert change

    assert all(n == 1 for n in Counter(t.alert.alert_id for t in words if t.event is AlertEvent.FIRING).values())


@given(rule_sets, runs())
def test_what_got_better_had_been_better_for_as_long_as_the_rule_asks(rules: list[Rule], run: list):
    """An alert that flickers between two severities says so once."""
    since: dict[str, int] = {}
    for t in told(AlertEngine("r", rules), run):
        if t.event is AlertEvent.EASED:
            assert t.alert.step - since[t.alert.alert_id] >= t.rule.keep_firing_for
        since[t.alert.alert_id] = t.alert.step


def stories(transitions: list[Transition]) -> dict[str, list[str]]:
    by_alert: dict[str, list[str]] = {}
    for t in transitions:
        by_alert.setdefault(t.alert.alert_id, []).append(t.reason.value)
    return by_alert


@given(rule_sets, runs())
def test_every_alert_lives_in_order(rules: list[Rule], run: list):
    """Pending, firing, worse or better, resolved; resolved only after firing; nothing after the end."""
    order = {"first_pending": 0, "fired_at_once": 1, "held_for": 1, "resolved": 3, "condition_gone": 3}
    order |= {"escalated": 2, "eased": 2}
    for story in stories(told(AlertEngine("r", rules), run)).values():
        places = [order[reason] for reason in story]

        assert places == sorted(places)
        assert story[0] in ("first_pending", "fired_at_once")
        assert ("resolved" in story) <= bool({"fired_at_once", "held_for"} & set(story))
        assert ("condition_gone" in story) <= (story == ["first_pending", "condition_gone"])


@given(rule_sets, runs())
def test_what_is_open_is_what_has_begun_and_not_ended(rules: list[Rule], run: list):
    """The engine's memory agrees with what it said."""
    engine = AlertEngine("r", rules)
    begun: set[str] = set()
    for t in told(engine, run):
        (begun.discard if t.alert.state is AlertState.RESOLVED else begun.add)(t.alert.alert_id)

    assert engine.open_ids() == begun


@given(runs(), st.sampled_from([1, 5, 10, 20]), st.sampled_from([0, 5, 10, 15]))
def test_firing_and_resolving_agree_with_a_slow_reading_of_the_definition(run: list, wait: int, keep: int):
    """An independent reading of the two definitions, from the whole history at each step."""
    rule = Rule("a", kinds=("nonfinite",), min_severity=Severity.INFO, for_steps=wait, keep_firing_for=keep)
    said = [
        (t.event.value, t.alert.step)
        for t in told(AlertEngine("r", [rule]), run)
        if t.event in (AlertEvent.FIRING, AlertEvent.RESOLVED)
    ]

    assert slow_reading([(step, any(f.kind == "nonfinite" for f in now)) for step, now in run], wait, keep) == said


def slow_reading(history: list[tuple[int, bool]], wait: int, keep: int) -> list[tuple[str, int]]:
    events: list[tuple[str, int]] = []
    firing = False
    for i, (step, holds) in enumerate(history):
        stretch = i
        while stretch > 0 and history[stretch - 1][1] == holds:
            stretch -= 1
        age = step - history[stretch][0]
        if not firing and holds and age >= wait:
            events.append(("firing", step))
            firing = True
        elif firing and not holds and age >= keep:
            events.append(("resolved", step))
            firing = False
    return events
