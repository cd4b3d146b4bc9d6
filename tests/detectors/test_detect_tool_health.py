"""Tools of an agent that fail, time out or become slow."""

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.reward.tool_health import ToolHealth
from rlwatch.detectors.reward.verifier_health import VerifierHealth
from rlwatch.diagnosis.diagnose import diagnose
from rlwatch.records import Finding, Severity

CALLS, ERRORS, TIMEOUTS, SECONDS = (f"tool/{one}/search" for one in ("calls", "errors", "timeouts", "seconds"))


def test_a_tool_that_begins_to_fail_is_a_warning_with_its_name_and_onset():
    """A service that is down from step 30 on; five rows confirm it."""
    found = alarms(ToolHealth(), exact({CALLS: always(40.0), ERRORS: then(0.05, 0.9, 30)}))

    assert list(found) == ["warning"]
    assert (found["warning"].kind, found["warning"].step, found["warning"].onset_step) == ("tool_failing", 34, 30)
    assert found["warning"].message == "search: a share of 0.9 of its calls fails, at most 0.05 in the first 10 rows"


def test_timeouts_are_named_so_and_slow_calls_are_a_note():
    """Ten times the longest of the first rows, and more than a second."""
    assert "times out" in alarms(ToolHealth(), exact({TIMEOUTS: then(0.0, 0.4, 30)}))["warning"].message
    slow = alarms(ToolHealth(), exact({SECONDS: then(0.3, 5.0, 30)}))

    assert {severity: one.kind for severity, one in slow.items()} == {"info": "tool_slow"}


@pytest.mark.parametrize(
    ("why", "curves"),
    [
        ("nothing changes", {CALLS: always(40.0), ERRORS: always(0.3), SECONDS: always(2.0)}),
        ("an outage of four rows", {ERRORS: lambda step: 0.9 if 30 <= step < 34 else 0.05}),
        ("few calls", {CALLS: always(4.0), ERRORS: then(0.0, 0.5, 30), SECONDS: then(0.1, 9.0, 30)}),
        ("faster than a second", {SECONDS: then(0.01, 0.9, 30)}),
        ("errors that end", {ERRORS: then(0.9, 0.1, 30)}),
        ("a reward function", {"verifier/errors/exact": then(0.0, 0.9, 30)}),
    ],
)
def test_a_tool_that_is_as_at_first_is_not_reported(why, curves):
    """Shares of few calls are noise."""
    assert worst(ToolHealth(), exact(curves)) is None, why


def test_a_reward_function_is_judged_as_before_and_not_by_tools():
    """Both detectors share their limits."""
    assert when(VerifierHealth(), exact({"verifier/errors/exact": then(0.0, 0.9, 30)})) == {"warning": 34}
    assert worst(VerifierHealth(), exact({ERRORS: then(0.0, 0.9, 30)})) is None


def found(kind, onset, severity):
    return Finding("d", kind, severity, onset + 5, onset, f"{kind} happened")


def test_a_tool_that_failed_before_the_reward_fell_is_a_fault_outside_the_policy():
    """The first cause; the tool is checked before anything is rolled back."""
    findings = [found("tool_failing", 40, Severity.WARNING), found("reward_drop", 50, Severity.CRITICAL)]
    first = diagnose(findings, first_step=1).causes[0]

    assert (first.kind, first.knob) == ("tool_failing", "environment")
    assert "check-tool" in [one.id for one in first.actions]


def test_a_tool_that_fails_after_the_output_became_garbled_is_an_effect():
    """The policy writes arguments that no tool reads."""
    findings = [found("garbled_output", 40, Severity.CRITICAL), found("tool_failing", 45, Severity.WARNING)]

    assert diagnose(findings, first_step=1).causes[0].kind == "garbled_output"
