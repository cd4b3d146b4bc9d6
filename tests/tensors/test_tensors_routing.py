"""Tokens of a mixture of experts that trainer and rollout engine sent to different experts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.mismatch import differing_layers, load_stats, observe_mismatch_detail, recorded, routing_stats
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

    assert not [name for name in observe_mismatch_detail(alone) if "routing" in name]
    compared = {name: stat for name, stat in observe_mismatch_detail(both).items() if "routing" in name}
    assert set(values(compared)) == {"layer_frac", "token_frac", "layers"}


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


def brute_force(experts, mask):
    """(mean, busiest, worst) violation: load * experts - 1, by counting."""
    kept = [experts[b, t] for b, t in torch.nonzero(recorded(experts, experts, mask)).tolist()]
    number, layers = int(max(one.max() for one in kept)) + 1, experts.shape[2]
    vio = []
    for layer in range(layers):
        counts = [sum(int((one[layer] == expert).sum()) for one in kept) for expert in range(number)]
        vio.append([count / sum(counts) * number - 1 for count in counts])
    every = [value for layer in vio for value in layer]
    return sum(map(abs, every)) / len(every), sum(map(max, vio)) / layers, max(every)


@pytest.mark.parametrize("seed", range(4))
def test_the_imbalance_of_the_router_is_that_of_its_definition_in_one_batch_or_in_two(seed):
    """load * experts - 1: mean of its sizes, of the busiest expert by layer, of the busiest of all."""
    experts, _, mask = random_batch(seed, rows=6, layers=3)
    expected = pytest.approx(brute_force(experts, mask))
    whole = load_stats(experts, mask)
    halves = merge(load_stats(experts[:3], mask[:3]), load_stats(experts[3:], mask[3:]))

    for stats in (whole, halves):
        assert [stats[f"mismatch/moe_{name}_vio"].value().item() for name in ("avg", "max", "worst")] == expected


def test_equal_loads_are_no_violation_and_one_expert_for_all_is_the_largest():
    """Known values; a router with too many experts to be counted reports nothing."""
    mask = torch.ones(1, 5)
    even = torch.tensor([0, 1, 2, 3, 0])[None, :, None, None]
    alone = torch.where(torch.arange(5) == 3, 3, 0)[None, :, None, None]

    assert [stat.value().item() for stat in load_stats(even, mask).values()] == [0.0, 0.0, 0.0]
    assert [stat.value().item() for stat in load_stats(alone, mask).values()] == [1.0, 2.0, 2.0]
    assert load_stats(even + 4096, mask)["mismatch/moe_avg_vio"].count == 0


def test_experts_alone_are_enough_for_the_imbalance():
    """Those of the rollout engine where the trainer's are not known."""
    logp, routes = -torch.ones(1, 4), OURS
    for routing in ({"experts": routes}, {"rollout_experts": routes}):
        got = observe_mismatch_detail(TokenBatch(logp, MASK, **routing))
        assert {name for name in got if "moe" in name} == {
            f"mismatch/moe_{name}_vio" for name in ("avg", "max", "worst")
        }
