"""The cross-check: a logistic hazard, which weighs and adds."""

import math

import numpy as np
import pytest
from forecast_tables import tables

from rlwatch.forecast import training
from rlwatch.forecast.examples import examples
from rlwatch.forecast.features import FEATURES


@pytest.fixture(scope="module")
def some():
    table, labels = tables()
    return examples(table, labels).at_risk()


def test_it_tells_the_rows_before_a_failure_from_the_others(some):
    """On runs it was not fitted to."""
    mine = some.run % 2 == 0
    near = training.fit_lines(some.only(mine)).logits(some.only(~mine).x)[:, 0]
    ahead = some.ahead[~mine]
    assert near[ahead <= 10].mean() > near[ahead > 100].mean() + 2.0


def test_what_was_not_measured_has_not_moved(some):
    """NaN weighs as 0; so does a column in which nothing ever moves."""
    lines = training.fit_lines(some)
    x = some.x[:5].copy()
    unmoved = np.nan_to_num(x)
    np.testing.assert_array_equal(lines.logits(x), lines.logits(unmoved))
    still = np.flatnonzero(np.nan_to_num(some.x).std(axis=0) == 0.0)
    assert len(still)
    assert all(head.coef_[0, i] == pytest.approx(0.0, abs=1e-9) for head in lines.hazards for i in still[:20])


def test_one_odd_value_carries_nothing_away(some):
    """Features are cut off at 5 spreads."""
    lines = training.fit_lines(some)
    x = np.zeros((2, len(FEATURES)), dtype=np.float32)
    place = FEATURES.index("entropy:z")
    x[:, place] = 5.0 * lines.spread[place], 1e6
    first, second = lines.logits(x)
    np.testing.assert_allclose(first, second, rtol=1e-6)
    assert np.isfinite(lines.logits(np.full((1, len(FEATURES)), math.inf, dtype=np.float32))).all()
