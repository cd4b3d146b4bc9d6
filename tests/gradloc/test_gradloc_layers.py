"""Shares of layers through sequences: they sum up to the layers' shares, and are those of each sequence alone."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_step import LOSSES, dapo, policy, rollouts, take_step
from torch import nn

from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.errors import NotLocalised
from rlwatch.gradloc.layers import layer_by_sequence
from rlwatch.gradloc.passes import Outputs, Passes, RandomState
from rlwatch.tensors.gradnorm import layer_of
from rlwatch.tensors.tokens import TokenBatch


def look(model, passes, **more):
    direction = Direction.of(model)
    return direction, layer_by_sequence(model, passes, direction, **more)


def assert_sums(direction, found):
    assert set(found.shares) == set(direction.layers)
    for layer, share in direction.layers.items():
        assert float(found.shares[layer].sum()) == pytest.approx(share, abs=1e-5)
        assert found.rest[layer] == pytest.approx(0.0, abs=1e-5)
    assert found.notes == ()


def by_hand(model, passes, direction, row):
    """<gradient of the sequence alone, gradient of the step> in each layer, over the squared norm."""
    one = next(p for p in reversed(passes.all) if p.first_row <= row)
    out = one.forward()
    loss = sum((part * one.coefficient(name))[row - one.first_row].sum() for name, part in out.parts().items())
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    shares = {}
    for (name, _), g in zip(named, torch.autograd.grad(loss, [p for _, p in named], allow_unused=True), strict=True):
        dot = 0.0 if g is None else float((g.double() * direction.gradients[name].double()).sum())
        shares[layer_of(name)] = shares.get(layer_of(name), 0.0) + dot / direction.norm**2
    return shares


@pytest.mark.parametrize("name", LOSSES)
def test_sequences_sum_up_to_layers_for_every_loss(name):
    """Tied embeddings, micro-batches and entropy bonus included."""
    model = policy()
    passes = take_step(model, rollouts(model), LOSSES[name], micro_batches=3)

    direction, found = look(model, passes)

    assert_sums(direction, found)
    assert sum(float(shares.sum()) for shares in found.shares.values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("tie", [True, False])
def test_each_share_is_that_of_the_sequence_alone(tie):
    """Against a backward of each sequence by itself."""
    model = policy(tie=tie)
    passes = take_step(model, rollouts(model, batch=4), micro_batches=2)

    direction, found = look(model, passes)

    for row in range(4):
        expected = by_hand(model, passes, direction, row)
        assert {layer: float(shares[row]) for layer, shares in found.shares.items()} == pytest.approx(
            expected, abs=1e-5
        )


def test_micro_batches_of_one_sequence():
    """Nothing to tell apart within them."""
    model = policy()
    passes = take_step(model, rollouts(model, batch=3), micro_batches=3)

    assert_sums(*look(model, passes))


def test_dropout_and_checkpointing_are_those_of_the_step():
    """Same random numbers, recomputed activations."""
    model = policy(dropout=0.2)
    model.gradient_checkpointing_enable()
    passes = take_step(model, rollouts(model), micro_batches=2)

    assert_sums(*look(model, passes))


def test_a_padding_token_in_the_context_of_a_tied_model():
    """autograd drops the row that the embedding should give it: so do we."""
    model = policy()
    batch = rollouts(model)
    batch.ids[:, 1] = 0

    assert_sums(*look(model, take_step(model, batch)))


def test_adapters():
    """Of LoRA the adapters alone train, and theirs are the shares."""
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(policy(), config)
    direction, found = look(model, take_step(model, rollouts(model)))

    assert_sums(direction, found)
    assert set(found.shares) == {"model.layers.0", "model.layers.1"}


def test_clipped_gradients_have_the_same_shares():
    """The direction is the same after clipping; the unit is that of the coefficients."""
    model = policy()
    passes = take_step(model, rollouts(model))
    before = look(model, passes)[1]
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))

    after = layer_by_sequence(model, passes, Direction.of(model, norm=norm))

    for layer, shares in after.shares.items():
        torch.testing.assert_close(shares, before.shares[layer], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("autocast", [None, True])
def test_bfloat16(autocast):
    """Weights or autocast: up to its rounding."""
    model = policy() if autocast else policy().bfloat16()
    passes = take_step(model, rollouts(model), autocast=autocast)

    direction, found = look(model, passes)

    for layer, share in direction.layers.items():
        assert float(found.shares[layer].sum()) == pytest.approx(share, abs=2e-2)


def test_training_does_not_notice():
    """Gradients, random state and hooks are as before; also if a pass failed."""
    model = policy(dropout=0.1)
    passes = take_step(model, rollouts(model), micro_batches=2)
    direction = Direction.of(model)
    grads, random = [(p.grad, p.grad.clone()) for p in model.parameters()], torch.get_rng_state()

    layer_by_sequence(model, passes, direction)
    passes.all[1].forward = lambda rows=None: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(NotLocalised, match="OutOfMemoryError: CUDA out of memory"):
        layer_by_sequence(model, passes, direction)

    for p, (grad, content) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, content)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_read_past_their_module_are_in_the_rest():
    """As fused heads do: what is missing is said, layer by layer."""
    model = policy(tie=False)
    batch = rollouts(model)

    def fused(model, ids, prompt):
        hidden = model.model(input_ids=ids).last_hidden_state[:, prompt - 1 : -1]
        every = (hidden @ model.lm_head.weight.T).log_softmax(-1)
        return Outputs(every.gather(-1, ids[:, prompt:, None])[..., 0])

    passes = Passes()
    out = fused(model, batch.ids, batch.prompt)
    tokens = TokenBatch(out.logp.detach(), batch.mask)
    passes.add(lambda rows=None: fused(model, batch.ids, batch.prompt), out, tokens, random=RandomState.now())
    dapo(out, batch, batch.mask.sum()).backward()

    direction, found = look(model, passes)

    assert found.rest["lm_head"] == pytest.approx(direction.layers["lm_head"])
    assert all(abs(rest) < 1e-5 for layer, rest in found.rest.items() if layer != "lm_head")


class Twisted(nn.Module):
    """Two linear layers: the first works on tokens of all sequences in a row, the second has code without derivative."""

    def __init__(self):
        super().__init__()
        self.flat, self.odd = nn.Linear(4, 4), Odd()

    def forward(self, x):
        return self.odd(self.flat(x.flatten(0, 1)).view(x.shape))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum((0, 1))


def test_modules_that_cannot_be_told_apart_are_noted():
    """Not arranged by sequence, or no forward derivative: in the rest, with the reason; never a wrong number."""
    torch.manual_seed(0)
    model, passes, x = Twisted(), Passes(), torch.randn(2, 3, 4)
    out = Outputs(model(x).log_softmax(-1)[..., 0])
    passes.add(lambda rows=None: Outputs(model(x).log_softmax(-1)[..., 0]), out,
               TokenBatch(out.logp.detach(), torch.ones(2, 3, dtype=torch.bool)), random=RandomState.now())  # fmt: skip
    out.logp.sum().backward()

    direction, found = look(model, passes)

    assert found.rest == pytest.approx(direction.layers)
    assert "flat: what a module computes is not arranged by sequence" in found.notes
    assert any(note.startswith("odd: Odd has no derivative") for note in found.notes)


def test_without_a_direction_there_are_no_shares():
    """A gradient of zero, or one that is not finite."""
    model = policy()
    passes = take_step(model, rollouts(model))
    model.get_parameter("lm_head.weight").grad.fill_(torch.nan)

    with pytest.raises(NotLocalised, match="not finite"):
        look(model, passes)


class Half:
    """One of two ranks that have seen the same."""

    size, rank = 2, 1

    def sum(self, values):
        return 2 * values


def test_gradients_are_means_over_ranks():
    """Each of two equal ranks has half of every share; together nothing is missing."""
    model = policy()
    passes = take_step(model, rollouts(model))
    direction = Direction.of(model)
    alone, shared = (
        layer_by_sequence(model, passes, direction),
        layer_by_sequence(model, passes, direction, world=Half()),
    )

    for layer, shares in shared.shares.items():
        torch.testing.assert_close(2 * shares, alone.shares[layer])
        assert shared.rest[layer] == pytest.approx(0.0, abs=1e-5)
