"""Counting of non-finite values, text and groups."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.groups import zero_variance, zero_variance_fraction
from rlwatch.tensors.text import id0_share, repetition, text_stats

pytestmark = pytest.mark.torch


def _values(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def test_only_what_the_mask_shows_is_counted_as_non_finite():
    """NaN, Inf and -Inf count; padding does not."""
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, math.nan]])

    assert _values(nonfinite_stats("logp", x, torch.tensor([[1, 1, 1, 1, 0]])))["nonfinite/logp"] == 3


def test_repetition_of_known_ids():
    """distinct-3 of [1 2 3 1 2 3 4] is .8; a loop tends to 1; too short has none."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 4], [7, 7, 7, 7, 7, 7, 7], [1, 2, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 7, [1] * 7, [1, 1, 0, 0, 0, 0, 0]])

    value, measured = repetition(ids, mask)

    assert value[0].item() == pytest.approx(0.2)
    assert value[1].item() == pytest.approx(0.8)
    assert measured.tolist() == [True, True, False]
    assert _values(text_stats(ids, mask))["text/repetition"] == pytest.approx(0.5)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=5))
def test_repetition_equals_counting_3_grams_in_python(responses):
    """Against the definition, on padded batches."""
    width = max(map(len, responses))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in responses])
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in responses])

    value, measured = repetition(ids, mask)

    for row, response in enumerate(responses):
        grams = [tuple(response[i : i + 3]) for i in range(len(response) - 2)]
        assert bool(measured[row]) == bool(grams)
        if grams:
            assert value[row].item() == pytest.approx(1 - len(set(grams)) / len(grams), abs=1e-6)


def test_ids_of_the_largest_vocabulary_do_not_collide():
    """3-grams that differ in one large id are different."""
    big = 2**21 - 1
    ids = torch.tensor([[big, big, big, big - 1, big]])

    assert repetition(ids, torch.ones_like(ids))[0].item() == 0.0


def test_a_nan_sampler_is_recognised_by_its_zeros():
    """Responses that are at least 90 % id 0 count; padding with 0 does not."""
    ids = torch.tensor([[0] * 10, [0] * 9 + [5], [0] * 8 + [5, 6], [5, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 10, [1] * 10, [1] * 10, [1] + [0] * 9])

    assert id0_share(ids, mask).tolist() == pytest.approx([1.0, 0.9, 0.8, 0.0])
    assert _values(text_stats(ids, mask))["text/id0_frac"] == 0.5


def test_groups_without_variance_are_found():
    """Two of three groups teach nothing; a NaN group is not flat."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, math.nan, 1.0])

    assert zero_variance(rewards, 2).tolist() == [True, True, False, False, True, True, False, False]
    assert zero_variance_fraction(rewards, 2) == 0.5


def test_groups_must_divide_the_batch():
    """The message names both numbers."""
    with pytest.raises(ValueError, match="5 rewards do not divide into groups of 2"):
        zero_variance(torch.zeros(5), 2)
