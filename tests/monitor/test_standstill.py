"""A step counter that stands still, or goes back, under a stream of records."""

import pytest
from scripted import sent, told

from rlwatch.detectors.system import StalledSteps
from rlwatch.monitor import Monitor, MonitorOutcome
from rlwatch.monitor.engine import RECORDS, STANDSTILL_RECORDS, USUAL, Standstill
from rlwatch.records import ClosedStep, StepRecord


def watch(steps):
    """What is published of one record for each of ``steps``."""
    monitor = Monitor(run_id="run", detectors=lambda: [StalledSteps()])
    outcome = MonitorOutcome()
    for seq, step in enumerate(steps, start=1):
        outcome += monitor.observe(StepRecord(step, {"reward": 0.5}, seq=seq))
    return monitor, outcome


@pytest.mark.parametrize("stuck", [[20] * 200, list(range(20)) * 10], ids=["stands", "goes back"])
def test_a_counter_that_does_not_advance_is_told_although_no_step_closes(stuck):
    """Twenty steps, then 200 records that are no new step; told at the first look after fifty."""
    _, outcome = watch([*range(21), *stuck])

    assert [(kind, severity) for kind, severity, _ in told(outcome)] == [("stalled_steps", "warning")]
    assert outcome.findings[0].evidence == {"records": 50.0, "usual": 1.0}
    assert sent(outcome) == [("fired_at_once", 20)]


def test_it_is_over_once_a_step_advances():
    """The finding holds until then."""
    monitor, _ = watch([*range(21), *[20] * 80])
    assert [finding.kind for finding in monitor.active] == ["stalled_steps"]

    monitor.observe(StepRecord(21, {"reward": 0.5}, seq=200))
    monitor.observe(StepRecord(22, {"reward": 0.5}, seq=201))

    assert monitor.active == ()


@pytest.mark.parametrize("per_step", [1, 40, 300])
def test_many_records_a_step_are_no_standstill_where_they_are_usual(per_step):
    """Each micro-batch, or each rank, may send its own."""
    _, outcome = watch([step for step in range(12) for _ in range(per_step)])

    assert told(outcome) == []


def test_before_any_step_has_closed_it_takes_a_thousand():
    """Nothing is known of how many are usual."""
    assert told(watch([0] * 999)[1]) == []
    assert len(told(watch([0] * 1001)[1])) == 1


def test_counts_are_of_the_open_step_and_of_the_fullest_before():
    """The usual one is absent until a step has closed."""
    counter, view = Standstill(), ClosedStep(3, {"reward/mean": 0.5})
    due = [counter.update(advances=i == 0) for i in range(STANDSTILL_RECORDS)]
    first = counter.counted(view).metrics
    counter.update(advances=True)

    assert due == [False] * (STANDSTILL_RECORDS - 1) + [True]
    assert first == {"reward/mean": 0.5, RECORDS: STANDSTILL_RECORDS}
    assert counter.counted(view).metrics == {"reward/mean": 0.5, RECORDS: 1.0, USUAL: STANDSTILL_RECORDS}
    assert view.metrics == {"reward/mean": 0.5}
