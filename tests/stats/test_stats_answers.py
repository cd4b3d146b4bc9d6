"""What Window and Baseline answer is of their rows as they are now, whatever they were asked before."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.stats import Baseline, Window, mad, median, quantile

VALUES = st.one_of(st.floats(-5.0, 5.0), st.sampled_from([0.0, -0.0, 1e6, math.nan, math.inf]))
ROWS = st.lists(st.tuples(st.integers(-6, 4), VALUES, st.booleans()), max_size=60)
"""By how far the step moves (back: a resume), the value, and whether the statistic is asked after it."""


def fed(stat, rows):
    """Yield after each row that is to be asked about."""
    step = 100
    for move, value, asked in rows:
        step += move
        stat.update(step, value)
        if asked:
            yield stat


@given(ROWS)
def test_the_median_of_a_window_is_that_of_its_rows(rows):
    """After every kind of row: a new one, one that drops others, one that is skipped."""
    for window in fed(Window(rows=8, steps=12, least=3), rows):
        assert len(window) == len(window.values) == len(window.at)
        assert window.at == sorted(set(window.at))
        for _ in range(2):
            assert window.get() == (median(window.values) if len(window) >= 3 else None)


@given(ROWS)
def test_the_answers_of_a_baseline_are_those_of_its_rows(rows):
    """Level, beginning, upper quantile and spread, in the warm-up and once it is frozen."""
    for baseline in fed(Baseline(rows=12, floor=0.01), rows):
        values = baseline.state_dict()["_values"]
        ready = len(values) >= 3
        for _ in range(2):
            assert baseline.get() == (median(values) if ready else None)
            assert baseline.first == (median(values[:3]) if ready else None)
            assert baseline.upper(0.9) == (quantile(values, 0.9) if ready else None)
            assert baseline.spread == (max(mad(values), 0.01) if values else 0.01)


@pytest.mark.parametrize(
    "make", [lambda: Baseline(rows=6), lambda: Window(rows=5, steps=5)], ids=["Baseline", "Window"]
)
def test_a_statistic_that_was_asked_before_answers_from_what_it_is_given_back(make):
    """Restoring replaces the answers with the memory."""
    other, restored = make(), make()
    for step in range(5):
        other.update(step, 10.0 + step)
        restored.update(step, float(step))
    asked = restored.get(), restored.spread
    restored.load_state_dict(other.state_dict())

    assert asked == (2.0, mad([0.0, 1.0, 2.0, 3.0, 4.0]))
    assert (restored.get(), restored.spread) == (other.get(), other.spread)
    assert restored.get() == 12.0
