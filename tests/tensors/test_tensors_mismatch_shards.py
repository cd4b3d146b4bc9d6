"""The mismatch statistics of any split equal those of the whole, and no input of a trainer breaks them."""

import dataclasses
import itertools
import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import CountWaits

from rlwatch.metrics import BY_NAME
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.mismatch import observe_mismatch, observe_mismatch_detail
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
TENSORS = ("logp", "mask", "entropy", "advantages", "old_logp", "rollout_logp", "experts", "rollout_experts")


def batch(rows=6, width=9, *, seed=0, dtype=torch.float64, noise=0.5):
    """Everything is known; rows are of unequal length, one of them empty, and some tokens are not scored."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    old = -3 * draw(rows, width)
    rollout = old + noise * (draw(rows, width) - 0.5)
    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    mask = (torch.arange(width) < lengths.unsqueeze(1)) & (draw(rows, width) < 0.9)
    experts = lambda: torch.randint(0, 3, (rows, width, 2, 2), generator=g)  # noqa: E731
    return TokenBatch(
        logp=(old + 0.1).to(dtype),
        mask=mask,
        entropy=draw(rows, width).to(dtype),
        advantages=(draw(rows) - 0.5).to(dtype),
        old_logp=old.to(dtype),
        rollout_logp=rollout.masked_fill(draw(rows, width) < 0.05, math.nan).to(dtype),
        experts=experts(),
        rollout_experts=experts(),
        truncation=1.1,
    )


def part(whole, rows):
    return dataclasses.replace(whole, **{name: getattr(whole, name)[rows] for name in TENSORS})


def observed(b):
    return {**observe_mismatch(b), **observe_mismatch_detail(b)}


def numbers(stats):
    """name -> (count, value) of what was measured."""
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: (s.count.item(), s.value().item()) for name, s in settled.items() if s.count > 0}


def same(left, right, rel=1e-9):
    assert left.keys() == right.keys()
    for name, (count, value) in left.items():
        assert right[name] == (count, pytest.approx(value, rel=rel, abs=1e-10, nan_ok=True)), name


@settings(deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(0, 6), max_size=4))
def test_any_split_into_micro_batches_merges_to_the_whole(seed, cuts):
    """Parts may be empty or wholly masked; counts and values are those of one batch."""
    whole = batch(seed=seed)
    edges = [0, *sorted(cuts), 6]
    parts = [part(whole, slice(a, b)) for a, b in itertools.pairwise(edges)]

    same(numbers(reduce(merge, map(observed, parts))), numbers(observed(whole)))


def test_responses_in_another_order_or_place_change_nothing():
    """A rank may hold any of them, and padding may be longer."""
    whole = batch()
    turned = part(whole, torch.tensor([3, 1, 5, 0, 2, 4]))
    pad = {n: torch.nn.functional.pad(getattr(whole, n).float(), (0, 3)) for n in ("logp", "old_logp", "rollout_logp")}
    longer = dataclasses.replace(
        whole,
        **{name: x.double() for name, x in pad.items()},
        mask=torch.nn.functional.pad(whole.mask, (0, 3)),
        entropy=torch.nn.functional.pad(whole.entropy, (0, 3)),
        experts=torch.nn.functional.pad(whole.experts, (0, 0, 0, 0, 0, 3)),
        rollout_experts=torch.nn.functional.pad(whole.rollout_experts, (0, 0, 0, 0, 0, 3)),
    )

    same(numbers(observed(turned)), numbers(observed(whole)))
    same(numbers(observed(longer)), numbers(observed(whole)), rel=1e-4)


def test_every_name_is_in_the_table_and_within_its_range():
    """Also what only some batches hold."""
    for seed in range(5):
        for name, (_, value) in numbers(observed(batch(seed=seed))).items():
            row = BY_NAME[name]
            assert row.low is None or value >= row.low - 1e-9, name
            assert row.high is None or value <= row.high + 1e-9, name
    assert set(observed(batch())) <= set(BY_NAME)


@pytest.mark.parametrize(("rows", "width"), [(0, 9), (6, 0), (0, 0)])
def test_a_batch_without_tokens_measures_nothing_and_raises_nothing(rows, width):
    """No responses, or none with a token."""
    assert numbers(observed(batch(rows, width))) == {}


def test_a_wholly_masked_response_of_garbage_changes_nothing():
    """NaN, infinities and absurd experts in a row without a token."""
    whole = batch()
    junk = torch.tensor([[math.nan, math.inf, -math.inf] * 3], dtype=torch.float64)
    dirty = {n: torch.cat([getattr(whole, n), junk]) for n in ("logp", "old_logp", "rollout_logp", "entropy")} | {
        "advantages": torch.cat([whole.advantages, whole.advantages[:1]]),
        "mask": torch.cat([whole.mask, torch.zeros(1, 9).bool()]),
        "experts": torch.cat([whole.experts, torch.full((1, 9, 2, 2), -7)]),
        "rollout_experts": torch.cat([whole.rollout_experts, torch.full((1, 9, 2, 2), 10**6)]),
    }

    same(numbers(observed(dataclasses.replace(whole, **dirty))), numbers(observed(whole)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_gives_the_numbers_of_its_widened_values(dtype):
    """Nothing is computed, compared or summed in half precision."""
    half = batch(8, 60, dtype=dtype)
    wide = dataclasses.replace(
        half, **{n: getattr(half, n).float() for n in ("logp", "old_logp", "rollout_logp", "entropy", "advantages")}
    )

    assert {s.value().dtype for s in observed(half).values()} <= {torch.float32, torch.float64}
    same(numbers(observed(half)), numbers(observed(wide)), rel=1e-6)


def test_tensors_need_not_be_contiguous_nor_without_a_graph():
    """Views of a transposed tensor; log-probs that require a gradient, of which nothing is kept."""
    whole = batch()
    turned = {n: getattr(whole, n).mT.contiguous().mT for n in ("mask", "old_logp", "rollout_logp", "entropy")}
    odd = dataclasses.replace(whole, **turned, logp=whole.logp.mT.contiguous().mT.requires_grad_())

    stats = observed(odd)

    same(numbers(stats), numbers(observed(whole)))
    assert not any(stat.value().requires_grad for stat in stats.values())


def test_nothing_waits_for_a_device_nor_draws_a_random_number():
    """No scalar is read, no shape depends on data; neither when observed, merged nor settled."""
    whole = batch()
    with CountWaits() as count:
        stats = merge(observed(whole), observed(whole))
        [stat.settle().value() for stat in stats.values()]

    assert count.seen == []


def test_single_precision_of_a_long_batch_is_close_to_double():
    """20,000 tokens of ordinary rounding noise: four digits, where each statistic could lose them."""
    wide = batch(40, 500, noise=0.02)
    single = dataclasses.replace(
        wide, **{n: getattr(wide, n).float() for n in ("logp", "old_logp", "rollout_logp", "entropy", "advantages")}
    )

    for name, (count, value) in numbers(observed(wide)).items():
        loose = 2e-2 if name in {"mismatch/chi2", "mismatch/log_var_growth", "mismatch/adv_corr"} else 2e-3
        assert numbers(observed(single))[name] == (count, pytest.approx(value, rel=loose, abs=2e-6)), name
