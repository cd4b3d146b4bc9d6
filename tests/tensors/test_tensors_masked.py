"""Masked reductions: the outside does not exist, the inside is never hidden."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.masked import keep, masked_max, masked_mean, masked_min, masked_quantile, masked_sum, widen

pytestmark = pytest.mark.torch

numbers = st.floats(-1e6, 1e6, allow_nan=False)
rows = st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=40)


def _pair(row):
    x, mask = zip(*row, strict=True)
    return torch.tensor(x, dtype=torch.float64), torch.tensor(mask)


@given(rows)
def test_masked_reductions_equal_those_of_the_kept_values(row):
    """Reducing inside a mask is reducing what the mask keeps."""
    x, mask = _pair(row)
    kept = x[mask]

    assert masked_sum(x, mask).item() == pytest.approx(kept.sum().item(), abs=1e-6)
    if kept.numel():
        assert masked_mean(x, mask).item() == pytest.approx(kept.mean().item(), abs=1e-6)
        assert masked_max(x, mask) == kept.max()
        assert masked_min(x, mask) == kept.min()


@given(rows, st.floats(0, 1))
def test_masked_quantile_is_numpys_linear_quantile(row, q):
    """The quantile interpolates as NumPy does."""
    x, mask = _pair(row)
    got = masked_quantile(x, mask, q).item()

    if not mask.any():
        assert math.isnan(got)
    else:
        assert got == pytest.approx(np.quantile(x[mask].numpy(), q), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("row", [[-math.inf, 0.0], [-math.inf, math.inf], [-3e38, 3e38], [1e-45, 3e-45]])
def test_a_quantile_of_values_beyond_the_ordinary_disturbs_no_trainer(row):
    """NumPy would warn in the trainer's log, or raise where the trainer makes warnings or its own errors fatal."""
    x = torch.tensor(row)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        got = masked_quantile(x, torch.ones(2, dtype=torch.bool), 0.5).item()

    assert not row[0] < got < row[1] or math.isfinite(got)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_lies_outside_the_mask_does_not_matter(bad):
    """NaN and infinities in the padding are harmless."""
    x, mask = torch.tensor([1.0, 3.0, bad]), torch.tensor([1, 1, 0])

    assert masked_mean(x, mask) == 2.0
    assert masked_max(x, mask) == 3.0
    assert masked_min(x, mask) == 1.0
    assert masked_quantile(x, mask, 0.5) == 2.0


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean, masked_max, masked_min])
def test_a_nan_inside_the_mask_shows(reduce):
    """No reduction hides a NaN it was asked to look at."""
    x = torch.tensor([1.0, math.nan, 2.0])

    assert reduce(x, torch.ones(3)).isnan()
    assert masked_quantile(x, torch.ones(3), 0.5).isnan()


def test_half_precision_is_widened_and_double_kept():
    """bf16 sums are accumulated in float32; float64 stays."""
    ones = torch.ones(4096, dtype=torch.bfloat16)

    assert masked_sum(ones, ones) == 4096.0
    assert widen(ones).dtype is torch.float32
    assert widen(ones.double()).dtype is torch.float64


def test_nothing_is_kept_of_the_graph():
    """Statistics never hold the autograd graph alive."""
    x = torch.ones(3, requires_grad=True)

    assert not keep(x, torch.ones(3), 0.0).requires_grad
