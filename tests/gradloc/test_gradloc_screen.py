"""The screen: the norm of a token's gradient at its logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_step import LOSSES, policy, rollouts, take_step

from rlwatch.gradloc.verification import score_norm, screen


def brute(logits, token):
    """The norm of d logp(token) / d logits by autograd, and log p(token); float64."""
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logp = z.log_softmax(-1)
    logp[token].backward()
    return float(z.grad.norm()), logp.detach()[token]


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=12), st.data())
def test_the_score_norm_is_that_of_autograd(logits, data):
    """Between 1 and sqrt 2 times what is given."""
    norm, logp = brute(logits, data.draw(st.integers(0, len(logits) - 1)))
    least = float(score_norm(logp))

    assert least - 1e-12 <= norm <= math.sqrt(2) * least + 1e-12


def test_both_bounds_are_reached():
    """All the rest on one other token, or spread over very many."""
    one_rival, _ = brute([0.0, 0.0], 0)
    spread, _ = brute([math.log(10_000.0)] + [0.0] * 10_000, 0)
    half = float(score_norm(torch.tensor(0.5).log()))

    assert one_rival == pytest.approx(math.sqrt(2) * half)
    assert spread == pytest.approx(half, rel=1e-3)


def test_a_certain_token_has_no_gradient():
    """And nothing is lost to rounding near it: log-probs are exact where 1 - p is not."""
    assert score_norm(torch.tensor(0.0)) == 0
    assert float(score_norm(torch.tensor(-1e-12))) == pytest.approx(1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_screen_is_zero_where_the_loss_is_not(name):
    """Tokens outside the mask have no coefficient, the others have one."""
    model = policy()
    one = take_step(model, rollouts(model), LOSSES[name]).all[0]
    found = screen(one)

    assert found.shape == one.shape
    assert not found[~one.tokens.mask].any()
    assert (found >= 0).all()
    torch.testing.assert_close(found, one.coefficient().abs() * (1 - one.tokens.logp.exp()), rtol=1e-4, atol=1e-9)


def test_a_broken_coefficient_is_seen():
    """NaN is not a small number."""
    model = policy()
    one = take_step(model, rollouts(model)).all[0]
    one.coefficients["logp"][0, 0] = math.nan

    assert screen(one)[0, 0].isnan()
    assert screen(one).isnan().sum() == 1
