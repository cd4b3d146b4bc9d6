"""Axes on which runs are laid side by side, and which of their rows count."""

import numpy as np
import pytest
from twins import collapsed, records, sound, subject

from rlwatch.compare import Axis, Side, compare, subject_of_run
from rlwatch.records import Finding, RunInfo, RunState, Severity, StepRecord
from rlwatch.store.memory import MemoryStore


def test_time_counts_from_the_first_record():
    """Of a run that is twice as fast the same step lies at half the time."""
    rows = [StepRecord(s, {"entropy": 1.0 + s}, ts=500.0 + 10.0 * s, seq=s) for s in range(1, 20)]

    side = Side.of(subject(rows), Axis.TIME)

    laid = side.rows(["policy/entropy"])["policy/entropy"]
    assert laid.x.tolist() == [10.0 * s for s in range(19)]
    assert laid.values.tolist() == [1.0 + s for s in range(1, 20)]


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [("num_tokens", "trl/grpo", [100, 200, 300]), ("perf/total_num_tokens", "verl", [100, 100, 100])],
)
def test_tokens_are_those_seen_so_far(name, source, told):
    """Also where the trainer counts them a step."""
    from rlwatch.compare import subject_of_records

    rows = [StepRecord(s, {"entropy": 1.0, name: tokens}, seq=s + 1) for s, tokens in enumerate(told)]
    one = subject_of_records("run", source, [*rows], {})

    side = Side.of(one, Axis.TOKENS)

    (metric,) = set(one.names) - {"tokens/total"}
    assert side.rows([metric])[metric].x.tolist() == [100.0, 200.0, 300.0]


def test_an_axis_that_a_run_did_not_record_is_a_problem_in_words():
    """Not an empty comparison that reads like agreement."""
    found = compare(subject(records(sound(50, 1)), "A"), subject(records(sound(50, 2)), "B"), Axis.TOKENS)

    assert found.problem == "A and B did not record tokens"
    assert found.partings == ()


def test_the_distance_to_the_crash_begins_before_it():
    """Where the first critical finding began; a crashed process without one at its last step; else at the end."""
    store, rows = MemoryStore("crash"), [StepRecord(s, {"entropy": 1.0}, ts=1.0 + s) for s in range(1, 31)]
    critical = Finding(
        "entropy_collapse", "entropy_collapse", Severity.CRITICAL, 20, 12, "fell", {}, metric="policy/entropy", seq=20
    )
    for run_id, more, state in (
        ("f", [critical], RunState.CRASHED),
        ("c", [], RunState.CRASHED),
        ("e", [], RunState.FINISHED),
    ):
        writer = store.open_run(RunInfo(run_id, source="trl/grpo"))
        writer.write([*rows, *more])
        writer.finish(state, "", 40.0)
        writer.close()

    sides = {run_id: Side.of(subject_of_run(store, store.run(run_id)), Axis.CRASH) for run_id in "fce"}

    crashes = {run_id: side.subject.crash for run_id, side in sides.items()}
    assert crashes == {"f": 12, "c": 30, "e": None}
    first = {run_id: side.rows(["policy/entropy"])["policy/entropy"].x[0] for run_id, side in sides.items()}
    assert first == {"f": -11, "c": -29, "e": -29}


def test_runs_of_a_store_part_as_those_of_a_log_do():
    """The same rows, the same answer; along time too."""
    store = MemoryStore("twins")
    left, right = records(collapsed(300, 1, at=170)), records(sound(300, 2))
    for name, rows in (("A", left), ("B", right)):
        writer = store.open_run(RunInfo(name, source="trl/grpo"))
        writer.write(rows)
        writer.close()
    stored = [subject_of_run(store, store.run(name)) for name in "AB"]

    by_step, by_time = (compare(*stored, axis) for axis in (Axis.STEP, Axis.TIME))

    assert by_step.partings == compare(subject(left, "A"), subject(right, "B")).partings
    assert by_step.first is not None
    assert by_time.first is not None
    assert by_time.first.at == pytest.approx(30.0 * by_step.first.at)


def test_of_records_that_share_a_step_the_last_counts():
    """As in the app's charts and the table of last values."""
    rows = [StepRecord(1, {"entropy": 1.0}, seq=1), StepRecord(1, {"entropy": 2.0}, seq=2)]

    laid = Side.of(subject(rows), Axis.STEP).rows(["policy/entropy"])["policy/entropy"]

    np.testing.assert_array_equal(laid.values, [2.0])
