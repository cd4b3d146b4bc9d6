"""Shares, participation and heterogeneity: formulas by hand and by brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlwatch.layers import heterogeneity, participation, shares

norms = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=40).map(np.array)


def test_shares_of_three_and_four():
    """n^2 / sum n^2: 9, 16 of 25."""
    assert shares(np.array([3.0, 4.0])) == pytest.approx([0.36, 0.64])


@pytest.mark.parametrize(
    ("given_norms", "expected"),
    [
        ([1.0] * 8, 1.0),
        ([5.0], 1.0),
        ([1.0, 0.0, 0.0, 0.0], 0.25),
        ([1.0, 1.0, 0.0, 0.0], 0.5),
        ([3.0, 4.0], 625 / (2 * (81 + 256))),
    ],
)
def test_participation_is_one_if_even_and_one_over_l_if_alone(given_norms, expected):
    """(sum n^2)^2 / (L sum n^4)."""
    assert participation(np.array(given_norms)) == pytest.approx(expected)


def test_norms_that_are_all_zero_have_no_participation():
    """Nothing is spread: not measured, rather than a number."""
    assert participation(np.zeros(3)) is None
    assert shares(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@settings(max_examples=100, deadline=None)
@given(norms, st.floats(1e-3, 1e3))
def test_only_the_proportions_count(values, scale):
    """Shares sum up to 1, participation lies in [1/L, 1]; neither depends on the scale."""
    if not values.any():
        return
    even = participation(values)

    assert shares(values).sum() == pytest.approx(1.0)
    assert 1.0 / len(values) - 1e-9 <= even <= 1.0 + 1e-9
    assert participation(scale * values) == pytest.approx(even, rel=1e-6)


def test_huge_and_tiny_norms_do_not_overflow():
    """n^4 of 1e200 is no float; the answer is."""
    assert participation(np.array([1e200, 1e200])) == pytest.approx(1.0)
    assert participation(np.array([1e-200, 1e-200])) == pytest.approx(1.0)


def by_pairs(matrix):
    """1 - mean of numpy's own correlation over the pairs of columns."""
    found = np.corrcoef(matrix.T)
    return 1.0 - found[np.triu_indices(len(found), 1)].mean()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(3, 60), st.floats(0.0, 3.0))
def test_the_mean_over_all_pairs_is_numpys(seed, layers, rows, common):
    """Correlated more or less: the same number as pair by pair."""
    draw = np.random.default_rng(seed)
    matrix = np.exp(common * draw.normal(size=(rows, 1)) + 0.3 * draw.normal(size=(rows, layers)))

    assert heterogeneity(matrix) == pytest.approx(by_pairs(matrix), abs=1e-9)


def test_layers_in_step_are_not_heterogeneous_and_opposite_ones_are_most():
    """Proportional norms: 0. Two that move against each other: 2. Three unrelated pairs on average: 1."""
    up = np.array([1.0, 2.0, 3.0, 2.0])

    assert heterogeneity(np.stack([up, 10.0 * up, 3.0 + up], axis=1)) == pytest.approx(0.0, abs=1e-12)
    assert heterogeneity(np.stack([up, 5.0 - up], axis=1)) == pytest.approx(2.0)
    signs = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    assert heterogeneity(2.0 + signs) == pytest.approx(1.0)


def test_layers_with_gaps_and_still_ones_are_left_out():
    """An expert no token was routed to, a NaN, a constant: the other layers' correlation is unchanged."""
    draw = np.random.default_rng(0)
    matrix = np.exp(draw.normal(size=(50, 1)) + 0.3 * draw.normal(size=(50, 5)))
    more = np.column_stack([matrix, np.full(50, 2.0), matrix[:, 0]])
    more[7, -1] = np.nan

    assert heterogeneity(more) == pytest.approx(heterogeneity(matrix))


@pytest.mark.parametrize(
    "matrix",
    [np.ones((50, 4)), np.full((50, 4), np.nan), np.ones((50, 0)), np.ones((0, 4)), np.array([[1.0, 2.0], [2.0, 1.0]])],
    ids=["constant", "NaN", "no layers", "no rows", "two rows"],
)
def test_where_nothing_moves_there_is_no_correlation(matrix):
    """None rather than NaN or a made-up number."""
    assert heterogeneity(matrix) is None


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.float64, st.tuples(st.integers(0, 8), st.integers(0, 6)), elements=st.floats(0.0)))
def test_any_norms_give_a_number_in_range_or_none(matrix):
    """Zeros, infinities, huge and subnormal values."""
    with np.errstate(all="ignore"):
        found = heterogeneity(matrix)

    assert found is None or (0.0 <= found <= 2.0 and math.isfinite(found))
