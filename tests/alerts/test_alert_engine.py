"""Episodes: pending, firing, resolved, counted in step numbers."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
from alert_examples import ANY, CRITICAL, INFO, WARNING, finding, rows, steps_and_reasons, told

from rlwatch.alerts.engine import AlertEngine, DecisionReason
from rlwatch.alerts.rules import Rule
from rlwatch.errors import ConfigError
from rlwatch.records import AlertState, Severity


def engine(**rule: object) -> AlertEngine:
    return AlertEngine("run-1", [Rule("r", **rule)])


def test_a_rule_without_patience_fires_at_the_first_step_and_resolves_at_the_first_without():
    """for = keep = 0."""
    transitions = told(engine(), rows([1, 2, 3], [True, True, False]))

    assert steps_and_reasons(transitions) == [(1, "fired_at_once"), (3, "resolved")]


@pytest.mark.parametrize("gap", [1, 5, 10])
@pytest.mark.parametrize("patience", [1, 4, 5, 6, 10, 20])
def test_it_fires_at_the_first_row_where_the_steps_since_the_beginning_reach_for_steps(gap: int, patience: int):
    """Exact at the boundary, whatever the distance of rows: not rows are counted but steps."""
    steps = [100 + gap * i for i in range(30)]
    expected = next(s for s in steps if s - 100 >= patience)

    transitions = told(engine(for_steps=patience), rows(steps, [True] * 30))

    assert [(100, "first_pending"), (expected, "held_for")] == steps_and_reasons(transitions)


@pytest.mark.parametrize("gap", [1, 5, 10])
@pytest.mark.parametrize("keep", [0, 1, 4, 5, 6, 10, 20])
def test_it_resolves_at_the_first_row_where_the_steps_since_it_was_gone_reach_keep_firing_for(gap: int, keep: int):
    """Gone since the first row without the condition, as Prometheus counts."""
    steps = [100 + gap * i for i in range(30)]
    gone = steps[3]
    expected = next(s for s in steps if s >= gone and s - gone >= keep)

    transitions = told(engine(keep_firing_for=keep), rows(steps, [True] * 3 + [False] * 27))

    assert [(100, "fired_at_once"), (expected, "resolved")] == steps_and_reasons(transitions)


def test_a_gap_in_the_condition_starts_the_wait_anew():
    """``for`` means without interruption."""
    holds = [True, True, False, True, True, True, True]

    transitions = told(engine(for_steps=3), rows(range(7), holds))

    assert steps_and_reasons(transitions) == [
        (0, "first_pending"),
        (2, "condition_gone"),
        (3, "first_pending"),
        (6, "held_for"),
    ]


def test_a_pending_alert_that_vanishes_tells_nobody_and_never_fired():
    """Stored as resolved, so that no row says 'pending' for ever; ``fired_at`` stays empty."""
    transitions = told(engine(for_steps=3), rows(range(3), [True, True, False]))

    assert [t.notify for t in transitions] == [False, False]
    assert (
        transitions[-1].alert.state,
        transitions[-1].alert.fired_at,
        transitions[-1].alert.resolved_step,
    ) == (AlertState.RESOLVED, None, 2)


def test_a_condition_that_flickers_within_keep_firing_for_is_one_episode():
    """One firing, one resolved, one id; the time to resolve counts from the last disappearance."""
    holds = [True, False, True, False, False, True, False, False, False, False]

    transitions = told(engine(keep_firing_for=3), rows(range(10), holds))

    assert steps_and_reasons(transitions) == [(0, "fired_at_once"), (9, "resolved")]
    assert len({t.alert.alert_id for t in transitions}) == 1


def test_the_next_episode_has_another_id():
    """The id holds the seq of its beginning."""
    transitions = told(engine(), rows(range(4), [True, False, True, False]))

    first, _, second, _ = (t.alert.alert_id for t in transitions)

    assert first == hashlib.sha256(b"run-1|r|entropy_collapse|1").hexdigest()[:16]
    assert second == hashlib.sha256(b"run-1|r|entropy_collapse|3").hexdigest()[:16]


def test_getting_worse_within_an_episode_is_published_once():
    """Warning, critical, warning for less than the rule asks, critical: one firing, one escalation."""
    severities = [WARNING, WARNING, CRITICAL, WARNING, CRITICAL, CRITICAL]

    transitions = told(
        engine(keep_firing_for=2), [(s, [finding(severity=v, step=s)]) for s, v in enumerate(severities)]
    )

    assert steps_and_reasons(transitions) == [(0, "fired_at_once"), (2, "escalated")]
    assert [t.alert.severity for t in transitions] == [WARNING, CRITICAL]
    assert transitions[0].alert.alert_id == transitions[1].alert.alert_id
    assert "worse than warning" in transitions[1].alert.reason


@pytest.mark.parametrize("gap", [1, 5, 10])
def test_getting_better_is_published_once_it_has_lasted(gap: int):
    """As long as a rule asks before an alert is over; what gets worse again is published again."""
    severities = [CRITICAL, WARNING, CRITICAL, *[WARNING] * 30, CRITICAL]
    steps = [100 + gap * place for place in range(len(severities))]
    eased = next(s for s in steps if s - steps[3] >= 20)

    transitions = told(
        engine(keep_firing_for=20), [(s, [finding(severity=v, step=s)]) for s, v in zip(steps, severities, strict=True)]
    )

    assert steps_and_reasons(transitions) == [(100, "fired_at_once"), (eased, "eased"), (steps[-1], "escalated")]
    assert [t.alert.severity for t in transitions] == [CRITICAL, WARNING, CRITICAL]
    assert transitions[1].alert.reason == f"no longer critical since step {steps[3]}"
    assert len({t.alert.alert_id for t in transitions}) == 1


def test_getting_better_and_being_over_are_told_with_their_numbers():
    """Where whoever judges the rows has some; the end says when and after how many steps."""
    judge, severities = engine(), [CRITICAL, WARNING]
    numbers = {"entropy_collapse": "policy/entropy back at 0.71, 0.74 before"}
    for step, severity in enumerate(severities):
        said = judge.step(step, step, [finding(severity=severity, step=step, onset=0)], back=numbers.get)
    assert said[0].alert.reason == "no longer critical since step 1: policy/entropy back at 0.71, 0.74 before"

    over = judge.step(9, 42, [], back=numbers.get)[0].alert

    assert over.reason == "recovered at step 42 after 42 steps: policy/entropy back at 0.71, 0.74 before"
    assert over.severity is CRITICAL  # as bad as it was told


def test_a_resolved_alert_keeps_the_worst_severity_it_was_published_at():
    """Receivers route the resolved message as they routed the alarm."""
    severities = [WARNING, CRITICAL, WARNING]

    last = told(engine(), [*((s, [finding(severity=v, step=s)]) for s, v in enumerate(severities)), (3, [])])[-1]

    assert (last.reason, last.alert.severity) == (DecisionReason.RESOLVED, CRITICAL)


def test_a_critical_finding_need_not_wait_where_the_rule_says_so():
    """``for_critical = 0`` beside a patient ``for_steps``."""
    patient = engine(for_steps=100, for_critical=0)

    transitions = told(patient, [(0, [finding(step=0)]), (1, [finding(severity=CRITICAL, step=1)])])

    assert steps_and_reasons(transitions) == [(0, "first_pending"), (1, "held_for")]
    assert [t.alert.severity for t in transitions] == [WARNING, CRITICAL]


def test_the_wait_of_a_critical_finding_counts_only_steps_at_which_it_was_critical():
    """Ten steps of warning do not make a critical finding old."""
    severities = [WARNING] * 10 + [CRITICAL, WARNING] + [CRITICAL] * 5

    transitions = told(
        engine(for_steps=100, for_critical=3), [(s, [finding(severity=v, step=s)]) for s, v in enumerate(severities)]
    )

    assert steps_and_reasons(transitions) == [(0, "first_pending"), (15, "held_for")]


def test_a_severity_of_the_rule_replaces_the_findings_and_there_is_nothing_to_escalate():
    """The rule speaks."""
    transitions = told(
        engine(severity=INFO), [(0, [finding(severity=WARNING)]), (1, [finding(severity=CRITICAL, step=1)])]
    )

    assert steps_and_reasons(transitions) == [(0, "fired_at_once")]
    assert INFO is transitions[0].alert.severity


def test_a_finding_below_the_minimum_counts_as_absent():
    """So an alert resolves when its finding sinks to info."""
    transitions = told(engine(), [(0, [finding()]), (1, [finding(severity=INFO, step=1)])])

    assert steps_and_reasons(transitions) == [(0, "fired_at_once"), (1, "resolved")]


def test_kinds_are_separate_episodes_and_come_in_order():
    """Each kind has its own alert; rules come in their order, kinds by name."""
    judge = AlertEngine("run-1", [Rule("b"), Rule("a", kinds=("kl_drift",))])

    transitions = judge.step(1, 0, [finding("kl_drift"), finding("grad_spike")])

    assert [(t.alert.rule, t.alert.kind) for t in transitions] == [
        ("b", "grad_spike"),
        ("b", "kl_drift"),
        ("a", "kl_drift"),
    ]


def test_the_worst_of_several_findings_of_a_kind_speaks():
    """Severity, then score (NaN last), then the earliest onset."""
    mild, severe = finding(score=9.0, message="mild"), finding(severity=CRITICAL, score=math.nan, message="severe")
    late, early = finding(score=2.0, onset=7, message="late"), finding(score=2.0, onset=3, message="early")

    said = [
        AlertEngine("r", [ANY]).step(1, 9, holding)[0].alert.message
        for holding in ([mild, severe], [severe, mild], [late, early], [mild, replace(mild, score=None), early])
    ]

    assert said == ["severe", "severe", "early", "mild"]


def test_the_evidence_carries_metric_score_and_baseline():
    """What a person needs to believe it, in one mapping."""
    alert = (
        engine()
        .step(1, 5, [finding(metric="policy/entropy", score=2.5, baseline=1.0, evidence={"now": 0.1})], ts=7.0)[0]
        .alert
    )

    assert alert.evidence == {"metric": "policy/entropy", "score": 2.5, "baseline": 1.0, "now": 0.1}
    assert alert.fired_at == 7.0


def test_a_finding_on_arrival_fires_at_once_and_the_closed_step_adds_nothing():
    """NaN does not wait for its step to close."""
    judge = engine(kinds=("nonfinite",))
    nan = finding("nonfinite", CRITICAL, step=4)

    on_arrival = judge.arrival(7, 4, [nan], ts=70.0)
    at_close = judge.step(8, 4, [nan], ts=80.0)

    assert (steps_and_reasons(on_arrival), at_close) == ([(4, "fired_at_once")], [])
    assert hashlib.sha256(b"run-1|r|nonfinite|7").hexdigest()[:16] == on_arrival[0].alert.alert_id


def test_rules_with_patience_do_not_hear_arrivals():
    """They count closed steps only."""
    judge = engine(for_steps=1)

    assert judge.arrival(1, 1, [finding("nonfinite")]) == []
    assert frozenset() == judge.open_ids()


def test_an_arrival_ends_nothing():
    """Other alerts go on: an arrival says nothing about them."""
    judge = engine()
    judge.step(1, 1, [finding("grad_spike")])

    fired = judge.arrival(2, 2, [finding("nonfinite", CRITICAL)])

    assert [(t.alert.kind, t.reason) for t in fired] == [("nonfinite", "fired_at_once")]
    assert len(judge.active) == 2


def test_silent_decisions_are_kept_with_their_reasons():
    """Why nobody was told can be asked."""
    judge = engine(for_steps=2, keep_firing_for=2)
    reasons = []
    for step, holds in enumerate([True, True, True, True, False, False, False]):
        judge.step(step + 1, step, [finding(step=step)] if holds else [])
        reasons += [decision.reason.value for decision in judge.decisions]

    assert reasons == [
        "first_pending",
        "pending_silent",
        "held_for",
        "still_firing_silent",
        "kept_firing_silent",
        "kept_firing_silent",
        "resolved",
    ]


def test_a_step_number_that_goes_back_begins_the_wait_anew():
    """A rewind within one engine neither fires early nor never."""
    steps = [100, 104, 50, 54, 55]

    transitions = told(engine(for_steps=5), rows(steps, [True] * 5))

    assert steps_and_reasons(transitions) == [(100, "first_pending"), (55, "held_for")]


def test_open_ids_are_those_pending_or_firing():
    """What is over is forgotten: memory does not grow with the run."""
    judge = engine(for_steps=1)
    seen = []
    for step, holds in enumerate([True, True, False, False]):
        judge.step(step + 1, step, [finding(step=step)] if holds else [])
        seen.append(len(judge.open_ids()))

    assert seen == [1, 1, 0, 0]


def test_two_rules_of_one_name_are_refused():
    """They would share alert ids."""
    with pytest.raises(ConfigError, match="'same'"):
        AlertEngine("r", [Rule("same"), Rule("other"), Rule("same")])


def test_severity_order_is_info_warning_critical():
    """What the tests above rely on."""
    assert [s.rank for s in Severity] == [0, 1, 2]
