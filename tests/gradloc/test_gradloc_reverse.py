"""Contributions through the backward itself, where a model's backward is not the derivative of its forward."""

import pytest
import torch
from spiked_run import norm_of
from test_gradloc_attribution import brute_force
from tiny_step import LOSSES, dapo, plant, policy, rollouts, take_step

from rlwatch.gradloc.attribution import forward_mode, reverse_mode
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.locate import locate
from rlwatch.gradloc.report import BlameLevel, Method


class Straight(torch.autograd.Function):
    """Rounds to eighths, and passes the gradient on as if it had not."""

    @staticmethod
    def forward(_ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(_ctx, gradient):
        return gradient


def rounding():
    """A policy whose first layer hands on rounded hidden states."""
    model = policy()
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, out: Straight.apply(out))
    return model


@pytest.mark.parametrize("name", ["dapo", "gspo", "dapo_entropy"])
def test_an_ordinary_model_gives_what_forward_mode_gives(name):
    """Micro-batches, lengths and entropies included."""
    model = policy()
    passes = take_step(model, rollouts(model), LOSSES[name], micro_batches=2).all
    direction = Direction.of(model)
    found, expected = reverse_mode(model, passes, direction), forward_mode(model, passes, direction)

    assert found.total == pytest.approx(direction.norm, rel=1e-5)
    assert found.entropy == pytest.approx(expected.entropy, abs=1e-5 * direction.norm)
    for here, there in zip(found.tokens, expected.tokens, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5 * direction.norm)


def test_a_straight_through_estimator_gets_what_its_backward_passes_on():
    """Each token's contribution by a backward of it alone; gradients stay as they are."""
    model = rounding()
    passes = take_step(model, rollouts(model, batch=2, length=8), dapo).all
    direction, norm = Direction.of(model), norm_of(model)
    found = reverse_mode(model, passes, direction).tokens[0]
    expected = brute_force(model, passes[0], direction)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    assert norm_of(model) == norm


def test_a_token_behind_a_straight_through_estimator_is_told_completely():
    """No difference of forwards explains that gradient, the backward does."""
    model = rounding()
    batch, places = plant(rollouts(model), "advantage", 1, 300.0)
    report = locate(model, take_step(model, batch, dapo))

    assert (report.report.verdict, report.report.method) == (BlameLevel.TOKEN, Method.REVERSE)
    assert report.report.complete
    assert (report.report.culprits[0].at.row, report.report.culprits[0].at.position) == places[0]


def test_a_term_outside_is_told_behind_a_straight_through_estimator_too():
    """What does not come through the tokens is what the backward leaves, not what differences miss."""
    model = rounding()
    passes = take_step(model, rollouts(model), dapo)
    sum(p.square().sum() for p in model.parameters()).mul(0.5).backward()
    report = locate(model, passes).report

    assert report.verdict is BlameLevel.OUTSIDE
    assert report.culprits == ()
