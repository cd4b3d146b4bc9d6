"""On a GPU: a step's gradient is attributed completely, whatever the model draws, recomputes, compiles or routes.

Without a CUDA device these are skipped, and pytest's summary says so.
"""

from dataclasses import fields, replace

import pytest
import torch
from again import again
from tiny_step import policy, rollouts, take_step

from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import RandomState
from rlwatch.gradloc.report import Method
from rlwatch.gradloc.verification import verify

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: attribution on a GPU is not tested here"),
]
FD, JVP = Method.FD, Method.JVP


def there(batch):
    """The rollouts, on the GPU."""
    moved = {f.name: x.cuda() for f in fields(batch) if isinstance(x := getattr(batch, f.name), torch.Tensor)}
    return replace(batch, **moved)


def stepped(model, **step):
    """The passes of a step, made from the same rollouts as on the CPU."""
    batch = rollouts(model)
    return take_step(model.cuda(), there(batch), **step)


def gap(model, passes, method=FD):
    return abs(attribute(model, passes, Direction.of(model), methods=[method]).gap)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attribution_is_complete(attention):
    """By differences and by forward derivatives."""
    model = policy(attention=attention)
    passes = stepped(model, micro_batches=2)

    assert gap(model, passes, JVP) < 1e-5
    assert gap(model, passes) < 1e-3


def test_dropout_falls_as_it_did():
    """Each micro-batch from the state that the device's generator had; training's own stream goes on as it would."""
    model = policy(dropout=0.3)
    passes = stepped(model, micro_batches=3)
    before = torch.cuda.get_rng_state()

    assert gap(model, passes, JVP) < 1e-5
    assert gap(model, passes) < 1e-3
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_sequence_alone_is_given_the_dropout_it_had():
    """The gradient of some tokens by themselves is that of the whole micro-batch with all else zero."""
    model = policy(dropout=0.3)
    passes = stepped(model, micro_batches=2)
    ahead = again({"gradloc/test_gradloc_verification": ("places", "by_hand")})
    tokens = ahead["places__gradloc_verification"](passes, every=25)
    found = verify(model, passes, tokens)

    assert list(found) == tokens
    for at, own in found.items():
        one = passes.all[at.microbatch]
        one.random.restore()
        out, alone = one.forward(), torch.zeros(one.shape, device="cuda")
        alone[at.row, at.position] = 1
        loss = sum((part * one.coefficient(name) * alone).sum() for name, part in out.parts().items())
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        norm = torch.stack([g.double().square().sum() for g in grads if g is not None]).sum().sqrt()
        assert own.norm == pytest.approx(float(norm), rel=1e-3)


def test_random_states_of_the_device_come_back():
    """And are told apart."""
    before = RandomState.now()
    first = torch.rand(3, device="cuda")
    drawn = RandomState.now()
    before.restore()

    assert not before.same(drawn)
    assert torch.equal(torch.rand(3, device="cuda"), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """With either kind."""
    model = policy()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()

    assert gap(model, stepped(model)) < 1e-3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend):
    """For the while it is not compiled."""
    model = policy(layers=1)
    batch = there(rollouts(model))
    compiled = torch.compile(model.cuda(), backend=backend)
    passes = take_step(compiled, batch)

    assert gap(compiled, passes) < 1e-3


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral"])
def test_a_mixture_of_experts(kind):
    """With the auxiliary loss, which is told apart."""
    made = again({"gradloc/test_gradloc_displacement": ("mixture", "balanced", "with_balance")})
    mixture, balanced, with_balance = made.values()
    model = mixture(kind)
    passes = stepped(model, loss=with_balance, forward=balanced, micro_batches=2)
    direction = Direction.of(model)
    found = attribute(model, passes, direction, methods=[JVP])

    assert abs(found.gap) < 1e-4
    assert abs(found.aux) > 0.1 * direction.norm


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_half_precision_weights(low):
    """They are seen in float32."""
    model = policy()
    batch = there(rollouts(model))
    model = model.to("cuda", low)

    assert gap(model, take_step(model, batch)) < 1e-2
