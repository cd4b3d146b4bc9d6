"""Ids, turns and masks: what is trained on is what was sampled, and nothing else."""

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.rollouts.token_ids import MaskLeakage, Retokenisation


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [
        ("text/retok_exact", 0.99, 0.6),
        ("text/retok_edit", 0.0, 0.02),
        ("text/retok_naive", 0.01, 0.3),
    ],
)
def test_round_trips_that_begin_to_fail_warn(metric, before, after):
    """From step 30 on, within a window."""
    found = alarms(Retokenisation(), exact({metric: then(before, after, 30)}), "retokenisation_drift")

    assert set(found) == {"warning"}
    assert found["warning"].onset_step == 30
    assert found["warning"].step <= 42


def test_round_trips_that_never_worked_are_information():
    """Sampled ids need not be canonical: it matters only if text is re-encoded anywhere."""
    found = alarms(Retokenisation(), exact({"text/retok_exact": always(0.5)}))

    assert set(found) == {"info"}
    assert "when the run began" in found["info"].message


def test_a_few_odd_ids_are_nothing():
    """One response in twenty."""
    assert worst(Retokenisation(), exact({"text/retok_exact": always(0.95)})) is None


def test_turns_that_no_longer_continue_each_other_warn():
    """All of them did until step 30."""
    found = alarms(Retokenisation(), exact({"text/turn_prefix_kept": then(1.0, 0.7, 30)}))

    assert {(f.kind, s) for s, f in found.items()} == {("prefix_break", "warning")}


def test_templates_that_always_drop_earlier_reasoning_are_information():
    """So from the first row."""
    assert worst(Retokenisation(), exact({"text/turn_prefix_kept": always(0.2)})) == "info"


def test_ids_and_turns_are_told_apart():
    """Two findings in one row."""
    detector = Retokenisation()
    curves = {"text/retok_exact": then(0.99, 0.6, 30), "text/turn_prefix_kept": then(1.0, 0.7, 30)}
    last = [detector.update(row) for row in exact(curves)][-1]

    assert [finding.kind for finding in last] == ["retokenisation_drift", "prefix_break"]


@pytest.mark.parametrize("every", [1, 10])
def test_leaking_observations_warn_from_the_first_rows(every):
    """There is no healthy level to compare with: three rows and it is told."""
    found = when(MaskLeakage(), exact({"tokens/environment_leak": always(0.2)}, every=every))

    assert set(found) == {"warning"}
    assert found["warning"] <= 5 * every


def test_a_leak_that_begins_is_dated():
    """At step 40."""
    found = alarms(MaskLeakage(), exact({"tokens/environment_leak": then(0.0, 1.0, 40)}))["warning"]

    assert found.onset_step == 40
    assert found.step <= 52
    assert "100.0%" in found.message


def test_no_leak_is_good_news():
    """Exactly zero, or rounding."""
    assert worst(MaskLeakage(), exact({"tokens/environment_leak": always(0.0)})) is None
    assert worst(MaskLeakage(), exact({"tokens/environment_leak": always(1e-4)})) is None
