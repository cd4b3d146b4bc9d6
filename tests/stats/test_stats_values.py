"""Order statistics, slopes, windows: the numbers are right, and outliers do not move them."""

import math
import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.stats import Window, mad, median, quantile, theil_sen

numbers = st.floats(min_value=-1e6, max_value=1e6)


@given(st.lists(numbers, min_size=1, max_size=50))
def test_median_agrees_with_the_standard_library(values):
    """Same definition for odd and even counts."""
    assert median(values) == pytest.approx(statistics.median(values), abs=1e-9, rel=1e-9)


@given(st.lists(numbers, min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_quantile_lies_within_the_values(values, share):
    """And the ends are the extremes."""
    assert min(values) <= quantile(values, share) + 1e-6
    assert quantile(values, share) <= max(values) + 1e-6
    assert (quantile(values, 0.0), quantile(values, 1.0)) == (min(values), max(values))


def test_mad_estimates_a_normal_standard_deviation():
    """Quantiles of N(0, 2) give 2."""
    normal = statistics.NormalDist(0.0, 2.0)

    assert mad([normal.inv_cdf((i + 0.5) / 999) for i in range(999)]) == pytest.approx(2.0, rel=0.01)


def test_mad_ignores_a_minority_of_outliers_and_is_zero_for_constants():
    """One huge value in five changes it by little."""
    assert mad([1.0, 2.0, 3.0, 4.0, 1e9]) < 3.0
    assert mad([7.0] * 10) == 0.0


@given(numbers, st.floats(-100.0, 100.0))
def test_theil_sen_finds_an_exact_line(intercept, slope):
    """Uneven steps do not matter."""
    steps = [0, 1, 5, 20, 21, 50]

    assert theil_sen(steps, [intercept + slope * s for s in steps]) == pytest.approx(slope, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(-1e6, 1e6)), max_size=40))
def test_theil_sen_is_the_median_of_the_slopes_between_all_pairs(points):
    """To the last bit."""
    slopes = [(y - b) / (x - a) for (a, b), (x, y) in combinations(points, 2) if x != a]
    assert theil_sen([x for x, _ in points], [y for _, y in points]) == (median(slopes) if slopes else 0.0)


def test_theil_sen_shrugs_off_a_spike_and_survives_repeated_steps():
    """A quarter of outliers leaves the slope; pairs at one step are left out."""
    values = [0.1 * i for i in range(20)]
    values[3] = values[9] = values[15] = 1e6

    assert theil_sen(list(range(20)), values) == pytest.approx(0.1)
    assert theil_sen([4, 4], [1.0, 2.0]) == 0.0
    assert theil_sen([], []) == 0.0


@pytest.mark.parametrize(("cadence", "kept"), [(1, 10), (5, 3), (10, 3)])
def test_a_window_means_the_same_stretch_at_any_cadence(cadence, kept):
    """Ten steps, or three rows where rows are farther apart."""
    window = Window(rows=10, steps=15)
    for step in range(0, 300, cadence):
        window.update(step, float(step))

    assert len(window) == kept
    assert window.at[-1] == 300 - cadence


def test_a_window_forgets_what_a_resume_undoes():
    """Going back to step 5 drops the rows from there on."""
    window = Window(rows=10, steps=100)
    for step in range(10):
        window.update(step, 1.0)
    window.update(5, 2.0)

    assert window.at == [0, 1, 2, 3, 4, 5]
    assert window.values[-1] == 2.0


def test_a_window_says_nothing_before_it_knows():
    """Below ``least`` rows there is no level."""
    window = Window(rows=5, steps=5, least=3)
    window.update(1, 1.0)
    window.update(2, 3.0)

    assert (window.get(), window.mean) == (None, None)
    window.update(3, 8.0)
    assert (window.get(), window.mean) == (3.0, 4.0)


@given(st.lists(st.one_of(numbers, st.sampled_from([math.nan, math.inf, -math.inf])), max_size=40))
def test_a_window_skips_and_counts_what_is_not_finite(values):
    """A NaN in the middle blinds nothing."""
    window, clean = Window(rows=100, steps=1000), Window(rows=100, steps=1000)
    for step, value in enumerate(values):
        window.update(step, value)
        if math.isfinite(value):
            clean.update(step, value)

    assert window.get() == clean.get()
    assert window.skipped == len(values) - len(clean)


@given(st.lists(numbers, max_size=20), numbers)
def test_a_window_reaches_a_limit_where_its_median_does(values, limit):
    """And knows the step of its newest row."""
    window = Window(rows=7, steps=10)
    for step, value in enumerate(values):
        window.update(step, value)
        level = window.get()
        assert window.reaches(limit) is (level is not None and level >= limit)
        assert level is None or window.reaches(level)
        assert window.last == step
