"""Lines through noisy points, intervals of slopes, and a run thinned to a few points."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.stats import Thinned, fit_line, slope_interval, theil_sen

numbers = st.floats(min_value=-1e3, max_value=1e3)


@given(numbers, numbers)
def test_an_exact_line_is_found(slope, intercept):
    """Whatever the spacing; it explains everything."""
    x = [0.0, 0.3, 1.0, 4.0, 4.5]
    line = fit_line(x, [slope * a + intercept for a in x])

    assert line.slope == pytest.approx(slope, abs=1e-6)
    assert line.intercept == pytest.approx(intercept, abs=1e-6)
    assert line.at(2.0) == pytest.approx(2.0 * slope + intercept, abs=1e-5)


def test_least_squares_on_normal_noise_and_its_standard_error():
    """Over many draws the slope scatters by the error it states."""
    noise = random.Random(0)
    x = [i / 10.0 for i in range(40)]
    lines = [fit_line(x, [2.0 * a + 1.0 + noise.gauss(0.0, 0.5) for a in x]) for _ in range(200)]
    slopes = [line.slope for line in lines]
    mean = sum(slopes) / len(slopes)
    deviation = math.sqrt(sum((s - mean) ** 2 for s in slopes) / len(slopes))

    assert mean == pytest.approx(2.0, abs=0.03)
    assert deviation == pytest.approx(sum(line.error for line in lines) / len(lines), rel=0.2)
    assert all(0.0 <= line.explained <= 1.0 for line in lines)


def test_a_few_wild_points_hardly_turn_it():
    """One in ten a hundred times too high; plain least squares would be far off."""
    x = [float(i) for i in range(40)]
    y = [0.5 * a + 0.1 * math.sin(7.0 * a) for a in x]
    y[3] = y[17] = y[30] = y[39] = 100.0

    assert fit_line(x, y).slope == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("x", [[], [1.0, 2.0], [3.0] * 10, [1e308, -1e308, 1e308]])
def test_points_that_make_no_line_give_none(x):
    """Too few, without spread, or beyond what floats can hold."""
    assert fit_line(x, [float(i) for i in range(len(x))]) is None


@given(st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False), numbers), max_size=20))
def test_no_finite_points_make_it_raise(points):
    """And what comes back is finite."""
    line = fit_line([x for x, _ in points], [y for _, y in points])

    assert line is None or all(map(math.isfinite, (line.slope, line.intercept, line.explained)))
    assert line is None or line.error >= 0.0


def test_the_interval_of_a_slope_covers_the_truth_nine_times_in_ten():
    """On independent noise; the trend itself lies inside it."""
    noise = random.Random(1)
    steps, covered = list(range(25)), 0
    for _ in range(300):
        values = [0.1 * s + noise.gauss(0.0, 1.0) for s in steps]
        low, high = slope_interval(steps, values)
        assert low <= theil_sen(steps, values) <= high
        covered += low <= 0.1 <= high

    assert 0.85 <= covered / 300 <= 0.95


def test_an_interval_needs_two_steps():
    """No slope, no interval."""
    assert slope_interval([5], [1.0]) is None
    assert slope_interval([5, 5], [1.0, 2.0]) is None


@given(st.integers(1, 400), st.integers(2, 16))
def test_a_thinned_run_keeps_its_mean_and_few_points(rows, points):
    """Every row of a closed block is in exactly one point, weighted alike."""
    thinned = Thinned(points)
    for i in range(rows):
        thinned.update(i, float(i), -2.0 * i)
    x, y = thinned.get()

    assert len(x) == len(thinned) <= points
    assert x == sorted(x)
    assert y == pytest.approx([-2.0 * v for v in x])
    assert rows < points or x[0] == pytest.approx((thinned.block - 1) / 2, abs=thinned.block)


def test_what_is_not_finite_is_skipped_and_a_resume_drops_what_lay_ahead():
    """As for the other statistics."""
    thinned = Thinned(8)
    for step, x in [(0, 1.0), (1, math.nan), (2, 3.0), (3, 4.0), (2, 9.0)]:
        thinned.update(step, x, 0.0)

    assert thinned.skipped == 1
    assert thinned.get()[0] == [1.0, 9.0]


def test_its_memory_survives_json():
    """Saved and restored half-way through a block, it goes on the same."""
    whole, saved = Thinned(4), Thinned(4)
    for i in range(30):
        whole.update(i, float(i), 1.0)
        if i == 17:
            other = Thinned(4)
            other.load_state_dict(json.loads(json.dumps(saved.state_dict() | {"_rows": [], "_open": []})))
            other.load_state_dict(json.loads(json.dumps(saved.state_dict())))
            saved = other
        saved.update(i, float(i), 1.0)

    assert saved.get() == whole.get()
