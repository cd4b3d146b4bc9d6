"""Correlation and slope: exact, mergeable, absent where they do not exist."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rlwatch.tensors.mergeable import Correlation, Slope

pytestmark = pytest.mark.torch
D = torch.float64
X = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=D)
Y = torch.tensor([2.0, 1.0, 4.0, 3.0], dtype=D)
EVERY = torch.ones(4)
numbers = st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50), st.booleans()), min_size=1, max_size=30)


def test_the_correlation_is_pearsons():
    """By hand: covariance 3/4 over variance 5/4."""
    assert Correlation.of(X, Y, EVERY).value().item() == pytest.approx(0.6)


def test_the_slope_is_that_of_the_least_squares_line():
    """3 over 5 by hand; a line has its own slope whatever its offset."""
    assert Slope.of(X, Y, EVERY).value().item() == pytest.approx(0.6)
    assert Slope.of(X, 7 - 2.5 * X, EVERY).value().item() == pytest.approx(-2.5)


def test_a_flat_line_has_a_slope_but_no_correlation():
    """Slope 0 is a measurement; a correlation would divide by 0."""
    flat = torch.full((4,), 0.1)

    assert Slope.of(X, flat, EVERY).settle().count == 4
    assert Slope.of(X, flat, EVERY).value().item() == pytest.approx(0.0, abs=1e-9)
    assert Correlation.of(X, flat, EVERY).settle().count == 0


@pytest.mark.parametrize("same", [0.1, -3.3, 1e-30, 1e20, 0.0])
def test_equal_numbers_do_not_vary_by_their_rounding(same):
    """The mean of a thousand equal floats differs from them in the last bit: that is no spread."""
    x, y = torch.full((1000,), same), torch.arange(1000.0)

    assert Slope.of(x, y, torch.ones(1000)).settle().count == 0
    assert Correlation.of(y, x, torch.ones(1000)).settle().count == 0


def test_one_pair_and_none_say_nothing():
    """A single point has no slope; no points have none either, and change nothing when merged."""
    whole = Slope.of(X, Y, EVERY)
    one, none = Slope.of(X[:1], Y[:1], EVERY[:1]), Slope.of(X[:0], Y[:0], EVERY[:0])

    assert (one.settle().count, none.settle().count) == (0, 0)
    assert whole.merge(none).value() == whole.value() == none.merge(whole).value()
    assert one.merge(Slope.of(X[1:], Y[1:], EVERY[1:])).value().item() == pytest.approx(0.6)


def test_what_lies_outside_the_mask_does_not_exist():
    """NaN and infinities in padding change nothing; a NaN inside shows."""
    x = torch.cat([X, torch.tensor([math.nan, math.inf])])
    y = torch.cat([Y, torch.tensor([1.0, math.nan])])

    assert Correlation.of(x, y, torch.tensor([1, 1, 1, 1, 0, 0])).value().item() == pytest.approx(0.6)
    broken = Correlation.of(x, y, torch.tensor([1, 1, 1, 1, 1, 0]))
    assert broken.settle().count > 0
    assert broken.value().isnan()


def test_half_precision_is_widened_and_columns_broadcast():
    """One advantage a response stands beside all its tokens."""
    x, a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16), torch.tensor([[1.0], [2.0]])
    mask = torch.ones(2, 2)

    got = Correlation.of(x, a, mask).value()

    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(torch.corrcoef(torch.tensor([[1.0, 2, 3, 4], [1, 1, 2, 2]]))[0, 1].item())


@given(numbers, st.integers(0, 30))
def test_any_split_merges_to_the_whole(rows, cut):
    """Two parts, one of which may be empty or wholly masked, equal the whole, and numpy-like definitions."""
    x, y, mask = (torch.tensor(column, dtype=D) for column in zip(*rows, strict=True))
    inside = mask.bool()
    assume(inside.sum() > 2 and x[inside].std() > 1e-3 and y[inside].std() > 1e-3)
    parts = [slice(0, cut), slice(cut, None)]

    for kind in (Correlation, Slope):
        whole = kind.of(x, y, mask)
        first, second = (kind.of(x[part], y[part], mask[part]) for part in parts)
        assert first.merge(second).value().item() == pytest.approx(whole.value().item(), rel=1e-9, abs=1e-9)
        assert first.merge(second).count == whole.count
    dx, dy = x[inside] - x[inside].mean(), y[inside] - y[inside].mean()
    assert whole.value().item() == pytest.approx(((dx * dy).sum() / (dx**2).sum()).item(), rel=1e-9, abs=1e-12)
