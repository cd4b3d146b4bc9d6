"""Statistics taken apart, sent and put together again merge as if they had never left."""

import json
import logging
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlwatch.tensors.masked import masked_quantile
from rlwatch.tensors.mergeable import (
    Ess,
    Latest,
    Max,
    Mean,
    Min,
    Quantile,
    RankMean,
    Stat,
    Std,
    Total,
    _quantile_of_repeated,
    merge,
    merge_ranks,
)
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import Transfer, pack, unpack

pytestmark = pytest.mark.torch


def shipped(stats):
    """Through the copy to the CPU and the description as JSON text."""
    layout, tensors = pack(stats)
    return unpack(json.loads(json.dumps(layout)), Transfer(tensors).read())


def values(stats):
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def batch(rows, tokens=6, seed=0):
    g = torch.Generator().manual_seed(seed)

    def logp(scale=1.0):
        return -scale * torch.rand(rows, tokens, generator=g)

    lengths = torch.randint(0, tokens + 1, (rows, 1), generator=g)
    old = logp()
    return TokenBatch(
        logp=old + 0.1 * logp(),
        mask=torch.arange(tokens) < lengths,
        entropy=torch.rand(rows, tokens, generator=g),
        ids=torch.randint(0, 9, (rows, tokens), generator=g),
        advantages=torch.randn(rows, generator=g),
        old_logp=old,
        ref_logp=logp(),
        rollout_logp=old + 0.05 * torch.randn(rows, tokens, generator=g),
        clip=(0.2, 0.28),
        cut=torch.rand(rows, generator=g) < 0.3,
    )


def rows_of(whole, start, end):
    """Some rows of a batch, as a rank gets them."""
    parts = {}
    for name in whole.__dataclass_fields__:
        value = getattr(whole, name)
        parts[name] = value[start:end] if isinstance(value, Tensor) else value
    return TokenBatch(**parts)


def nothing_lost(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(0, 10))
def test_shards_sent_to_rank_0_tell_the_same_as_the_whole_batch(cuts, seed):
    """Every statistic of observe(), over 1 to 4 ranks of unequal and of empty shards."""
    whole = batch(9, seed=seed)
    ends = [*sorted(cuts), 9]
    shards = [rows_of(whole, start, end) for start, end in zip([0, *ends], ends, strict=False)]

    together = {}
    for shard in shards:
        together = merge_ranks(together, shipped(observe(shard)))

    nothing_lost(values(together), values(observe(whole)))


def test_counts_extremes_and_quantiles_come_through_bit_for_bit():
    """What is picked from the values is not rounded by the journey."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    every = torch.ones_like(x, dtype=torch.bool)
    stats = {"max": Max.of(x, every), "min": Min.of(x, every), "p0": Quantile.of(x, every, 0.0)}

    arrived = shipped(stats)

    assert {name: stat.value().item() for name, stat in arrived.items()} == {
        "max": x.max().item(),
        "min": x.min().item(),
        "p0": x.min().item(),
    }
    assert all(stat.count == 1000 for stat in arrived.values())


def test_sums_continue_in_double_precision():
    """2^24 + 1 is no float32: many ranks must not round what each counted exactly."""
    one, many = torch.tensor(1.0), torch.tensor(2.0**24)
    together = merge_ranks(shipped({"n": Total(many, many)}), shipped({"n": Total(one, one)}))

    assert together["n"].value().item() == 2**24 + 1
    assert together["n"].count.item() == 2**24 + 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
def test_oddities_stay_what_they_are(value):
    """NaN, infinities and nothing are four things, on every rank."""
    x = torch.tensor([value, 1.0])
    stats = {"mean": Mean.of(x, torch.ones(2)), "nothing": Mean.of(x, torch.zeros(2))}

    arrived = shipped(stats)

    assert values(arrived).keys() == {"mean"}
    assert arrived["mean"].value().item() == pytest.approx(x.mean().item(), nan_ok=True)


def test_whole_numbers_and_truths_keep_their_type():
    """A mask is a mask again, an id an integer."""

    arrived = shipped({"q": Quantile.of(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]), 1.0)})

    assert arrived["q"].masks[0].dtype == torch.bool
    assert arrived["q"].value() == 2.0


def test_a_tensor_that_several_statistics_share_is_sent_once():
    """Three statistics of the same tokens cost one copy."""
    x, every = torch.randn(10), torch.ones(10, dtype=torch.bool)
    first = Quantile.of(x, every, 0.5)
    stats = {f"q{i}": Quantile(first.count, i / 10, first.values, first.masks) for i in range(5)}

    _, tensors = pack(stats)

    assert len(tensors) == 3  # the count, the values, the mask


@dataclass(frozen=True, slots=True)
class Odd(Total):
    notes: dict


def test_a_statistic_that_cannot_be_sent_is_left_out_and_named(caplog):
    """One odd statistic must not cost the step."""
    one = torch.tensor(1.0)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        arrived = shipped({"odd": Odd(one, one, {}), "fine": Total(one, one)})

    assert list(arrived) == ["fine"]
    assert "odd cannot be sent to rank 0: it holds a dict" in caplog.text


@pytest.mark.parametrize(
    "kind", ["json:JSONDecoder", "rlwatch.tensors.mergeable:nothing", "rlwatch.tensors.mergeable:", "os:system"]
)
def test_only_statistics_are_rebuilt(kind):
    """A description cannot call anything else."""
    with pytest.raises(ValueError, match="is no statistic"):
        unpack({"x": {"stat": kind, "fields": {}}}, [])
    with pytest.raises(ValueError, match="x is no statistic"):
        unpack({"x": {"constant": 1}}, [])


def test_nothing_travels_as_nothing():
    """A rank without a batch sends no statistics."""
    assert shipped({}) == {}


def test_what_all_ranks_measured_alike_is_reported_by_the_lowest_that_did():
    """A learning rate is not summed over ranks."""
    one, none = torch.tensor(1.0), torch.tensor(0.0)
    first = {"lr": Latest(none, torch.tensor(9.0)), "beta": Latest(one, torch.tensor(0.1))}
    second = {"lr": Latest(one, torch.tensor(3.0)), "beta": Latest(one, torch.tensor(0.2))}

    assert values(merge_ranks(first, second)) == {"lr": 3.0, "beta": pytest.approx(0.1)}


def test_a_loss_is_summed_over_micro_batches_and_averaged_over_ranks():
    """As data-parallel training averages the gradients."""

    def rank(*losses):
        stats = {}
        for loss in losses:
            stats = merge(stats, {"loss": RankMean.of(torch.tensor(loss), torch.tensor(True))})
        return stats

    together = merge_ranks(merge_ranks(rank(1.0, 2.0), rank(5.0, 0.0)), rank(1.0, 0.0))

    assert together["loss"].value() == pytest.approx((3.0 + 5.0 + 1.0) / 3)
    assert rank(1.0, 2.0)["loss"].value() == 3.0


def test_ranks_that_measure_differently_leave_the_first_one_alone():
    """Not a wrong number, and no error."""
    one = torch.tensor(1.0)
    together = merge_ranks({"x": Max(one, one)}, {"x": Min(one, 0 * one), "y": Total(one, one)})

    assert values(together) == {"x": 1.0, "y": 1.0}


finite = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, min_size=1, max_size=200), st.integers(1, 60), st.floats(0, 1), st.integers(0, 50))
def test_a_thinned_quantile_is_exact_for_a_quantile_near_by(numbers, most, q, padding):
    """Within every / n of the one asked for, as promised."""
    x = torch.tensor([*numbers, *[5e3] * padding])
    mask = torch.arange(len(x)) < len(numbers)
    thin = Quantile.of(x, mask, q).compact(most)
    slack = thin.every[0] / len(numbers)

    low, high = (np.quantile(np.float32(numbers), np.clip(q + d, 0, 1)) for d in (-slack, slack))

    assert len(thin.values[0]) <= max(most, 1)
    assert low - 1e-3 <= thin.value().item() <= high + 1e-3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(finite, st.integers(0, 4)), min_size=1, max_size=40), st.floats(0, 1))
def test_values_that_stand_for_several_count_as_often(rows, q):
    """The same quantile as of the values written out."""
    numbers, times = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    written_out = numbers.repeat_interleave(times.long())

    got = _quantile_of_repeated(numbers, times, q)

    expected = masked_quantile(written_out, torch.ones_like(written_out), q)
    assert got.item() == pytest.approx(expected.item(), nan_ok=True)


def test_few_values_are_sent_as_they_are():
    """Exact, as long as they fit."""
    exact = Quantile.of(torch.arange(10.0), torch.ones(10), 0.5)

    assert exact.compact(10) is exact


def test_ranks_of_unequal_size_weigh_what_they_hold():
    """A rank whose values were thinned by four still counts four times as much as one of a quarter of its size."""
    thin = Quantile.of(torch.zeros(4000), torch.ones(4000), 0.5).compact(1000)
    rest = Quantile.of(torch.ones(1000), torch.ones(1000), 0.5)

    share_of_ones = [q for q in (0.79, 0.81) if Quantile.value(_at(thin.merge(rest), q)) == 1]

    assert share_of_ones == [0.81]


def _at(quantile, q):
    return Quantile(quantile.count, q, quantile.values, quantile.masks, quantile.every)


def test_a_nan_survives_thinning():
    """A quantile of values with a NaN is NaN."""
    x = torch.zeros(100)
    x[7] = math.nan

    assert Quantile.of(x, torch.ones(100), 0.1).compact(10).value().isnan()
    assert Quantile.of(x, torch.arange(100) > 7, 0.1).compact(10).value() == 0


def test_a_rank_without_any_value_thins_to_nothing():
    """An empty mask stays an empty mask."""
    thin = Quantile.of(torch.ones(100), torch.zeros(100), 0.5).compact(10)
    full = Quantile.of(torch.full((3,), 2.0), torch.ones(3), 0.5)

    assert thin.value().isnan()
    assert thin.merge(full).value() == 2


def kinds(kind=Stat):
    for each in kind.__subclasses__():
        yield each
        yield from kinds(each)


def test_every_kind_of_statistic_there_is_can_be_found_again():
    """By the name under which it is sent."""
    observe(batch(2))
    named = {k for k in kinds() if k.__module__.startswith("rlwatch.") and "." not in k.__qualname__}

    assert {Ess, Std, Quantile, Mean} <= named
    for kind in named:
        module = __import__(kind.__module__, fromlist=["x"])
        assert issubclass(getattr(module, kind.__qualname__), Stat)
