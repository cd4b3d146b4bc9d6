"""The record of past forecasts: what came of each, how early, how often its chances held, and what people say."""

import math

import pytest

from rlwatch.errors import ConfigError
from rlwatch.forecast.forecast import Forecast, record_of
from rlwatch.forecast.record import (
    Came,
    RunRecord,
    answer,
    curve,
    find_past,
    gathered,
    healthy_until,
    record_of_run,
)
from rlwatch.records import ClosedStep, ForecastAnswer, RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store


def written(store, run_id, *, steps=400, alarms=(), fails=True, p50=0.1, end=RunState.FINISHED):
    """A run whose KL rises at step 200 for good, with a forecast each step from 60 on."""
    writer = store.open_run(RunInfo(run_id, source="trl/grpo"))
    rows = [
        StepRecord(
            s, {"reward": 0.8, "entropy": 1.0, "kl": 9.0 if fails and s >= 200 else 0.01, "grad_norm": 1.0}, ts=float(s)
        )
        for s in range(1, steps + 1)
    ]
    given = [
        record_of(Forecast(s, p50=0.9 if s in alarms else p50, risk=1.5 if s in alarms else 0.2, alarm=s in alarms,
                           limit="ref_kl"), ClosedStep(s, {}, {}, seq=s))
        for s in range(60, steps + 1)
    ]  # fmt: skip
    writer.write([*rows, *given])
    if end is not None:
        writer.finish(end, "", 1.0)
    writer.close()
    return store.run(run_id)


@pytest.fixture
def store(tmp_path):
    """An empty one."""
    return open_store(tmp_path)


def onset_of(store, run):
    record = record_of_run(store, run)
    return next(past.onset for past in record.past)


@pytest.mark.parametrize(
    ("alarms", "more", "came"),
    [
        (range(170, 190), {}, Came.TRUE),
        (range(100, 110), {}, Came.FALSE),
        (range(300, 305), {}, Came.AFTERWARDS),
        (range(380, 390), {"fails": False}, Came.CUT_SHORT),
        (range(380, 390), {"fails": False, "end": None}, Came.OPEN),
        (range(300, 310), {"fails": False}, Came.FALSE),
    ],
)
def test_what_came_of_an_alarm(store, alarms, more, came):
    """By whether a failure began within 50 steps of its last row."""
    record = record_of_run(store, written(store, "r", alarms=alarms, **more))
    past = next(each for each in record.past if each.step == alarms[0])

    assert (past.came, past.last, past.p50, past.limit) == (came, alarms[-1], 0.9, "ref_kl")
    assert past.lead == (past.onset - alarms[0] if came is Came.TRUE else None)
    assert past.right == {Came.TRUE: True, Came.FALSE: False}.get(came)


def test_a_failure_without_an_alarm_was_missed(store):
    """One whose alarm came early enough was not, nor one before which nothing was forecast."""
    missed = record_of_run(store, written(store, "missed"))
    assert [each.came for each in missed.past] == [Came.MISSED]
    assert missed.past[0].step == missed.past[0].onset
    seen = record_of_run(store, written(store, "seen", alarms=range(180, 190)))
    assert [each.came for each in seen.past] == [Came.TRUE]


def test_alarms_close_to_each_other_are_one_and_steps_after_the_failure_are_no_forecasts(store):
    """25 steps of quiet end one; the curve counts steps whose horizon is over."""
    run = written(store, "r", alarms=[100, 110, 135, 170])
    record = record_of_run(store, run)
    onset = onset_of(store, run)

    assert [(each.step, each.last) for each in record.past] == [(100, 135), (170, 170)]
    assert len(record.predicted) == onset - 60
    assert sum(record.came) == 50
    healthy = record_of_run(store, written(store, "h", fails=False))
    assert (len(healthy.predicted), sum(healthy.came)) == (400 - 50 - 60 + 1, 0)


def test_a_run_without_forecasts_has_no_record(store):
    """Nobody tried."""
    writer = store.open_run(RunInfo("r"))
    writer.write([StepRecord(1, {"reward": 1.0})])
    writer.close()

    assert record_of_run(store, store.run("r")) is None


def test_what_was_run_again_is_not_counted(store):
    """Forecasts of steps that a later attempt repeated."""
    written(store, "r", alarms=range(170, 190), end=None)
    writer = store.open_run(RunInfo("r"))
    writer.write([StepRecord(s, {"reward": 0.8}, attempt=2) for s in range(150, 400)])
    writer.close()

    assert record_of_run(store, store.run("r")).past == ()


def test_the_curve_holds_what_was_said_against_what_was_seen():
    """Of each bin the mean chance and the share that a failure followed; 1.0 belongs to the last."""
    one = RunRecord("a", (), (0.01, 0.25, 0.25, 1.0), (False, True, False, True))
    two = RunRecord("b", (), (0.25, 0.25), (True, False))
    found = curve([one, two])

    assert [(each.low, each.steps, each.runs, each.came) for each in found] == [
        (0.0, 1, 1, 0.0),
        (0.2, 4, 2, 0.5),
        (0.85, 1, 1, 1.0),
    ]
    assert math.isclose(found[1].said, 0.25)
    assert curve([]) == []


def test_a_person_says_whether_it_was_right_and_goes_before_the_labels(store):
    """Found again by any step of the alarm; who, and in the audit."""
    run = written(store, "r", alarms=range(100, 110))
    past = find_past(record_of_run(store, run), 105)
    said = answer(store, past, right=True, by=" ann ", why="the judge broke", now=9.0)
    record = record_of_run(store, run)

    assert said == ForecastAnswer("r", 100, right=True, by="ann", why="the judge broke", at=9.0)
    assert (record.past[0].answer, record.past[0].right, record.past[0].came) == (said, True, Came.FALSE)
    assert [(entry.by, entry.act, entry.run_id) for entry in store.audit()] == [("ann", "answer-forecast", "r")]
    with pytest.raises(ConfigError, match="nothing was forecast or missed at step 90; at these steps it was: 100"):
        find_past(record, 90)
    with pytest.raises(ConfigError, match="needs a name"):
        answer(store, past, right=True, by=" ", now=1.0)


def test_what_was_judged_right_ends_a_healthy_run_a_hundred_steps_before():
    """The earliest counts; what was judged wrong ends none."""
    said = [
        ForecastAnswer("a", 500, right=True, by="ann"),
        ForecastAnswer("a", 400, right=True, by="ann"),
        ForecastAnswer("b", 50, right=False, by="ann"),
    ]
    assert healthy_until(said) == {"a": 300}


def test_records_of_runs_are_gathered():
    """Leads in order, to take their median."""
    assert gathered([]).runs == 0
