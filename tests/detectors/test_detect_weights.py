"""Weights of the rollout engine that are not the trainer's."""

import math

from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.mismatch.weights_differ import WeightsDiffer
from rlwatch.diagnosis.diagnose import diagnose
from rlwatch.records import ClosedStep, Finding, Severity

DIFFER = "mismatch/weights_differ"


def test_weights_that_differ_are_reported_at_once_and_critical_at_the_third_sync():
    """With the layers, and when they were equal last."""
    layers = {f"{DIFFER}/layers.{i}": then(0.0, i / 10, 30) for i in range(6)}
    found = alarms(WeightsDiffer(), exact({DIFFER: then(0.0, 0.4, 30), **layers}))

    assert {severity: (one.step, one.onset_step) for severity, one in found.items()} == {
        "warning": (30, 30), "critical": (32, 30),
    }  # fmt: skip
    assert found["critical"].message == (
        "after the weight sync 40% of the rollout engine's tensors are not the trainer's, in layers.5, layers.4, "
        "layers.3 and 2 more layers; equal last at step 29"
    )
    assert found["critical"].evidence["layers"] == ["layers.5", "layers.4", "layers.3"]


def test_an_engine_without_the_adapter_is_called_that():
    """It holds the base weights."""
    curves = {DIFFER: always(0.2), "mismatch/adapter_missing": always(1.0), "mismatch/weights_distance": always(0.03)}
    found = alarms(WeightsDiffer(), exact(curves))["critical"]

    assert found.message == (
        "the rollout engine samples without the adapter: it holds the base weights of 100% of the adapted tensors after "
        "the sync; the farthest is 0.03 of its norm away; never seen equal"
    )


def test_between_syncs_the_last_word_stands_and_one_equal_sync_ends_it():
    """However many rows apart they are."""
    sync = {DIFFER: lambda step: (0.3 if 40 <= step < 100 else 0.0) if step % 20 == 0 else None}
    detector = WeightsDiffer()
    rows = exact({**sync, "loss": always(1.0)}, length=140)
    said = [(row.step, found[0].severity.value) for row in rows if (found := detector.update(row))]

    assert [step for step, _ in said] == list(range(40, 100))
    assert [step for step, severity in said if severity == "critical"] == list(range(80, 100))


def test_equal_weights_and_what_is_no_number_say_nothing():
    """A sync that works is no news."""
    assert worst(WeightsDiffer(), exact({DIFFER: always(0.0), "mismatch/weights_compared": always(0.2)})) is None
    assert worst(WeightsDiffer(), exact({DIFFER: then(0.0, math.nan, 30)})) is None
    assert when(WeightsDiffer(), exact({DIFFER: lambda step: 0.5 if step == 30 else 0.0})) == {"warning": 30}


def test_a_row_of_another_attempt_below_the_finding_says_nothing_of_the_future():
    """A resumed run begins at a lower step: no onset lies ahead."""
    detector = WeightsDiffer()
    for row in exact({DIFFER: then(0.0, 0.4, 30)}):
        detector.update(row)

    assert detector.update(ClosedStep(step=3, metrics={"loss": 1.0}, seq=99)) == []
    (again,) = detector.update(ClosedStep(step=4, metrics={DIFFER: 0.4}, seq=100))
    assert again.onset_step == 4


def test_it_is_the_cause_of_the_mismatch_that_follows():
    """With what to do first."""

    def found(kind, onset):
        return Finding("d", kind, Severity.CRITICAL, onset + 5, onset, f"{kind} happened")

    first = diagnose(
        [found("weights_differ", 40), found("mismatch_growth", 48), found("reward_drop", 90)], first_step=1
    )

    assert (first.causes[0].kind, first.causes[0].knob) == ("weights_differ", "weight_sync")
    assert "repair-sync" in [action.id for action in first.causes[0].actions]
