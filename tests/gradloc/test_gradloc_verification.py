"""Own gradients of tokens: exact, in the step's unit, and taken without training noticing."""

import math

import pytest
import torch
import torch.distributed as dist
from tiny_step import LOSSES, dapo, outputs, plant, policy, rollouts, take_step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rlwatch.gradloc.passes import Outputs
from rlwatch.gradloc.report import TokenAt
from rlwatch.gradloc.verification import top_tokens, union_candidates, verify
from rlwatch.tensors.gradnorm import layer_of


def places(passes, every=1):
    """All tokens inside the masks, or each ``every``-th."""
    found = [TokenAt(0, m, *at) for m, one in enumerate(passes.all) for at in one.tokens.mask.nonzero().tolist()]
    return found[::every]


def by_hand(model, one, at):
    """Squares by layer of the token's own gradient: a backward through the whole micro-batch with all else zero."""
    one.random.restore()
    out, alone = one.forward(), torch.zeros(one.shape)
    alone[at.row, at.position] = 1
    loss = sum((part * one.coefficient(name) * alone).sum() for name, part in out.parts().items())
    squares = {}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for (name, _), g in zip(named, torch.autograd.grad(loss, [p for _, p in named], allow_unused=True), strict=True):
        square = 0.0 if g is None else float(g.double().square().sum())
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + square
    return squares


def assert_right(model, passes, found):
    for at, own in found.items():
        squares = by_hand(model, passes.all[at.microbatch], at)
        total = sum(squares.values())
        assert own.norm == pytest.approx(math.sqrt(total), rel=1e-4)
        if total == 0:  # clipped
            assert own.layers == {}
            continue
        assert own.layers == pytest.approx({layer: s / total for layer, s in squares.items()}, abs=1e-5)
        assert sum(own.layers.values()) == pytest.approx(1.0)


def frozen_bits(model):
    """All that training holds."""
    every = [*model.parameters(), *model.buffers()]
    grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()]
    return [t.detach().clone() for t in every], grads, torch.get_rng_state(), [m.training for m in model.modules()]


def assert_same(before, after):
    for ours, theirs in zip(before[0], after[0], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(before[1], after[1], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours[0] == theirs[0] and torch.equal(ours[1], theirs[1]))
    assert torch.equal(before[2], after[2])
    assert before[3] == after[3]


@pytest.mark.parametrize("name", LOSSES)
def test_own_gradients_are_those_of_the_token_alone(name):
    """For every loss, entropy bonus included, over micro-batches: norm and layer shares."""
    model = policy()
    passes = take_step(model, rollouts(model), LOSSES[name], micro_batches=3)
    tokens = places(passes, every=17)

    found = verify(model, passes, tokens)

    assert list(found) == tokens
    assert_right(model, passes, found)


def test_dropout_is_the_one_the_step_had():
    """A sequence alone would draw other numbers: the whole micro-batch runs, from the state it began with."""
    model = policy(dropout=0.3)
    passes = take_step(model, rollouts(model), micro_batches=2)

    assert_right(model, passes, verify(model, passes, places(passes, every=25)))


def test_gradient_checkpointing_changes_nothing():
    """Several tokens share one forward although its activations are recomputed for each."""
    model = policy()
    passes = take_step(model, rollouts(model))
    tokens = places(passes)[:5]
    plain = verify(model, passes, tokens)
    model.gradient_checkpointing_enable()

    again = verify(model, passes, tokens)

    assert [own.norm for own in again.values()] == pytest.approx([own.norm for own in plain.values()], rel=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_does_not_notice(dropout):
    """Parameters, gradients (the same objects), buffers, random state and modes, bit for bit."""
    model = policy(dropout=dropout)
    passes = take_step(model, rollouts(model))
    model.get_parameter("model.layers.0.mlp.up_proj.weight").grad = None
    before = frozen_bits(model)

    verify(model, passes, places(passes, every=40))

    assert_same(before, frozen_bits(model))


def test_one_forward_for_each_sequence_with_candidates():
    """Of that sequence only."""
    model = policy()
    asked = []

    def forward(model, ids, prompt):
        asked.append(len(ids))
        return outputs(model, ids, prompt)

    passes = take_step(model, rollouts(model, batch=4), forward=forward)
    asked.clear()
    tokens = [TokenAt(0, 0, 2, 1), TokenAt(0, 0, 0, 3), TokenAt(0, 0, 2, 5), TokenAt(0, 0, 2, 1)]

    assert list(verify(model, passes, tokens)) == [tokens[0], tokens[1], tokens[2]]
    assert asked == [1, 1]


def test_only_what_trains_counts():
    """Frozen layers have no share, and no gradient is taken of them."""
    model = policy()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    passes = take_step(model, rollouts(model))

    found = verify(model, passes, places(passes, every=60))

    assert_right(model, passes, found)
    assert {layer for own in found.values() for layer in own.layers} == {"model.layers.1", "model.norm"}


def test_a_token_the_loss_left_out_has_no_gradient():
    """Norm 0, and no shares of nothing."""
    model = policy()
    batch = rollouts(model, varied=False)
    batch.advantages[1] = 0.0
    at = TokenAt(0, 0, 1, 3)

    own = verify(model, take_step(model, batch), [at])[at]

    assert own.norm == 0.0
    assert own.layers == {}


def test_a_coefficient_that_is_no_number_spoils_its_own_token_only():
    """NaN is said as NaN, and its neighbours are verified."""
    model = policy()
    passes = take_step(model, rollouts(model))
    passes.all[0].coefficient()[0, 2] = float("nan")

    found = verify(model, passes, [TokenAt(0, 0, 0, 2), TokenAt(0, 0, 0, 3)])
    bad, good = found.values()

    assert math.isnan(bad.norm)
    assert bad.layers == {}
    assert good.norm > 0
    assert math.isfinite(good.norm)


FAILURES = [MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory. Tried..."), TypeError("no rows")]


@pytest.mark.parametrize("error", FAILURES)
def test_out_of_memory_is_said_and_the_others_are_verified(error):
    """One sequence is too long: its candidates are absent, with the reason; nothing raises, nothing is left behind."""
    model = policy()
    batch = rollouts(model, batch=4)
    passes = take_step(model, batch)
    one = passes.all[0]
    forward = one.forward

    def limited(rows=None):
        if list(rows) == [1]:
            torch.rand(3)
            raise error
        return forward(rows)

    one.forward = limited
    before, notes = frozen_bits(model), []

    found = verify(model, passes, [TokenAt(0, 0, row, t) for row in range(3) for t in (0, 1)], notes=notes)

    assert {at.row for at in found} == {0, 2}
    assert notes == [f"2 tokens not verified because {type(error).__name__}: {error}"]
    assert_same(before, frozen_bits(model))


def test_buffers_that_a_forward_writes_come_back():
    """As batch norm's running mean, or a counter that is replaced."""
    model, mean = nn.Linear(3, 3), torch.zeros(3)
    model.register_buffer("mean", mean)
    model.register_buffer("calls", torch.tensor(0))

    def forward(rows=None):
        x = torch.arange(12.0).view(4, 3)[[0, 1, 2, 3] if rows is None else list(rows)]
        model.mean += 1.0
        model.calls = model.calls + 1
        return Outputs(model(x).log_softmax(-1))

    passes = take_step_of(forward)
    calls = model.calls

    assert len(verify(model, passes, [TokenAt(0, 0, 1, 2)])) == 1
    assert model.mean is mean
    assert torch.equal(mean, torch.ones(3))
    assert model.calls is calls


def take_step_of(forward):
    """Any forward without a model of language: 4 sequences of 3 tokens."""
    from rlwatch.gradloc.passes import RandomState, RecordedPasses
    from rlwatch.tensors.tokens import TokenBatch

    out, passes = forward(), RecordedPasses()
    passes.add(
        forward, out, TokenBatch(out.logp.detach(), torch.ones(4, 3, dtype=torch.bool)), random=RandomState.now()
    )
    out.logp.square().sum().backward()
    return passes


def test_bfloat16_norms_are_those_of_float32_up_to_its_rounding():
    """8 bits an element: a per cent or two of the norm."""
    half, full = policy().bfloat16(), policy()
    full.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    batch = rollouts(full)
    passes = take_step(full, batch)
    tokens = places(passes, every=30)
    exact = verify(full, passes, tokens)

    rounded = verify(half, take_step(half, batch), tokens)

    assert [own.norm for own in rounded.values()] == pytest.approx([own.norm for own in exact.values()], rel=0.05)


class Half:
    """The first of two ranks; the other one has what ``theirs`` says, and nothing to add."""

    size, rank = 2, 0

    def __init__(self, theirs=None):
        self.theirs = theirs

    def sum(self, values):
        return values

    def gather(self, values):
        return [values, torch.full_like(values, -1.0) if self.theirs is None else self.theirs(values)]


def test_gradients_are_means_over_ranks():
    """Of two ranks, a token has half the norm; the other rank's tokens are its business."""
    model = policy()
    passes = take_step(model, rollouts(model))
    ours, theirs = TokenAt(0, 0, 1, 1), TokenAt(1, 0, 1, 1)
    notes = []

    alone, shared = verify(model, passes, [ours]), verify(model, passes, [ours, theirs], world=Half(), notes=notes)

    assert shared[ours].norm == pytest.approx(alone[ours].norm / 2)
    assert theirs not in shared
    assert notes == ["1 token of 2 not verified: another rank could not"]


@pytest.fixture
def one_process():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_does_not_notice(one_process):
    """Even if forwards run through its wrapper: names and figures are the model's, and the next step works."""
    model, wrapped = policy(), DistributedDataParallel(policy())
    batch = rollouts(model)
    passes = take_step(model, batch)
    expected = verify(model, passes, places(passes)[:3])
    passes = take_step(wrapped, batch)

    found = verify(wrapped, passes, list(expected))

    for own, other in zip(found.values(), expected.values(), strict=True):
        assert own.layers == pytest.approx(other.layers, abs=1e-5)
    before = [p.grad.clone() for p in wrapped.parameters()]
    take_step(wrapped, batch)
    assert all(torch.equal(p.grad, g) for p, g in zip(wrapped.parameters(), before, strict=True))


def test_compiled_code_is_not_compiled_anew():
    """A single sequence has another shape: the model runs as it is written."""
    model = policy()
    passes = take_step(model, rollouts(model))
    ran, compiled = [], []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph

    step = torch.compile(lambda x: ran.append(1) or x * 1.0, backend=backend)
    forward = passes.all[0].forward
    passes.all[0].forward = lambda rows=None: Outputs(step(forward(rows).logp))

    assert len(verify(model, passes, places(passes)[:2])) == 2
    assert ran == [1]
    assert compiled == []


def test_sharded_parameters_have_the_same_gradients(one_process):
    """FSDP2 on one process: the backward goes through .grad, which is as before afterwards."""
    model = policy()
    batch = rollouts(model)
    passes = take_step(model, batch, LOSSES["dapo_entropy"], micro_batches=2)
    tokens = places(passes, every=30)
    expected = verify(model, passes, tokens)
    sharded = policy()
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    passes = take_step(sharded, batch, LOSSES["dapo_entropy"], micro_batches=2)
    before = [(p.grad, p.grad.to_local().clone()) for p in sharded.parameters()]

    found = verify(sharded, passes, tokens)

    for p, (grad, content) in zip(sharded.parameters(), before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad.to_local(), content)
    assert [own.norm for own in found.values()] == pytest.approx([own.norm for own in expected.values()], rel=1e-5)
    for own, other in zip(found.values(), expected.values(), strict=True):
        assert own.layers == pytest.approx(other.layers, abs=1e-5)


def test_planted_culprits_have_the_largest_own_gradients():
    """What verification is for."""
    model = policy()
    batch, planted = plant(rollouts(model), "advantage", 3, 1e4)
    passes = take_step(model, batch, dapo, micro_batches=2)

    found = verify(model, passes, places(passes))
    worst = sorted(found, key=lambda at: -found[at].norm)[:3]

    assert {(passes.all[at.microbatch].first_row + at.row, at.position) for at in worst} == set(planted)


@pytest.fixture
def four_tokens():
    """One micro-batch of two sequences of two tokens, all in the mask but the last."""
    passes = take_step_of(lambda rows=None: Outputs(torch.zeros(4, 3, requires_grad=True) * 1.0))
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[0, 0] = mask[0, 1] = mask[1, 0] = mask[1, 1] = True
    object.__setattr__(passes.all[0].tokens, "mask", mask)
    return passes


def table(*values):
    found = torch.full((4, 3), 99.0)
    found[0, 0], found[0, 1], found[1, 0], found[1, 1] = values
    return [found]


def test_candidates_are_the_union_of_two_lists(four_tokens):
    """By size of the contribution whatever its sign, then by the screen; nothing outside the mask."""
    found = union_candidates(four_tokens, table(0.1, -5.0, 3.0, 0.0), table(0.0, 1.0, 0.0, 2.0), 1)

    assert [(at.row, at.position) for at in found] == [(0, 1), (1, 0), (1, 1)]


def test_among_equals_the_first_comes_first(four_tokens):
    """The same list every time, and on every rank."""
    assert [(at.row, at.position) for at in top_tokens(four_tokens, table(1.0, 1.0, 1.0, 1.0), 3)] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]


def test_not_a_number_is_the_most_suspicious(four_tokens):
    """It is never dropped, and infinity neither."""
    found = top_tokens(four_tokens, table(1.0, math.nan, 7.0, -math.inf), 3)

    assert [(at.row, at.position) for at in found] == [(0, 1), (1, 1), (1, 0)]


def test_there_may_be_fewer_tokens_than_asked_for(four_tokens):
    """Then all of them; without contributions the screen alone."""
    assert len(union_candidates(four_tokens, table(1.0, 2.0, 3.0, 4.0), [], 50)) == 4


def test_the_best_of_all_ranks_are_taken(four_tokens):
    """Rank 1 has one larger than all of ours and one that ties with our second."""
    other = lambda values: torch.tensor([[9.0, 0, 3, 2], [3.0, 1, 0, 0]], dtype=values.dtype)  # noqa: E731

    found = top_tokens(four_tokens, table(1.0, 3.0, 5.0, 0.0), 2, world=Half(other))
    assert found == [TokenAt(1, 0, 3, 2), TokenAt(0, 0, 1, 0)]
