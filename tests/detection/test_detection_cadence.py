"""The same runs logged more sparsely, and how it is counted whether their alarms come where they came."""

from __future__ import annotations

import math

import pytest
from detection.cadence import agreement, every_way, resampled
from detection.runs import Labelled
from detection.score import LEVELS, Alarm, Run, Told

from rlwatch.records import StepRecord


def labelled(values: dict[int, dict[str, float]], severity: str = "healthy") -> Labelled:
    return Labelled(
        Run("r", "p", severity, None, tuple(values)), [StepRecord(step, row) for step, row in values.items()]
    )


def rows(run: Labelled) -> dict[int, dict[str, float]]:
    return {record.step: dict(record.metrics) for record in run.records}


def test_a_row_is_the_mean_over_its_window_or_the_last_value() -> None:
    dense = labelled({step: {"reward": float(step)} for step in range(1, 11)})
    assert rows(resampled(dense, 5, "mean")) == {5: {"reward": 3.0}, 10: {"reward": 8.0}}
    assert rows(resampled(dense, 5, "last")) == {5: {"reward": 5.0}, 10: {"reward": 10.0}}


def test_a_window_that_the_run_does_not_complete_is_not_logged() -> None:
    dense = labelled({step: {"reward": 1.0} for step in range(1, 13)})
    sparse = resampled(dense, 5, "mean")
    assert list(rows(sparse)) == [5, 10]
    assert sparse.run.steps == (5, 10)


def test_what_is_missing_is_left_out_and_nan_is_kept() -> None:
    dense = labelled({1: {"kl": 1.0}, 2: {"kl": 3.0, "loss": 2.0}, 3: {"kl": math.nan}, 4: {"kl": 1.0}})
    sparse = rows(resampled(dense, 2, "mean"))
    assert sparse[2] == {"kl": 2.0, "loss": 2.0}
    assert math.isnan(sparse[4]["kl"])
    assert rows(resampled(dense, 2, "last"))[4] == {"kl": 1.0}


def test_records_of_one_step_count_once_with_their_last_value() -> None:
    records = [StepRecord(1, {"kl": 9.0}), StepRecord(1, {"kl": 1.0}), StepRecord(2, {"kl": 3.0})]
    sparse = resampled(Labelled(Run("r", "p", "healthy", None, (1, 2)), records), 2, "mean")
    assert rows(sparse) == {2: {"kl": 2.0}}


def test_a_run_that_is_as_sparse_stays_what_it_is() -> None:
    run = labelled({step: {"reward": 1.0} for step in range(10, 101, 10)})
    assert resampled(run, 10, "mean") is run
    assert resampled(run, 5, "mean") is run


def test_every_way_is_each_number_of_steps_by_mean_and_by_last() -> None:
    run = labelled({step: {"reward": 1.0} for step in range(1, 11)})
    assert [(how, steps) for how, steps, _ in every_way([run], [1, 2, 5])] == [
        ("mean", 2), ("last", 2), ("mean", 5), ("last", 5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dense", "sparse", "every", "fate"),
    [
        (100, 110, 2, "same"),
        (100, 111, 2, "later"),
        (100, 140, 20, "same"),
        (100, 141, 20, "later"),
        (100, 89, 2, "earlier"),
        (100, None, 2, "lost"),
        (None, 100, 2, "new"),
        (None, None, 2, "same"),
    ],
)
def test_an_alarm_is_where_it_was_within_ten_steps_or_two_rows(
    dense: int | None, sparse: int | None, every: int, fate: str
) -> None:
    run = Run("r", "p", "crash", 100, tuple(range(1, 201)))
    told = [Told() if step is None else Told((Alarm(step),)) for step in (dense, sparse)]
    found = agreement([run], told[:1], told[1:], every, LEVELS["critical"])
    held = found.quiet if dense is None else found.same
    assert (held.count, held.total) == (fate == "same", 1)
    counts = {name: getattr(found, name) for name in ("later", "earlier", "lost", "new")}
    assert counts == {name: int(name == fate) for name in counts}


def test_alarmed_and_quiet_runs_are_counted_apart_and_sparse_ones_not_at_all() -> None:
    steps = tuple(range(1, 201))
    runs = [Run("a", "p", "healthy", None, steps), Run("b", "p", "crash", 100, steps)]
    runs.append(Run("c", "p", "healthy", None, steps[9::10]))
    alarmed = Told((Alarm(100),))
    found = agreement(runs, [Told(), alarmed, Told()], [alarmed, alarmed, alarmed], 5, LEVELS["any"])
    assert (found.same.count, found.same.total) == (1, 1)
    assert (found.quiet.count, found.quiet.total) == (0, 1)
    assert found.new == 1


@pytest.mark.parametrize(("at", "able"), [(79, 0), (80, 1), (200, 1)])
def test_runs_with_ten_rows_by_then_are_counted_apart(at: int, able: int) -> None:
    """Every 10 steps and 20 steps late at most: an alarm at step 80 has rows 10, 20... 100 to be told in."""
    runs = [Run("a", "p", "crash", 50, tuple(range(1, 201)))]
    found = agreement(runs, [Told((Alarm(at),))], [Told()], 10, LEVELS["any"])
    assert (found.same.total, found.able.total, found.able.count) == (1, able, 0)
