"""The model: the mean of what trees and a line say, as numbers that need neither library."""

import numpy as np
import pytest
from forecast_tables import tables

from rlwatch.forecast import training
from rlwatch.forecast.examples import examples
from rlwatch.forecast.training import TreeSettings

SMALL = TreeSettings(trees=5, leaves=5, least=10, rate=0.3)


@pytest.fixture(scope="module")
def learnt():
    table, labels = tables(6, 8)
    part = examples(table, labels).at_risk()
    return part, training.learn_blend(part, SMALL)


def test_it_is_the_mean_of_both(learnt):
    """Of their log-odds."""
    part, both = learnt
    x = part.x[::29]
    halves = both.grown.logits(x) + both.lines.logits(x)
    np.testing.assert_allclose(both.logits(x), halves / 2)


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_a_head_read_from_a_file_says_the_same(learnt, interval):
    """To the rounding of 32 bits, with missing values, and with the calibration on top."""
    part, both = learnt
    x = part.x[::29].copy()
    x[1::2, ::3] = np.nan
    head = both.head(interval, 0.8, -0.3)
    said = [head.logit(row) for row in x.astype(float).tolist()]
    np.testing.assert_allclose(said, 0.8 * both.logits(x)[:, interval] - 0.3, atol=2e-5)
