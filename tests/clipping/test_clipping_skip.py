"""Skipping a step: nothing changes, not even a count; and when a localisation asks for it."""

import copy

import pytest
import torch
from torch import nn

from rlwatch.clipping import SkipOnSpike, skip_step
from rlwatch.errors import ConfigError
from rlwatch.gradloc.report import Culprit, ExcessFactor, Localisation, TokenAt

pytestmark = pytest.mark.torch
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.1),
}


def begun(optimizer):
    """A model and its optimizer after two steps, with the gradients of the third."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    opt = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        if _ < 2:
            opt.step()
    return model, opt


def left(model, opt):
    return copy.deepcopy((list(model.state_dict().values()), opt.state_dict()["state"]))


def equal(one, other):
    tensors, states = zip(one, other, strict=True)
    alike = [torch.equal(a, b) for a, b in zip(*tensors, strict=True)]
    for ours, theirs in zip(states[0].values(), states[1].values(), strict=True):
        alike += [
            torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])) for k in ours if ours[k] is not None
        ]
    return all(alike)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("of", ["model", "optimizer", "parameters"])
def test_a_skipped_step_changes_no_bit_of_parameters_and_optimizer(optimizer, of):
    """No decay, no momentum, no count of the step."""
    model, opt = begun(optimizer)
    before = left(model, opt)
    skip_step({"model": model, "optimizer": opt, "parameters": model.parameters()}[of])
    opt.step()

    assert equal(left(model, opt), before)


def test_zero_gradients_would_not_do():
    """What the test above can tell."""
    model, opt = begun("AdamW")
    before = left(model, opt)
    opt.zero_grad(set_to_none=False)
    opt.step()

    assert not equal(left(model, opt), before)


def test_training_goes_on_as_if_the_batch_had_not_been():
    """The step after a skipped one is the step that would have come without it."""
    ours, theirs = begun("AdamW"), begun("AdamW")
    skip_step(ours[1])
    ours[1].step()
    for model, opt in (ours, theirs):
        opt.zero_grad()
        model(torch.ones(5, 3)).square().mean().backward()
        opt.step()

    assert equal(left(*ours), left(*theirs))


def test_a_loss_scaler_steps_over_a_skip_after_unscaling():
    """As the docstring says: after unscale_ the scaler has looked already."""
    model, opt = begun("AdamW")
    before = left(model, opt)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(5, 3)).mean()).backward()
    scaler.unscale_(opt)
    skip_step(model)
    scaler.step(opt)
    scaler.update()

    assert equal(left(model, opt), before)


def found(norm=1.0, *shares):
    culprits = [
        Culprit(TokenAt(0, 0, 0, i), 0, 5, ExcessFactor.TOKEN_RATIO, "", share=share) for i, share in enumerate(shares)
    ]
    return Localisation(norm, culprits=culprits)


@pytest.mark.parametrize(
    ("localisation", "skip", "reason"),
    [
        (found(float("nan")), True, "the gradient norm is nan"),
        (found(float("inf"), 0.1), True, "the gradient norm is inf"),
        (found(9.0, 0.2, 0.9), True, "one token holds 90% of the gradient norm"),
        (found(9.0, -0.8), True, "one token holds 80% of the gradient norm"),
        (found(9.0, 0.5, 0.5), False, "no token holds more than 50% of the gradient norm"),
        (found(9.0), False, "no token holds more than 50% of the gradient norm"),
        (found(9.0, None, float("nan")), False, "no token holds more than 50% of the gradient norm"),
    ],
)
def test_decisions_come_with_their_reason(localisation, skip, reason):
    """Only a culprit that holds more than its share, or a gradient that is not finite."""
    decision = SkipOnSpike().decide(localisation, 1)

    assert (decision.skip, decision.reason) == (skip, reason)


def test_not_more_than_so_many_steps_are_skipped():
    """Two in ten: the third is refused, with the reason, until the window has moved on; all is counted."""
    policy = SkipOnSpike(most=2, within=10)
    guilty = found(9.0, 0.9)
    said = {step: policy.decide(guilty, step) for step in (1, 2, 3, 10, 11, 12, 13)}

    assert [step for step, decision in said.items() if decision.skip] == [1, 2, 11, 12]
    assert said[3].reason == "2 of the last 10 steps were skipped already"
    assert policy.skipped == {"non-finite": 0, "culprit": 4, "refused": 3}


def test_a_gradient_that_is_not_finite_is_skipped_whatever_the_limit():
    """Taking the step would destroy the weights; it does not use up what culprits may."""
    policy = SkipOnSpike(most=1, within=100)
    broken = [policy.decide(found(float("nan")), step).skip for step in range(5)]

    assert all(broken)
    assert policy.decide(found(9.0, 0.9), 6).skip
    assert policy.skipped == {"non-finite": 5, "culprit": 1, "refused": 0}


def test_a_resumed_policy_decides_as_the_one_that_never_stopped():
    """Through its state."""
    straight, first = SkipOnSpike(most=1, within=10), SkipOnSpike(most=1, within=10)
    for policy in (straight, first):
        policy.decide(found(9.0, 0.9), 1)
    resumed = SkipOnSpike(most=1, within=10)
    resumed.load_state_dict(first.state_dict())
    again = [policy.decide(found(9.0, 0.9), 5) for policy in (straight, resumed)]

    assert again[0] == again[1]
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1.5}, {"most": 0}, {"most": 5, "within": 4}])
def test_wrong_limits_are_refused(wrong):
    """At set-up."""
    with pytest.raises(ConfigError, match="SkipOnSpike"):
        SkipOnSpike(**wrong)
