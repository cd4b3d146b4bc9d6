"""The gradient as a direction: its norm, the shares of the layers, and what cannot be read."""

import math

import pytest
import torch
from tiny_step import policy, rollouts, take_step
from torch import nn

from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.report import NotLocalised


def stepped(**model):
    """A policy that holds the gradient of a step."""
    made = policy(**model)
    take_step(made, rollouts(made))
    return made


class Together:
    """Ranks one after the other: each adds to what those before it gave. The last one sees the true sums."""

    def __init__(self, size):
        self.size, self.rank, self.given = size, 0, []

    def sum(self, values):
        self.given.append(values)
        return sum(self.given)


def test_the_norm_is_that_of_torch():
    """As ``clip_grad_norm_`` finds it, without clipping."""
    model = stepped()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    direction = Direction.of(model)

    assert direction.norm == pytest.approx(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)), rel=1e-6)
    assert direction.length == direction.norm
    assert direction.finite
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())


def test_shares_of_the_layers_add_up_to_one():
    """They are squared norms over the squared norm, under the names the house gives layers."""
    model = stepped(layers=3)
    direction = Direction.of(model)
    layer = sum(float(p.grad.double().square().sum()) for p in model.model.layers[1].parameters())

    assert math.fsum(direction.layers.values()) == pytest.approx(1.0, abs=1e-12)
    assert list(direction.layers)[1:4] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert direction.layers["model.layers.1"] == pytest.approx(layer / direction.norm**2, rel=1e-5)


def test_one_weight_in_float64_makes_the_sums_so():
    """Its squares do not fit into float32: a norm of 1e30 is still a number."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).double())
    for parameter, value in zip(model.parameters(), (3.0, 1e30), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    direction = Direction.of(model)

    assert direction.norm == pytest.approx(2e30, rel=1e-12)
    assert direction.finite


def test_a_tied_weight_counts_once():
    """The head and the embedding are one parameter with one gradient."""
    model = stepped(tie=True)

    assert "lm_head.weight" not in Direction.of(model).gradients
    assert "lm_head" not in Direction.of(model).layers


def test_parameters_without_gradient_are_absent():
    """Frozen ones, and those the loss never reached."""
    model = policy()
    model.model.layers[0].requires_grad_(requires_grad=False)
    take_step(model, rollouts(model))
    model.model.norm.weight.grad = None
    direction = Direction.of(model)

    assert not any(name.startswith("model.layers.0") for name in direction.gradients)
    assert set(direction.layers) == {"model.embed_tokens", "model.layers.1"}


def test_a_clipped_gradient_takes_the_true_norm():
    """Clipping changes the length, not the direction."""
    model = stepped()
    true = Direction.of(model)
    nn.utils.clip_grad_norm_(model.parameters(), true.norm / 10)
    clipped = Direction.of(model, norm=true.norm)

    assert clipped.norm == true.norm
    assert clipped.length == pytest.approx(true.norm / 10, rel=1e-4)
    assert clipped.layers == pytest.approx(true.layers, rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_gradient_is_no_direction(value):
    """And has no shares, rather than wrong ones."""
    model = stepped()
    model.model.norm.weight.grad[3] = value
    direction = Direction.of(model)

    assert not direction.finite
    assert direction.layers == {}


def test_a_gradient_of_zeros_is_finite():
    """It has a norm, 0, and no shares."""
    model = stepped()
    for p in model.parameters():
        p.grad.zero_()
    direction = Direction.of(model)

    assert direction.finite
    assert direction.norm == 0
    assert direction.layers == {}


def test_large_gradients_do_not_overflow():
    """A sum of squares beyond float32 (3.4e38) is still a finite norm."""
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in layers:
        layer.weight.grad = torch.full((1, 1), 1.5e19)

    assert Direction.of(layers).norm == pytest.approx(1.5e19 * math.sqrt(2))


def test_data_parallel_ranks_hold_the_same_gradient_once():
    """The whole gradient is on each rank, and counts on one."""
    model, world = stepped(), Together(2)
    alone = Direction.of(model).norm
    with pytest.raises(NotLocalised):
        Direction.of(model, world=world)  # the other rank has not spoken yet
    world.rank = 1

    assert Direction.of(model, world=world).norm == pytest.approx(alone)


def test_no_gradient_at_all_is_said():
    """After ``zero_grad`` there is nothing to localise."""
    model = stepped()
    model.zero_grad(set_to_none=True)

    with pytest.raises(NotLocalised, match="no parameter"):
        Direction.of(model)


def test_a_gradient_that_one_rank_lacks_is_said():
    """There the ranks do not stand for one step."""
    model, world = stepped(), Together(2)
    with pytest.raises(NotLocalised):
        Direction.of(model, world=world)
    model.model.norm.weight.grad = None
    world.rank = 1

    with pytest.raises(NotLocalised, match=r"model\.norm\.weight exists on 1 of 2 ranks"):
        Direction.of(model, world=world)


def test_a_sparse_gradient_is_said():
    """Its squares are not those of its values."""
    embedding = nn.Embedding(8, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()

    with pytest.raises(NotLocalised, match="sparse"):
        Direction.of(embedding)
