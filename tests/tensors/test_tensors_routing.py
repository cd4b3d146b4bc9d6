"""Tokens of a mixture of experts that trainer and rollout engine sent to different experts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.mismatch import differing_layers, observe_mismatch_detail, recorded, routing_stats
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
OURS = torch.tensor([[[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[7, 7], [7, 7]]]])
THEIRS = torch.tensor([[[[1, 0], [3, 2]], [[0, 1], [2, 4]], [[5, 1], [2, 4]], [[-1, -1], [-1, -1]]]])
MASK = torch.ones(1, 4)


def values(stats):
    return {name.removeprefix("mismatch/routing_"): stat.value().item() for name, stat in stats.items()}


def random_batch(seed, rows=4, width=5, layers=3, k=2):
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(0, 3, (rows, width, layers, k), generator=g)  # noqa: E731
    return draw(), draw(), torch.rand(rows, width, generator=g) < 0.8


def test_sets_of_experts_are_compared_and_not_their_order():
    """Three recorded tokens: none, one and both of two layers differ."""
    assert differing_layers(OURS, THEIRS).tolist() == [[0, 1, 2, 2]]
    assert values(routing_stats(OURS, THEIRS, MASK)) == pytest.approx(
        {"layer_frac": 3 / 6, "token_frac": 2 / 3, "layers": 1.0}
    )


@pytest.mark.parametrize("filler", [-1, 0, 3])
def test_the_last_token_of_a_response_has_no_routing_whatever_its_slot_holds(filler):
    """It was sampled but never fed back. verl fills zeros, which would read as a route to expert 0."""
    theirs = THEIRS.clone()
    theirs[0, 3] = filler

    assert routing_stats(OURS, theirs, MASK)["mismatch/routing_token_frac"].count == 3
    assert values(routing_stats(OURS, theirs, MASK)) == values(routing_stats(OURS, THEIRS, MASK))


def test_the_last_token_is_that_of_the_mask():
    """Padding after it, tool output before it: each response loses one token."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
    known = torch.zeros(4, 5, 1, 1, dtype=torch.int64)

    assert recorded(known, known, mask).int().tolist() == [[1, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0] * 5, [0] * 5]


def test_a_negative_expert_on_either_side_is_no_record():
    """In any layer: the token cannot be compared as a whole."""
    ours = torch.zeros(1, 4, 2, 1, dtype=torch.int64)
    theirs = ours.clone()
    ours[0, 0, 1], theirs[0, 1, 0] = -1, -1

    assert recorded(ours, theirs, MASK).tolist() == [[False, False, True, False]]


def test_the_gap_of_the_tokens_that_moved_is_distinguished():
    """Tokens 1 and 2 moved; token 2 the engine could not score."""
    rollout = torch.tensor([[-1.0, -2.0, math.nan, -1.0]])
    batch = TokenBatch(
        logp=torch.full((1, 4), -1.0), mask=MASK, rollout_logp=rollout, experts=OURS, rollout_experts=THEIRS
    )

    assert observe_mismatch_detail(batch)["mismatch/routing_absdiff"].value() == 1.0
    assert observe_mismatch_detail(batch)["mismatch/routing_absdiff"].count == 1


def test_routing_needs_both_records_but_no_log_probs():
    """One engine's routing alone is nothing to compare."""
    alone = TokenBatch(logp=torch.zeros(1, 4), mask=MASK, experts=OURS)
    both = TokenBatch(logp=torch.zeros(1, 4), mask=MASK, experts=OURS, rollout_experts=THEIRS)

    assert observe_mismatch_detail(alone) == {}
    assert set(values(observe_mismatch_detail(both))) == {"layer_frac", "token_frac", "layers"}


@pytest.mark.parametrize("shape", [(1, 4, 3, 2), (1, 4, 2, 3), (1, 4, 2), (2, 4, 2, 2)])
def test_records_of_another_shape_are_not_compared(shape):
    """Other layers or another k: nothing, rather than a wrong number or an exception."""
    assert routing_stats(OURS, torch.zeros(shape, dtype=torch.int64), MASK) == {}


def test_records_on_another_device_are_not_fetched():
    """A copy would make the training thread wait."""
    assert routing_stats(OURS, THEIRS.to("meta"), MASK) == {}
    assert routing_stats(OURS.to("meta"), THEIRS.to("meta"), MASK) == {}


@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (2, 0, 2, 2)])
def test_nothing_recorded_is_nothing_measured(shape):
    """No responses, or none with a token; a model without a single such layer."""
    empty = torch.zeros(shape, dtype=torch.int64)

    stats = routing_stats(empty, empty, torch.ones(shape[:2]))

    assert {stat.count.item() for stat in stats.values()} == {0}
    assert routing_stats(torch.zeros(1, 4, 0, 2), torch.zeros(1, 4, 0, 2), MASK) == {}


@given(st.integers(0, 50), st.integers(0, 4))
def test_any_split_into_micro_batches_merges_to_the_whole(seed, cut):
    """Also where one part holds no response; against sets in Python."""
    ours, theirs, mask = random_batch(seed)
    parts = [routing_stats(ours[part], theirs[part], mask[part]) for part in (slice(0, cut), slice(cut, None))]
    whole = routing_stats(ours, theirs, mask)

    merged = merge(*parts)

    assert values(merged) == pytest.approx(values(whole), nan_ok=True)
    for b, t in torch.cartesian_prod(torch.arange(4), torch.arange(5)).tolist():
        pairs = zip(ours[b, t].sort(-1).values.tolist(), theirs[b, t].sort(-1).values.tolist(), strict=True)
        assert differing_layers(ours, theirs)[b, t] == sum(x != y for x, y in pairs)


def test_the_share_of_layers_is_of_all_layers():
    """Three layers of two experts each: it is the mean number of layers that differ over 3."""
    got = values(routing_stats(*random_batch(3)))

    assert got["layer_frac"] == pytest.approx(got["layers"] / 3)
    assert got["layer_frac"] > 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_may_be_of_any_integer_type(dtype):
    """Engines ship them small."""
    ours, theirs, mask = random_batch(3)

    assert values(routing_stats(ours.to(dtype), theirs.to(dtype), mask)) == values(routing_stats(ours, theirs, mask))
