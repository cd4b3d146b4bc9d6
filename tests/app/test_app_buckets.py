"""Thinning keeps every spike, every NaN and every gap."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app.thinning import branches, bucket_means, sparkline, thin, trend

from rlwatch.compare import attempt_starts
from rlwatch.ports import Series

FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def series(values, steps=None, attempts=None):
    values = np.asarray(values, dtype=np.float64)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    attempts = np.ones(len(values), dtype=np.int64) if attempts is None else np.asarray(attempts)
    return Series("m", steps.astype(np.int64), values, attempts, np.arange(1, len(values) + 1))


@given(st.lists(FLOATS, max_size=300), st.integers(1, 40))
def test_extremes_ends_and_bad_values_survive_any_thinning(values, buckets):
    """Whatever the data: what is drawn was measured, and nothing that matters is lost."""
    array = np.asarray(values, dtype=np.float64)
    curve = thin(np.arange(len(array)), array, buckets)
    finite = np.isfinite(array)
    assert len(curve) <= 2 * buckets + 2
    assert all(array[step] == value for step, value in zip(curve.steps, curve.values, strict=True))
    if finite.any():
        assert curve.values.min() == array[finite].min()
        assert curve.values.max() == array[finite].max()
        assert curve.steps[0] == np.flatnonzero(finite)[0]
        assert curve.steps[-1] == np.flatnonzero(finite)[-1]
    words = {"NaN": np.isnan(array), "Inf": array == np.inf, "-Inf": array == -np.inf}
    for word, mask in words.items():
        assert any(w == word for _, w in curve.bad) == mask.any()
    assert all(words[word][step] for step, word in curve.bad)


def test_one_spike_among_a_hundred_thousand_is_drawn():
    """The reason not to sample."""
    values = np.zeros(100_000)
    values[77_777] = 1e6
    curve = thin(np.arange(100_000), values, 240)
    assert 77_777 in curve.steps.tolist()


def test_the_line_breaks_where_a_value_was_not_finite():
    """No line is drawn over a NaN as if nothing had been."""
    curve = thin(np.arange(5), np.array([1.0, 2.0, np.nan, 4.0, 5.0]), 240)
    assert curve.steps.tolist() == [0, 1, 3, 4]
    assert curve.breaks.tolist() == [False, False, True, False]
    assert curve.bad == ((2, "NaN"),)


def test_a_metric_that_was_never_finite_has_only_marks():
    """NaN from step 1 is not an empty chart."""
    curve = thin(np.arange(3), np.full(3, np.nan), 240)
    assert (len(curve), len(curve.bad)) == (0, 3)


def test_many_bad_values_are_thinned_but_their_stretch_is_kept():
    """Ten thousand red ticks would be one red block anyhow."""
    curve = thin(np.arange(10_000), np.full(10_000, np.nan), 100)
    steps = [step for step, _ in curve.bad]
    assert len(steps) <= 100
    assert steps[0] == 0
    assert steps[-1] > 9_800


def test_what_a_later_attempt_replaced_is_not_the_line():
    """Attempt 2 resumed at step 3 and overwrote 3 and 4."""
    one = series([0, 1, 2, 33, 44, 3, 4, 5], steps=[0, 1, 2, 3, 4, 3, 4, 5], attempts=[1, 1, 1, 1, 1, 2, 2, 2])
    split = branches(one, attempt_starts([one]), (0, 5), 100)
    assert split.current.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert [curve.values.tolist() for curve in split.replaced] == [[33, 44]]


def test_a_sparse_metric_is_cut_where_the_run_resumed_not_where_it_did():
    """Evaluations logged every 10 steps belong to the branch of their attempt."""
    dense = series(range(25), steps=[*range(20), *range(12, 17)], attempts=[1] * 20 + [2] * 5)
    rare = series([1.0, 2.0], steps=[10, 15], attempts=[1, 1])
    split = branches(rare, attempt_starts([dense, rare]), (0, 20), 100)
    assert split.current.steps.tolist() == [10]
    assert split.replaced[0].steps.tolist() == [15]


def test_the_window_cuts_both_ends():
    """Both ends belong to it."""
    split = branches(series(range(10)), {1: 0}, (3, 5), 100)
    assert split.current.steps.tolist() == [3, 4, 5]


def test_a_sparkline_lies_in_the_unit_square():
    """And marks what was not finite."""
    points, bad = sparkline(series([5.0, np.nan, 15.0, 10.0]), {1: 0})
    assert points == [[0.0, 0.0], [0.6667, 1.0], [1.0, 0.5]]
    assert bad == [0.3333]


def test_a_flat_sparkline_runs_through_the_middle():
    """No division by zero, no line on the edge."""
    assert {y for _, y in sparkline(series([2.0, 2.0, 2.0]), {1: 0})[0]} == {0.5}


def test_an_empty_series_has_no_sparkline():
    """Nothing measured, nothing drawn."""
    assert sparkline(series([]), {}) == ([], [])


def test_trend_sees_a_fall_and_ignores_noise():
    """An arrow only where the last tenth differs beyond the noise of the tenth before."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=400)
    assert trend(noise) == "→"
    assert trend(np.concatenate([noise, noise[:40] - 5])) == "↓"
    assert trend(np.concatenate([noise, noise[:40] + 5])) == "↑"
    assert trend(np.array([1.0, 2.0])) == ""


def test_trend_is_not_blinded_by_nan():
    """Non-finite values are left out, not spread."""
    rising = np.arange(100.0)
    rising[50:60] = np.nan
    assert trend(rising) == "↑"


@given(
    st.lists(st.tuples(st.integers(0, 400), st.floats(allow_nan=True, allow_infinity=True)), max_size=300),
    st.integers(1, 40),
    st.data(),
)
def test_a_mean_is_that_of_every_finite_row_of_its_range(rows, buckets, data):
    """Against rational numbers: unordered steps, values up to the largest, NaN and infinities, restarts."""
    attempts = sorted(data.draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows))))
    one = series([value for _, value in rows], [step for step, _ in rows], attempts)
    starts, window = attempt_starts([one]), (50, 350)
    found = bucket_means(one, starts, window, buckets)

    replaced_from = {a: min((first for b, first in starts.items() if b > a), default=10**9) for a in starts}
    of_range: dict[int, list[float]] = {}
    for step, value, attempt in zip(one.steps.tolist(), one.values.tolist(), attempts, strict=True):
        if 50 <= step <= 350 and step < replaced_from[attempt]:
            of_range.setdefault(step // found.width, []).append(value)

    assert len(found.starts) <= buckets + 1
    assert found.starts.tolist() == [found.width * bucket for bucket in sorted(of_range)]
    for mean, count, (_, values) in zip(found.values, found.counts, sorted(of_range.items()), strict=True):
        finite = [value for value in values if np.isfinite(value)]
        assert count == len(finite)
        if not finite:
            assert np.isnan(mean)
            continue
        exact = sum(map(Fraction, finite)) / len(finite)
        assert abs(Fraction(float(mean)) - exact) <= Fraction(1, 10**13) * max(abs(Fraction(v)) for v in finite)


def test_a_mean_of_whole_numbers_is_exact():
    """Steps of 0 to 99999 in 240 ranges, one spike and one NaN: nothing is sampled."""
    values = np.arange(100_000, dtype=np.float64)
    values[500], values[501] = np.nan, 1e6
    found = bucket_means(series(values), {1: 0}, (0, 99_999), 240)
    assert (found.width, found.through, int(found.counts.sum())) == (417, 99_999, 99_999)
    assert found.values[0] == np.mean(np.arange(417))
    assert found.values[1] == pytest.approx((np.nansum(values[417:834])) / 416, rel=1e-15)
