"""Statistics over micro-batches combine exactly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.mergeable import Ess, Max, Mean, Min, Quantile, Std, Total, merge, nonfinite_stats

pytestmark = pytest.mark.torch

numbers = st.floats(-50, 50, allow_nan=False)
chunk = st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=12)
chunks = st.lists(chunk, min_size=1, max_size=5)
MAKERS = [Mean.of, Max.of, Min.of, Std.of, Ess.of, Total.of, lambda x, m: Quantile.of(x, m, 0.3)]


def _tensors(part):
    x, mask = zip(*part, strict=True)
    return torch.tensor(x, dtype=torch.float64), torch.tensor(mask)


@given(parts=chunks)
def test_merging_micro_batches_equals_one_big_batch(parts):
    """However a batch is cut, merged statistics say the same as the whole; empty pieces change nothing."""
    every, pieces = _tensors([pair for part in parts for pair in part]), [_tensors(part) for part in parts]
    for make in MAKERS:
        whole, merged = make(*every), make(*pieces[0])
        for piece in pieces[1:]:
            merged = merged.merge(make(*piece))

        assert merged.count == whole.count, make
        if whole.count > 0:
            assert merged.value().item() == pytest.approx(whole.value().item(), rel=1e-8, abs=1e-8), make


def test_a_mean_of_means_would_have_been_wrong():
    """Micro-batches of unequal token counts weigh by tokens."""
    few, many = torch.tensor([10.0]), torch.zeros(9)
    merged = Mean.of(few, torch.ones(1)).merge(Mean.of(many, torch.ones(9)))

    assert merged.value() == 1.0


def test_nothing_measured_is_a_count_of_zero_not_a_number():
    """An empty mask says "not measured" through its count."""
    empty = torch.zeros(3)
    for make in MAKERS:
        assert make(torch.ones(3), empty).count <= 0


def test_a_nan_survives_every_merge():
    """A NaN in one micro-batch is in the step."""
    clean, broken = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    for make in (Mean.of, Max.of, Min.of, Std.of, Ess.of):
        assert make(clean, clean).merge(make(broken, clean)).value().isnan()


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=30))
def test_effective_sample_size_lies_within_its_range(log_weights):
    """1/n <= ESS/n <= 1 whatever the weights, also where exp overflows."""
    x = torch.tensor(log_weights, dtype=torch.float64)
    ess = Ess.of(x, torch.ones_like(x)).value().item()

    assert 1 / len(log_weights) - 1e-9 <= ess <= 1.0


def test_equal_weights_are_fully_effective_and_one_heavy_weight_is_not():
    """The two ends of the range."""
    every = torch.ones(4)

    assert Ess.of(torch.full((4,), 300.0), every).value() == pytest.approx(1.0, abs=1e-5)
    assert Ess.of(torch.tensor([300.0, 0, 0, 0]), every).value() == pytest.approx(0.25, abs=1e-5)


def test_merging_dictionaries_keeps_what_only_one_side_measured():
    """A metric of one micro-batch only is not lost."""
    one, every = torch.ones(1), torch.ones(1)
    both = merge({"a": Mean.of(one, every)}, {"a": Mean.of(3 * one, every), "b": Max.of(one, every)})

    assert both["a"].value() == 2.0
    assert both["b"].value() == 1.0


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
