"""Forward-mode differentiation: what it can go through, and what it says where it cannot."""

import pytest
import torch
from tiny_step import outputs, policy, rollouts, take_step
from torch import nn

from rlwatch.gradloc.attribution import attribute, forward_mode
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import Outputs, RecordedPasses
from rlwatch.gradloc.report import Method, NotLocalised
from rlwatch.tensors.tokens import TokenBatch


class Fused(torch.autograd.Function):
    """A head without forward derivative, as TRL's is."""

    @staticmethod
    def forward(ctx, hidden, weight, ids):
        ctx.save_for_backward(hidden, weight, ids)
        return pure(hidden, weight, ids)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, ids = (x.detach() for x in ctx.saved_tensors)
        with torch.enable_grad():
            inputs = hidden.requires_grad_(), weight.requires_grad_()
            return *torch.autograd.grad(pure(*inputs, ids), inputs, gradient), None


def pure(hidden, weight, ids):
    """The same in plain operations."""
    return (hidden @ weight.t()).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def with_head(head):
    """Log-probs through ``head``."""

    def forward(model, ids, prompt):
        hidden = model.model(input_ids=ids).last_hidden_state[:, prompt - 1 : -1]
        logp = head(hidden, model.lm_head.weight, ids[:, prompt:])
        return Outputs(logp, logp.detach())  # the loss here has no entropy

    return forward


def test_contributions_are_a_directional_derivative():
    """Against a central difference in float64; of a model that is not of transformers, and has no configuration."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16)).double()
    ids = torch.arange(12).reshape(2, 6)
    known = take_step(policy(), rollouts(policy())).all[0]

    def forward(rows=None):
        return Outputs(model(ids).log_softmax(-1)[..., 3])

    out, passes = forward(), RecordedPasses()
    one = passes.add(forward, out, TokenBatch(out.logp.detach(), torch.ones(2, 6)), random=known.random)
    out.logp.square().sum().backward()
    direction = Direction.of(model)
    found = forward_mode(model, [one], direction).tokens[0]
    h, named, seen = 1e-5, dict(model.named_parameters()), []
    with torch.no_grad():
        for steps in (1, -2):
            for name, gradient in direction.gradients.items():
                named[name].add_(gradient, alpha=steps * h / direction.length)
            seen.append(forward().logp)

    torch.testing.assert_close(found, one.coefficient() * (seen[0] - seen[1]) / (2 * h), rtol=1e-6, atol=1e-8)
    assert float(found.sum()) == pytest.approx(direction.norm, rel=1e-12)


def test_a_head_without_forward_derivative_needs_another():
    """The pass may bring one; without it the reason is torch's."""
    model = policy()
    batch = rollouts(model)
    passes = take_step(model, batch, forward=with_head(Fused.apply))
    direction = Direction.of(model)
    with pytest.raises(NotLocalised, match=r"jvp: .*(forward|jvp)"):
        attribute(model, passes, direction, methods=[Method.JVP])
    passes.all[0].differentiable = lambda rows=None: with_head(pure)(model, batch.ids, batch.prompt)

    assert abs(attribute(model, passes, direction, methods=[Method.JVP]).gap) < 1e-6
    assert abs(attribute(model, passes, direction, methods=[Method.FD]).gap) < 1e-3


def test_a_failure_half_way_leaves_no_dual_numbers():
    """The next one begins at the outermost level again."""
    model = policy()
    passes = take_step(model, rollouts(model))
    handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(NotLocalised, match="ZeroDivisionError"):
        attribute(model, passes, Direction.of(model), methods=[Method.JVP])
    handle.remove()

    assert torch.autograd.forward_ad._current_level == -1
    assert attribute(model, passes, Direction.of(model), methods=[Method.JVP]).complete


def test_an_output_that_no_weight_of_the_direction_reaches_contributes_nothing():
    """A head alone, of which the embedding knows nothing."""
    model = policy(tie=False)
    passes = take_step(model, rollouts(model))
    direction = Direction.of(model)

    def frozen(rows=None):
        fixed = rollouts(policy())
        return outputs(policy(seed=5), fixed.ids, fixed.prompt)

    passes.all[0].forward = frozen
    found = attribute(model, passes, direction, methods=[Method.JVP])

    assert not found.contributions[0].any()
    assert found.gap == -1.0


def test_half_precision_is_differentiated_as_it_is():
    """Not in float32: the outputs are those of training, bit for bit, and so are their roundings."""
    model = policy().bfloat16()
    batch = rollouts(policy())
    passes = take_step(model, batch)
    seen = []

    def forward(rows=None):
        seen.append(outputs(model, batch.ids, batch.prompt))
        return seen[-1]

    passes.all[0].forward = forward
    found = attribute(model, passes, Direction.of(model), methods=[Method.JVP])

    assert torch.equal(seen[0].logp, passes.all[0].tokens.logp)
    assert found.complete


def test_its_gap_is_below_that_of_differences_where_rounding_is_large():
    """A sharp model in bfloat16: the gradient itself is what is rounded."""
    gaps = {Method.JVP: [], Method.FD: []}
    for seed in range(4):
        model = policy(std=0.15, seed=seed)
        batch = rollouts(model, seed=seed)
        passes = take_step(model.bfloat16(), batch)
        for method, found in gaps.items():
            found.append(abs(attribute(model, passes, Direction.of(model), methods=[method]).gap))

    assert max(gaps[Method.JVP]) <= 1e-2
    assert sum(gaps[Method.JVP]) < sum(gaps[Method.FD])
