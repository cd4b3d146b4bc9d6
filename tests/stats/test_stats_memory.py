"""Baseline, CUSUM and Hold: what they remember, what they refuse, and that it can be saved."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.stats import Baseline, Cusum, Hold, Ranked, Window, quantile


def fed(stat, values, start=0, gap=1):
    for i, value in enumerate(values):
        stat.update(start + i * gap, value)
    return stat


def test_a_baseline_freezes_after_the_warm_up():
    """Later values cannot talk it out of how the run began."""
    baseline = fed(Baseline(rows=10), [1.0] * 10 + [5.0] * 100)

    assert baseline.done
    assert baseline.get() == 1.0


def test_a_coarse_log_needs_fewer_rows_for_a_baseline():
    """Five rows are enough once they span the warm-up steps."""
    assert not fed(Baseline(rows=20, steps=50), [1.0] * 5, gap=1).done
    assert fed(Baseline(rows=20, steps=50), [1.0] * 6, gap=10).done


def test_a_spike_does_not_vaccinate_the_baseline():
    """Fifty times normal inside the warm-up stays out and is counted."""
    noise = random.Random(0)
    values = [1.0 + noise.gauss(0.0, 0.1) for _ in range(20)]
    values[12] = 50.0
    baseline = fed(Baseline(rows=20, floor=0.01), values)

    assert baseline.quarantined == 1
    assert baseline.get() == pytest.approx(1.0, abs=0.1)
    assert baseline.spread < 0.3


def test_the_first_rows_are_remembered_apart():
    """A run that falls inside its warm-up keeps how it began."""
    baseline = fed(Baseline(rows=20), [1.0, 0.9, 1.1, *([0.1] * 17)])

    assert baseline.first == 1.0
    assert baseline.get() == 0.1


def test_one_bad_first_row_is_no_beginning():
    """The median of three."""
    assert fed(Baseline(), [99.0, 1.0, 1.2]).first == 1.2


def test_an_unready_baseline_is_silent():
    """Two rows are no level."""
    baseline = fed(Baseline(), [1.0, 2.0])

    assert (baseline.get(), baseline.first, baseline.upper(), baseline.ready) == (None, None, None, False)


def test_the_upper_quantile_sees_past_rows_near_zero():
    """Half the batches without gradient: the median is nothing, the upper quartile is the norm."""
    assert fed(Baseline(rows=20), [0.0, 0.5] * 10).upper() == 0.5


@pytest.mark.parametrize("stat", [Baseline(), Cusum(), Window(rows=5, steps=5)], ids=lambda s: type(s).__name__)
def test_non_finite_values_are_skipped_and_counted(stat):
    """NaN, +Inf and -Inf alike."""
    fed(stat, [math.nan, math.inf, -math.inf])

    assert stat.skipped == 3
    assert stat.get() in (None, 0.0)


def test_cusum_finds_a_small_persistent_shift_and_dates_it():
    """One standard deviation up from row 50: found within 30 rows, dated within 10."""
    noise = random.Random(1)
    cusum, found = Cusum(), None
    for step in range(100):
        cusum.update(step, noise.gauss(1.5 if step >= 50 else 0.0, 1.0))
        if found is None and cusum.get() > 8.0:
            found = step

    assert found is not None
    assert 50 <= found < 80
    assert 40 <= cusum.since <= 60


def test_cusum_caps_a_single_spike():
    """One value of a million deviations is not a shift."""
    assert fed(Cusum(cap=3.0), [0.0, 1e6, 0.0]).get() <= 3.0


def test_cusum_forgets_an_ended_shift_in_bounded_time():
    """The sum has a ceiling."""
    cusum = fed(Cusum(), [3.0] * 10_000)
    fed(cusum, [-1.0] * 60, start=10_000)

    assert cusum.get() == 0.0
    assert cusum.since is None


def test_hold_counts_rows_and_steps():
    """Both must be reached."""
    hold = fed(Hold(), [True] * 3, start=100)

    assert (hold.since, hold.rows, hold.get()) == (100, 3, 2)
    assert hold.lasted(3, 2)
    assert not hold.lasted(4)
    assert not hold.lasted(3, 3)


def test_a_row_of_a_coarse_log_stands_for_the_steps_before_it():
    """Half as many rows are enough then, two where each stands for as many steps as were asked for; after a pause a row stands for no more than others did."""
    early, late = fed(Hold(), [False, False, True], gap=10), fed(Hold(), [False, False, True, True], gap=10)
    paused = fed(Hold(), [False, False])
    for step in (100, 101):
        paused.update(step, True)

    assert not early.lasted(2)
    assert early.lasted(1, 9)
    assert late.lasted(4, 19)
    assert not late.lasted(4, 20)
    assert late.lasted(10, 19)
    assert not late.lasted(11)
    assert paused.lasted(2, 1)
    assert not paused.lasted(3)


def test_hold_forgives_as_many_misses_as_it_was_told():
    """One forgiven miss keeps the beginning, two end it."""
    assert fed(Hold(forgive=1), [True, False, True]).since == 0
    assert fed(Hold(forgive=1), [True, False, False, True]).since == 3
    assert fed(Hold(), [True, False]).since is None


def test_hold_starts_anew_when_steps_go_back():
    """A resume undoes what was seen."""
    hold = fed(Hold(), [True] * 5)
    hold.update(2, True)

    assert (hold.since, hold.rows) == (2, 1)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: Baseline(rows=6), [1.0, 2.0, math.nan, 3.0]),
        (Cusum, [2.0, 3.0, math.nan]),
        (lambda: Hold(forgive=1), [True, False, True]),
        (lambda: Window(rows=5, steps=5), [1.0, math.inf, 2.0, 4.0]),
    ],
    ids=["Baseline", "Cusum", "Hold", "Window"],
)
def test_a_restored_statistic_goes_on_as_if_never_stopped(make, values):
    """state_dict survives JSON, and the copy and the original stay equal."""
    original, copy = fed(make(), values), make()
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for stat in (original, copy):
        fed(stat, values[:2] * 4, start=100)

    assert copy.state_dict() == original.state_dict()
    assert copy.get() == original.get()


def test_a_state_with_a_part_missing_is_refused():
    """Half a memory is worse than none."""
    with pytest.raises(KeyError, match="since"):
        Cusum().load_state_dict({"skipped": 0, "sum": 1.0})


@given(
    rows=st.lists(st.tuples(st.integers(-6, 9), st.floats(allow_nan=True, allow_infinity=True, width=16)), max_size=80),
    size=st.integers(1, 12),
    steps=st.integers(1, 30),
)
@settings(max_examples=150, deadline=None)
def test_a_ranked_window_holds_what_a_window_holds_and_ranks_it(rows, size, steps):
    """With gaps, steps that go back and values that are no numbers."""
    plain, ranked = Window(rows=size, steps=steps, least=2), Ranked(rows=size, steps=steps, least=2)
    step = 10
    for gap, value in rows:
        step = max(step + gap, 0)
        for window in (plain, ranked):
            window.update(step, value)
        assert (ranked.at, ranked.values, ranked.get()) == (plain.at, plain.values, plain.get())
        if plain.values:
            assert [ranked.quantile(share) for share in (0.0, 0.5, 0.9)] == [
                quantile(plain.values, share) for share in (0.0, 0.5, 0.9)
            ]


def test_a_restored_ranked_window_ranks_what_was_restored():
    """Its order is no part of what is saved."""
    ranked, restored = fed(Ranked(rows=5, steps=9), [3.0, 1.0, 2.0]), fed(Ranked(rows=5, steps=9), [9.0])
    restored.load_state_dict(ranked.state_dict())
    restored.update(3, 0.0)

    assert restored.quantile(0.0) == 0.0
    assert restored.quantile(1.0) == 3.0
