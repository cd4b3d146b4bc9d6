"""Labels: when a run failed, how, and what could be judged; each limit by a series written down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from forecast_small_tables import Series, run_table
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.errors import ConfigError
from rlwatch.forecast import LIMITS
from rlwatch.forecast.labels import Label, RunOutcome, label_runs, level, limits_of

N = 200


def labelled(columns: Mapping[str, Series], steps: list[int] | None = None) -> Label:
    """The label of one run."""
    table = run_table({"run": columns}, steps={"run": steps} if steps else None)
    return next(iter(label_runs(table)))


def jump(before: float, after: float, at: int = 100, length: int = N) -> list[float]:
    """``before``, and from step ``at`` on ``after``."""
    return [before] * at + [after] * (length - at)


def blip(before: float, between: float, first: int, rows: int, length: int = N) -> list[float]:
    """``before``, but ``between`` on so many rows."""
    return [before] * first + [between] * rows + [before] * (length - first - rows)


def test_types_and_their_order_are_those_of_a_forecast() -> None:
    """Ties are broken alike everywhere."""
    assert set(limits_of().types) == set(LIMITS)
    assert [name for name in LIMITS if name in limits_of().types] == list(limits_of().types)


def test_the_level_is_the_median_of_nine_steps() -> None:
    """A jump at step 100 is the majority of nine rows at step 104."""
    found = labelled({"truth/acc": jump(0.5, 0.1)})

    assert (found.outcome, found.onset, found.type, found.steps) == (RunOutcome.EVENT, 104, "reward", N)


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"mismatch/k3": jump(0.01, 0.1)}, "mismatch"),
        ({"optim/grad_norm": jump(1.0, 6.0)}, "grad"),
        ({"policy/entropy": jump(1.0, 0.2), "truth/acc": [0.5] * N}, "ent_low"),
        ({"policy/entropy": jump(1.0, 1.5)}, "ent_high"),
        ({"len/clipped": jump(0.1, 0.5)}, "length"),
        ({"text/repetition": jump(0.05, 0.4)}, "length"),
        ({"policy/kl_ref": jump(0.1, 1.5)}, "ref_kl"),
        ({"policy/kl_ref_k3": jump(0.1, 1.5)}, "ref_kl"),
        ({"truth/acc": jump(0.4, 0.24)}, "reward"),
    ],
)
def test_a_limit_is_passed_where_it_is_met(columns: dict[str, Series], kind: str) -> None:
    """Exactly at the limit, by each limit of the table."""
    found = labelled(columns)

    assert (found.outcome, found.onset, found.type) == (RunOutcome.EVENT, 104, kind)


@pytest.mark.parametrize(
    "columns",
    [
        {"mismatch/k3": jump(0.01, 0.099)},
        {"mismatch/k3": jump(0.05, 0.24)},  # 4.8 times the baseline
        {"optim/grad_norm": jump(1.0, 5.9)},
        {"policy/entropy": jump(1.0, 0.21), "truth/acc": [0.5] * N},
        {"policy/entropy": jump(1.0, 0.1), "truth/acc": [0.9] * N},  # solved
        {"policy/entropy": jump(0.5, 0.9)},  # 1.8 times, but only 0.4 nats
        {"policy/entropy": jump(2.0, 2.9)},  # 0.9 nats, but only 1.45 times
        {"len/clipped": [0.6] * N},  # short from the start
        {"len/clipped": jump(0.3, 0.6)},
        {"text/repetition": jump(0.1, 0.44)},
        {"policy/kl_ref": jump(0.1, 1.49)},
        {"truth/acc": jump(0.5, 0.31)},
        {"truth/acc": jump(0.2, 0.06)},  # 0.14 lower
        {"optim/grad_norm": [0.0] * N},  # a baseline of 0 gives no limit
    ],
)
def test_what_does_not_meet_every_bound_is_clean(columns: dict[str, Series]) -> None:
    """Each bound alone is not enough."""
    assert labelled(columns).outcome is RunOutcome.CLEAN


def test_a_fault_free_engine_is_judged_by_the_absolute_limit_alone() -> None:
    """Five times a baseline of exactly 0 is 0."""
    assert labelled({"mismatch/k3": jump(0.0, 0.1)}).type == "mismatch"


def test_a_limit_must_stay_passed_on_80_percent_of_25_steps() -> None:
    """20 low rows are enough; 19 are not, and make the run ambiguous."""
    assert labelled({"truth/acc": blip(0.5, 0.1, 100, 20)}).onset == 104
    assert labelled({"truth/acc": blip(0.5, 0.1, 100, 19)}).outcome is RunOutcome.AMBIGUOUS


def test_five_steps_over_a_limit_make_a_run_ambiguous() -> None:
    """Five low rows hold the median down for five steps; four never are its majority."""
    assert labelled({"truth/acc": blip(0.5, 0.1, 100, 5)}).outcome is RunOutcome.AMBIGUOUS
    assert labelled({"truth/acc": blip(0.5, 0.1, 100, 4)}).outcome is RunOutcome.CLEAN


@pytest.mark.parametrize(("length", "outcome"), [(112, RunOutcome.EVENT), (111, RunOutcome.AMBIGUOUS)])
def test_eight_steps_must_be_left(length: int, outcome: RunOutcome) -> None:
    """Passed from step 104 on; with 111 rows only 7 steps are left to see it stay so."""
    assert labelled({"truth/acc": jump(0.5, 0.1, length=length)}).outcome is outcome


@pytest.mark.parametrize(("at", "outcome"), [(50, RunOutcome.EARLY), (51, RunOutcome.EVENT)])
def test_before_step_55_a_failure_is_the_configurations(at: int, outcome: RunOutcome) -> None:
    """Class early: the median turns 4 steps after the jump."""
    assert labelled({"truth/acc": jump(0.5, 0.1, at=at)}).outcome is outcome


def test_the_best_accuracy_counts_from_step_8() -> None:
    """A lucky start is no height to fall from."""
    assert labelled({"truth/acc": [0.9] * 3 + [0.2] * (N - 3)}).outcome is RunOutcome.CLEAN


def test_one_step_that_is_not_finite_is_a_failure() -> None:
    """At once: nothing must stay so."""
    found = labelled({"truth/nan": blip(0, 1, 100, 1), "truth/skipped": [0.0] * N})

    assert (found.onset, found.type) == (100, "nan")


def test_a_skipped_step_is_no_failure_but_the_fifth_in_a_row_is() -> None:
    """Skips that are not in a row start anew."""
    nothing: Series = [0.0] * N
    four, five = blip(0, 1, 100, 4), blip(0, 1, 100, 5)
    broken_twice = [max(a, b) for a, b in zip(blip(0, 1, 100, 4), blip(0, 1, 105, 4), strict=True)]

    assert labelled({"truth/nan": four, "truth/skipped": four}).outcome is RunOutcome.CLEAN
    assert labelled({"truth/nan": nothing, "truth/skipped": broken_twice}).outcome is RunOutcome.CLEAN
    assert labelled({"truth/nan": nothing, "truth/skipped": five}).onset == 104


def test_ties_are_broken_in_the_order_of_the_table() -> None:
    """Mismatch before reward."""
    assert labelled({"truth/acc": jump(0.5, 0.1), "mismatch/k3": jump(0.01, 1.0)}).type == "mismatch"


def test_the_first_of_several_onsets_counts() -> None:
    """Whatever its place in the order."""
    found = labelled({"truth/acc": jump(0.5, 0.1, at=80), "mismatch/k3": jump(0.01, 1.0)})

    assert (found.onset, found.type) == (84, "reward")


def test_what_is_not_measured_is_not_judged_and_said_so() -> None:
    """Low entropy needs the accuracy beside it; a column of nothing is no column."""
    assert labelled({"policy/entropy": jump(1.0, 0.1)}).judged == ("ent_high",)
    assert labelled({"truth/acc": [0.5] * N, "mismatch/k3": [None] * N}).judged == ("reward",)
    assert labelled({"truth/acc": [0.5] * N, "optim/grad_norm": [math.nan] * N}).judged == ("reward",)


def test_a_run_of_three_steps_is_clean_of_what_needs_no_baseline() -> None:
    """And of nothing else."""
    found = labelled({"truth/acc": [0.5] * 3, "optim/grad_norm": [1.0] * 3, "truth/nan": [0.0] * 3})

    assert (found.outcome, found.judged) == (RunOutcome.CLEAN, ("nan", "reward"))


def test_limits_relative_to_the_baseline_wait_for_it() -> None:
    """A gradient norm that starts high and falls is no failure at step 0."""
    assert labelled({"optim/grad_norm": [20.0] * 9 + [1.0] * (N - 9)}).outcome is RunOutcome.CLEAN


def test_infinite_values_count_and_nan_are_left_out() -> None:
    """The norm's own NaN is judged as nan, not as a rise."""
    assert labelled({"optim/grad_norm": jump(1.0, math.inf)}).type == "grad"
    assert labelled({"optim/grad_norm": jump(1.0, math.nan)}).outcome is RunOutcome.CLEAN


@pytest.mark.parametrize("every", [2, 5, 10])
@pytest.mark.parametrize("at", [97, 100, 140])
def test_a_coarse_log_is_labelled_alike(every: int, at: int) -> None:
    """Up to its cadence and the median's delay."""
    fine = {"truth/acc": jump(0.5, 0.1, at, 300), "mismatch/k3": jump(0.01, 0.2, at + 60, 300)}
    steps = list(range(0, 300, every))
    coarse = labelled({name: [values[s] for s in steps] for name, values in fine.items()}, steps)
    found = labelled(fine)

    assert (coarse.outcome, coarse.type) == (found.outcome, found.type)
    assert abs((coarse.onset or 0) - (found.onset or 0)) <= max(every, 4)


def test_runs_do_not_touch_each_other() -> None:
    """A table of several gives each the label it has alone."""
    runs = {"a": {"truth/acc": jump(0.5, 0.1)}, "b": {"truth/acc": [0.1] * 60}, "c": {"truth/acc": jump(0.9, 0.2, 30)}}

    together = list(label_runs(run_table(runs)))

    assert together == [next(iter(label_runs(run_table({name: columns})))) for name, columns in runs.items()]
    assert [each.outcome for each in together] == [RunOutcome.EVENT, RunOutcome.CLEAN, RunOutcome.EARLY]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.0, 1.0, 2.5, -1.0, math.nan, math.inf])), min_size=1),
    st.integers(1, 12),
)
def test_the_level_is_what_a_loop_says(rows: list[tuple[int, float]], window: int) -> None:
    """On irregular steps, with NaN and infinities: median of the window, else the last one known."""
    steps = np.cumsum([gap for gap, _ in rows])
    values = np.array([value for _, value in rows])
    table = run_table({"a": {"reward/mean": [9.0]}, "run": {"reward/mean": list(values)}}, steps={"run": list(steps)})
    expected, last = [], math.nan
    for i, step in enumerate(steps):
        near = values[: i + 1][steps[: i + 1] > step - window]
        near = near[~np.isnan(near)]
        last = float(np.median(near)) if len(near) else last
        expected.append(last)

    np.testing.assert_array_equal(level(table, "reward/mean", window)[1:], expected)


def test_a_fault_that_stayed_to_the_end_makes_a_run_faulty_and_no_clean_one() -> None:
    """Unless it failed or nearly did; a harmless fault, one that ended in time and labels-v1 know no such class."""
    fine, near = {"truth/acc": [0.5] * 120}, {"policy/kl_ref": [0.1] * 60 + [2.0] * 7 + [0.1] * 53}
    runs = {"bad": fine, "short": fine, "sound": fine, "near": near, "fails": {"truth/acc": jump(0.9, 0.2, 80)}}
    families = dict.fromkeys(runs, "learning_rate") | {"short": "healthy", "sound": "healthy"}
    table = replace(run_table(runs, families=families), faults=(70, 70, None, 50, 70))

    def outcomes(version: str) -> list[RunOutcome]:
        return [label.outcome for label in label_runs(table, version)]

    first = [RunOutcome.CLEAN, RunOutcome.CLEAN, RunOutcome.CLEAN, RunOutcome.AMBIGUOUS, RunOutcome.EVENT]
    assert outcomes("labels-v1") == first
    assert outcomes("labels-v2") == [RunOutcome.FAULTY, *first[1:]]


def test_the_second_version_has_the_limits_of_the_first() -> None:
    """And says no more than what it adds."""
    first, second = limits_of("labels-v1"), limits_of("labels-v2")

    assert (second.rows, second.windows) == (first.rows, first.windows)
    assert (first.version, first.faulty, second.version, second.faulty) == ("labels-v1", False, "labels-v2", True)


def climb(low: float, high: float, first: int, rows: int, length: int = N) -> list[float]:
    """``low``, then in equal steps over so many rows to ``high``, and so on."""
    slope = [low + (high - low) * i / rows for i in range(rows)]
    return [low] * first + slope + [high] * (length - first - rows)


def test_gradients_are_held_to_what_they_became_as_the_run_took_off() -> None:
    """Next to no answer was right, so next to nothing taught: ten times that is how learning looks, from labels-v3 on.

    Sixty times the start is more than six times what it became; without a gain, ten times is what it always was.
    """
    learns = {"truth/acc": climb(0.02, 0.6, 60, 60), "optim/grad_norm": climb(0.05, 0.5, 60, 60)}
    explodes = learns | {"optim/grad_norm": climb(0.05, 0.5, 60, 60)[:150] + [3.2] * 50}
    stalls = learns | {"truth/acc": [0.02] * N}
    table = run_table({"learns": learns, "explodes": explodes, "stalls": stalls})

    def onsets(version: str) -> list[int | None]:
        return [label.onset for label in label_runs(table, version)]

    before, after = onsets("labels-v2"), onsets("labels-v3")
    assert before[0] == before[1] == before[2] == after[2]
    assert before[0] is not None
    assert 60 < before[0] < 120
    assert after[:2] == [None, 154]


def test_an_accuracy_that_doubles_from_a_level_has_not_taken_off_before_it_was_there() -> None:
    """The first steps of a run have no level 25 steps before them: what is there from the start raises nothing."""
    found = labelled({"truth/acc": [0.5] * N, "optim/grad_norm": [9.0] * 8 + jump(1.0, 7.0, 92, 192)})

    assert (found.onset, found.type) == (104, "grad")


def test_an_unknown_version_is_refused() -> None:
    """With those there are."""
    with pytest.raises(ConfigError, match=r"no labels 'labels-v0'; there are labels-v1, labels-v2, labels-v3$"):
        label_runs(run_table({"a": {"truth/acc": [0.5]}}), "labels-v0")
