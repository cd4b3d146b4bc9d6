"""Lengths of responses and their tail."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.responses import Gini, length_stats, length_tail_stats, observe_length_tail, observe_lengths
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
LONG_TAIL = torch.tensor([100] * 99 + [10_000])


def read(stats):
    """What would be recorded."""
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def test_the_tail_of_the_worked_example():
    """99 responses of 100 tokens and one of 10,000; percentiles by linear interpolation."""
    got = read({**length_stats(LONG_TAIL), **length_tail_stats(LONG_TAIL)})

    assert (got["len/mean"], got["len/max"], got["len/p50"], got["len/p90"]) == (199, 10_000, 100, 100)
    assert got["len/p99"] == pytest.approx(199)
    assert got["len/tail_ratio"] == pytest.approx(1.99)
    assert got["len/max_over_mean"] == pytest.approx(10_000 / 199)
    assert got["len/bubble"] == pytest.approx(0.9801)
    assert got["len/gini"] == pytest.approx(980_100 / 1_990_000, abs=1e-6)


lengths = st.lists(st.integers(0, 5000), min_size=1, max_size=30)


@settings(deadline=None)
@given(lengths)
def test_the_tail_is_numpys(values):
    """Percentiles, and Gini by its definition: the mean absolute difference over twice the mean."""
    got, x = read(length_tail_stats(torch.tensor(values))), np.array(values, dtype=float)

    for q in (50, 90, 99):
        assert got[f"len/p{q}"] == pytest.approx(np.percentile(x, q), rel=1e-5)
    if x.sum():
        gaps = [abs(one - other) for one, other in itertools.product(x, x)]
        assert got["len/gini"] == pytest.approx(np.mean(gaps) / (2 * x.mean()), abs=1e-4)
        assert got["len/bubble"] == pytest.approx(1 - x.mean() / x.max(), abs=1e-5)


@settings(deadline=None)
@given(lengths, st.lists(st.integers(0, 30), max_size=3))
def test_lengths_of_several_batches_are_those_of_one(values, cuts):
    """A percentile of percentiles would be none."""
    x = torch.tensor(values)
    pieces = x.tensor_split(sorted(min(c, len(values)) for c in cuts))
    stats = [{**length_stats(piece, piece > 9), **length_tail_stats(piece)} for piece in pieces]
    merged = stats[0]
    for one in stats[1:]:
        merged = merge(merged, one)

    assert read(merged) == pytest.approx(read({**length_stats(x, x > 9), **length_tail_stats(x)}), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "absent"),
    [
        ([], {"len/p50", "len/gini", "len/bubble", "len/tail_ratio", "len/max_over_mean", "len/mean"}),
        ([0, 0], {"len/gini", "len/bubble", "len/tail_ratio", "len/max_over_mean"}),
        ([0, 0, 5], {"len/tail_ratio"}),
    ],
)
def test_what_would_divide_by_nothing_is_not_measured(values, absent):
    """All empty, or none at all."""
    x = torch.tensor(values, dtype=torch.int64)

    got = read({**length_stats(x), **length_tail_stats(x)})

    assert absent.isdisjoint(got)
    assert set(got) | absent >= {"len/p50", "len/gini", "len/bubble", "len/tail_ratio", "len/max_over_mean", "len/mean"}


def test_equal_lengths_have_no_tail():
    """Nobody waits."""
    got = read(length_tail_stats(torch.full((7,), 64)))

    assert (got["len/tail_ratio"], got["len/max_over_mean"], got["len/bubble"]) == (1, 1, 0)
    assert got["len/gini"] == pytest.approx(0, abs=1e-6)


def test_what_was_cut_is_distinguished_from_what_ended():
    """And where all were cut, none terminated: there is no mean of them."""
    x = torch.tensor([10, 20, 512, 0])

    got = read(length_stats(x, torch.tensor([0, 0, 1, 0])))

    assert (got["len/clipped"], got["len/terminated_mean"], got["len/empty"]) == (0.25, 10.0, 0.25)
    assert "len/terminated_mean" not in read(length_stats(x, torch.ones(4)))
    assert "len/clipped" not in read(length_stats(x))


def batch(**fields):
    """Three responses of 1, 2 and 4 tokens and one that is hidden."""
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    return TokenBatch(logp=-torch.rand(4, 4), mask=mask, **fields)


def test_a_mask_alone_tells_no_lengths():
    """It may hide whole responses; who knows which were cut, knows that it does not."""
    assert {**observe_lengths(batch()), **observe_length_tail(batch())} == {}
    assert read(observe_lengths(batch(cut=torch.zeros(4))))["len/empty"] == 0.25
    assert read(observe_length_tail(batch(cut=torch.zeros(4))))["len/p50"] == 1.5


def test_longer_responses_may_be_less_certain():
    """Correlation of length and mean entropy over the responses that have tokens; padding counts for nothing."""
    entropy = torch.tensor([[1.0], [2.0], [4.0], [math.nan]]).expand(4, 4).clone()
    entropy[0, 1:] = math.nan

    assert read(observe_length_tail(batch(entropy=entropy)))["len/entropy_corr"] == pytest.approx(1.0)
    assert read(observe_length_tail(batch(entropy=-entropy)))["len/entropy_corr"] == pytest.approx(-1.0)
    assert "len/entropy_corr" not in read(observe_length_tail(batch(entropy=torch.ones(4, 4))))


def test_one_response_that_has_everything_is_as_unequal_as_can_be():
    """Gini tends to 1 - 1/n."""
    x = torch.tensor([0.0, 0.0, 0.0, 8.0])

    assert Gini.of(x, torch.ones(4)).value() == 0.75
    assert Gini.of(x, torch.tensor([0, 1, 0, 1])).value() == 0.5
