"""Counting of non-finite values."""

import math

import pytest
import torch

from rlwatch.tensors.mergeable import merge, nonfinite_stats

pytestmark = pytest.mark.torch


def test_only_what_the_mask_shows_is_counted_as_non_finite():
    """NaN, Inf and -Inf count; padding does not."""
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, math.nan]])

    assert nonfinite_stats("logp", x, torch.tensor([[1, 1, 1, 1, 0]]))["nonfinite/logp"].value() == 3


def test_counts_of_non_finite_values_add_over_micro_batches():
    """A count, not a share."""
    x = torch.tensor([math.nan, 1.0, -math.inf])
    one = nonfinite_stats("grad", x, torch.ones(3))

    assert merge(one, one)["nonfinite/grad"].value() == 4.0
    assert nonfinite_stats("grad", x, torch.tensor([0, 1, 0]))["nonfinite/grad"].value() == 0.0
