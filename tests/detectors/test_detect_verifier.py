"""Canaries that a verifier scores differently, and reward functions that fail."""

import random

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.reward.verifier_changed import VerifierChanged
from rlwatch.detectors.reward.verifier_health import VerifierHealth
from rlwatch.diagnosis.diagnose import diagnose
from rlwatch.records import ClosedStep, Finding, Severity

RIGHT, WRONG = "verifier/canary_right/exact/four", "verifier/canary_wrong/exact/five"


def at(curve, every=5):
    """A curve that is measured every so many steps."""
    return lambda step: curve(step) if step % every == 0 else None


def test_a_known_wrong_answer_that_gets_full_marks_is_critical_with_what_it_was():
    """From the step at which it first did, once the next scoring says the same."""
    found = alarms(VerifierChanged(), exact({RIGHT: at(always(1.0)), WRONG: at(then(0.0, 1.0, 30))}))

    assert list(found) == ["critical"]
    assert (found["critical"].step, found["critical"].onset_step) == (35, 30)
    assert found["critical"].message == "exact changed: the known-wrong answer five is scored 1, 0 at first"
    assert found["critical"].evidence == {
        "function": "exact", "canary": "five", "known": "wrong", "before": 0.0, "after": 1.0, "canaries_changed": 1,
    }  # fmt: skip


def test_a_known_right_answer_that_gets_none_is_critical_without_any_other_canary():
    """No marks are then 0."""
    assert when(VerifierChanged(), exact({RIGHT: at(then(1.0, 0.0, 30))})) == {"critical": 35}


def test_any_other_change_is_a_warning():
    """Half marks."""
    curves = {RIGHT: at(then(1.0, 0.6, 30)), WRONG: at(always(0.0))}

    assert when(VerifierChanged(), exact(curves)) == {"warning": 35}


@pytest.mark.parametrize(
    ("why", "curves"),
    [
        ("nothing changes", {RIGHT: always(1.0), WRONG: always(0.0)}),
        ("one scoring is an outage", {RIGHT: lambda step: 0.0 if step == 30 else 1.0, WRONG: always(0.0)}),
        ("a function of the format pays both", {RIGHT: always(1.0), WRONG: always(1.0)}),
        (
            "a judge is never quite the same",
            {RIGHT: lambda s: 0.8 + random.Random(s).gauss(0, 0.05), WRONG: always(0.1)},
        ),
        ("another function pays less", {"verifier/canary_right/style/four": always(0.2), RIGHT: always(1.0)}),
        ("the score is none", {RIGHT: then(1.0, float("nan"), 30), WRONG: then(0.0, 1e300, 30)}),
    ],
)
def test_nothing_is_said_where_the_verifier_is_the_same(why, curves):
    """However often it is asked."""
    assert worst(VerifierChanged(), exact(curves)) is None, why


def test_what_was_found_stands_until_the_next_scoring_and_ends_with_it():
    """Scorings may be farther apart than rows over which other findings are carried."""
    rows = exact({RIGHT: at(lambda step: 0.0 if 40 <= step < 120 else 1.0, 20), "loss": always(1.0)}, length=160)
    detector = VerifierChanged()
    said = [row.step for row in rows if detector.update(row)]

    assert said == list(range(60, 120))


def test_other_canaries_that_changed_are_counted_and_the_first_is_named():
    """One finding, the earliest canary."""
    curves = {WRONG: then(0.0, 1.0, 30), f"{WRONG}-b": then(0.0, 1.0, 31), f"{WRONG}-c": then(0.0, 1.0, 31)}
    last = exact({RIGHT: always(1.0), **curves})
    detector = VerifierChanged()
    newest = [detector.update(row) for row in last][-1]

    assert [finding.metric for finding in newest] == [WRONG]
    assert newest[0].message.endswith("and so are 2 more canaries")


def test_more_canaries_than_are_followed_are_left_out():
    """Memory is bounded."""
    many = {f"{WRONG}{i:03}": then(0.0, 1.0, 30) for i in range(200)}

    assert alarms(VerifierChanged(), exact(many))["critical"].evidence["canaries_changed"] == 64


# Reward functions that fail.


@pytest.mark.parametrize("share", ["errors", "timeouts", "absent", "full_on_error", "canary_failed"])
def test_a_share_that_rises_far_above_its_first_rows_is_a_warning(share):
    """Five rows on end."""
    found = alarms(VerifierHealth(), exact({f"verifier/{share}/exact": then(0.05, 0.4, 30)}))

    assert {severity: (one.step, one.onset_step, one.kind) for severity, one in found.items()} == {
        "warning": (34, 30, "verifier_failing")
    }


def test_a_call_that_takes_ten_times_as_long_is_a_remark():
    """And more than a second."""
    assert when(VerifierHealth(), exact({"verifier/seconds/exact": then(0.2, 2.5, 30)})) == {"info": 34}


@pytest.mark.parametrize(
    ("why", "curves"),
    [
        ("it has failed from the start", {"verifier/errors/exact": always(0.9)}),
        ("it is another task's", {"verifier/absent/exact": lambda step: 0.3 + 0.3 * random.Random(step).random()}),
        ("it rose a little", {"verifier/errors/exact": then(0.0, 0.15, 30)}),
        ("it was an outage of four rows", {"verifier/errors/exact": lambda step: float(30 <= step < 34)}),
        ("it is fast all the same", {"verifier/seconds/exact": then(0.001, 0.1, 30)}),
        ("nothing is measured", {"verifier/errors/exact": then(0.0, float("nan"), 30)}),
    ],
)
def test_nothing_is_said_of_a_function_that_does_not_fail(why, curves):
    """Or not for long."""
    assert worst(VerifierHealth(), exact(curves)) is None, why


def test_at_most_so_many_series_are_followed():
    """Memory is bounded, and the first are judged."""
    many = {f"verifier/errors/f{i}": then(0.0, 1.0, 30) for i in range(200)}

    assert len(alarms(VerifierHealth(), exact(many))["warning"].evidence) == 64


# The diagnosis.


def found(kind, onset, severity=Severity.CRITICAL):
    return Finding("d", kind, severity, onset + 5, onset, f"{kind} happened")


def test_a_verifier_that_changed_before_the_policy_is_a_fault_outside_the_policy():
    """The first cause, with certainty; and mended before anything is rolled back."""
    findings = [found("verifier_changed", 40), found("entropy_collapse", 60), found("no_signal", 70)]
    first = diagnose(findings, first_step=1).causes[0]

    assert (first.kind, first.knob, first.nature.value) == ("verifier_changed", "environment", "cause")
    assert (first.sure.value, first.onset_step) == ("strong", 40)
    assert first.actions[0].id == "check-verifier"


def test_a_function_that_fails_after_the_answers_became_garbled_is_their_effect():
    """The policy writes what cannot be parsed."""
    findings = [found("garbled_output", 40), found("verifier_failing", 45, Severity.WARNING)]

    assert diagnose(findings, first_step=1).causes[0].kind == "garbled_output"


def test_a_row_of_another_attempt_below_the_finding_says_nothing_of_the_future():
    """A resumed run begins at a lower step: no onset lies ahead."""
    detector = VerifierChanged()
    rows = exact({RIGHT: then(1.0, 0.0, 30)})
    for row in rows:
        detector.update(row)

    assert detector.update(ClosedStep(step=3, metrics={"loss": 1.0}, seq=99)) == []
