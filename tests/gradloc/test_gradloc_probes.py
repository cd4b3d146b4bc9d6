"""Segments of a search, and probes of them: counted, summed over ranks, the same with sharded parameters."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tiny_step import LOSSES, outputs, policy, rollouts, take_step
from torch.distributed.fsdp import fully_shard

from rlwatch.gradloc.attribution import METHODS, attribute
from rlwatch.gradloc.bisection import BudgetSpent, Probes, TokenSet, follow_larger
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.distributed import Alone
from rlwatch.gradloc.passes import beside_training


def token(index, *, microbatch=0, rank=0):
    return TokenSet(microbatch, range(rank, rank + 1), range(index, index + 1), 1)


@pytest.fixture(scope="module")
def step():
    """A model, and its step in two micro-batches."""
    model = policy()
    return model, take_step(model, rollouts(model, batch=4, length=8), micro_batches=2)


@given(st.integers(2, 500))
def test_halves_part_a_segment(n):
    """Nothing is lost, nothing is in both, and they differ by one token at most."""
    probes = Probes.__new__(Probes)
    left, right = probes.halves(TokenSet(0, range(1), None, n))

    assert [*left.tokens, *right.tokens] == list(range(n))
    assert abs(left.count - right.count) <= 1


def test_a_token_is_held_by_its_own_segments():
    """By those of its micro-batch, its rank and its stretch."""
    every = TokenSet(0, range(4), None, 100)

    assert every.holds(token(7, rank=3))
    assert not every.holds(token(7, microbatch=1))
    assert not TokenSet(0, range(2), None, 50).holds(token(7, rank=3))
    assert TokenSet(0, range(1), range(7, 9), 2).holds(token(7))
    assert not TokenSet(0, range(1), range(8, 9), 1).holds(token(7))
    assert TokenSet(0, range(1), None, 1).first == 0


def test_what_is_not_a_number_is_largest():
    """NaN cannot be compared, and must not lose."""
    assert TokenSet(0, range(1), None, 1, float("nan")).size > 1e300


def test_the_norm_of_everything_is_that_of_the_step(step):
    """Micro-batches together are the gradient; the squares of orthogonal parts would add up, these need not."""
    model, passes = step
    probes = Probes(model, passes, 10, Alone())
    grads = {id(p): p.grad.clone() for p in model.parameters()}
    with beside_training(model):
        norms = probes.norms(probes.microbatches())

    for segment, one in zip(norms, passes.all, strict=True):
        model.zero_grad()
        (one.forward().logp * one.coefficient()).sum().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert segment.norm == pytest.approx(float(norm), rel=1e-4)
        assert segment.count == int(one.tokens.mask.sum())
    for p in model.parameters():
        p.grad = grads[id(p)]


def test_probes_that_the_budget_does_not_cover_are_not_made(step):
    """None of them, and none is counted."""
    model, passes = step
    probes = Probes(model, passes, 1, Alone())

    with pytest.raises(BudgetSpent):
        probes.norms(probes.microbatches())
    assert probes.trace == []


def test_what_is_left_out_has_no_norm(step):
    """A token that was found is not found again."""
    model, passes = step
    probes = Probes(model, passes, 10, Alone())
    with beside_training(model):
        (before,) = probes.norms([token(3)])
        probes.leave_out(before)
        (after,) = probes.norms([token(3)])

    assert before.norm > 0
    assert after.norm == 0
    (at,) = probes.tokens([before])
    assert passes.all[0].tokens.mask[at.row, : at.position].sum() + passes.all[0].tokens.mask[: at.row].sum() == 3


@pytest.fixture
def sharded():
    """A model in FSDP2's shards, on one process."""
    model = policy()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield fully_shard(model)
    finally:
        dist.destroy_process_group()


def test_gradients_are_those_of_the_shards_where_weights_are_gathered(sharded):
    """An evaluation between backward and step leaves whole weights behind, which have none."""
    batch = rollouts(sharded, batch=4, length=8)
    take_step(sharded, batch)
    before = [p.grad.full_tensor().clone() for p in sharded.parameters()]
    with torch.no_grad():
        outputs(sharded, batch.ids, batch.prompt)

    with beside_training(sharded):
        sharded.reshard()
        for parameter in sharded.parameters():
            parameter.grad = None
        outputs(sharded, batch.ids, batch.prompt).logp.sum().backward()

    after = [p.grad.full_tensor() for p in sharded.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_sharded_parameters_are_attributed_alike(sharded):
    """The same contributions, by each method."""
    whole = policy()
    batch = rollouts(whole, batch=4, length=8)
    for method in METHODS:
        expected = attribute(whole, (passes := take_step(whole, batch)), Direction.of(whole), methods=[method])
        passes = take_step(sharded, batch)
        with torch.no_grad():
            outputs(sharded, batch.ids, batch.prompt)
        found = attribute(sharded, passes, Direction.of(sharded), methods=[method])
        assert found.complete
        scale = float(expected.contributions[0].abs().max())
        torch.testing.assert_close(found.contributions[0], expected.contributions[0], rtol=0, atol=1e-3 * scale)


def test_sharded_parameters_are_searched_alike(sharded):
    """FSDP2 on one process: the same tokens, the same norms, at the same price."""
    model = policy()
    batch = rollouts(model, batch=4, length=8)
    whole = follow_larger(model, take_step(model, batch, LOSSES["dapo_entropy"]), culprits=3)
    found = follow_larger(sharded, take_step(sharded, batch, LOSSES["dapo_entropy"]), culprits=3)

    assert [hit.at for hit in found.hits] == [hit.at for hit in whole.hits]
    assert [hit.norm for hit in found.hits] == pytest.approx([hit.norm for hit in whole.hits], rel=1e-5)
    assert found.probes == whole.probes
