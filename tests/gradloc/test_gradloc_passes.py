"""Kept loss passes: they give the coefficients of the loss, and the same outputs again."""

import pytest
import torch
from tiny_step import LOSSES, dapo, outputs, policy, rollouts, take_step

from rlwatch.gradloc.passes import LossPass, Outputs, RandomState, RecordedPasses


@pytest.mark.parametrize("name", LOSSES)
def test_coefficients_times_log_probs_differentiate_to_the_same_gradient(name):
    """sum a dlogp (+ e dH) has the gradient of the loss, whatever the loss is."""
    model = policy()
    batch = rollouts(model)
    passes = take_step(model, batch, LOSSES[name], micro_batches=2)
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}

    model.zero_grad()
    for one in passes.all:
        out = one.forward()
        parts = [(one.coefficient(part) * x).sum() for part, x in out.parts().items()]
        sum(parts).backward()

    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], rtol=1e-4, atol=1e-7)


def test_only_the_entropies_that_the_loss_used_have_coefficients():
    """A loss without a bonus leaves them at zero."""
    model = policy()
    without = take_step(model, rollouts(model), dapo).all[0]
    with_bonus = take_step(model, rollouts(model), LOSSES["dapo_entropy"]).all[0]

    assert not without.coefficient("entropy").any()
    assert with_bonus.coefficient("entropy").any()
    assert without.coefficient("aux").shape == ()


def test_a_second_backward_through_the_same_forward_adds_up():
    """As the gradient does."""
    model = policy()
    batch = rollouts(model)
    out = outputs(model, batch.ids, batch.prompt)
    one = LossPass(lambda rows=None: out, take_step(model, batch).all[0].tokens, RandomState.now())
    one.hook(out, RecordedPasses().contained)

    out.logp.sum().backward(retain_graph=True)
    (2 * out.logp).sum().backward()

    assert torch.equal(one.coefficient(), torch.full_like(out.logp, 3.0))


def test_dropout_shows_as_drawn_numbers_and_comes_back_with_the_random_state():
    """The same forward gives the same log-probs again only from the state it began with."""
    model = policy(dropout=0.3)
    passes = take_step(model, rollouts(model), micro_batches=2)

    for one in passes.all:
        one.random.restore()
        assert one.drew
        assert torch.equal(one.forward().logp, one.tokens.logp)
    assert not take_step(policy(), rollouts(policy())).all[0].drew


def test_rows_are_counted_over_micro_batches():
    """The second micro-batch begins where the first ends; a cleared step begins anew."""
    model = policy()
    passes = take_step(model, rollouts(model, batch=8), micro_batches=3)

    assert [one.first_row for one in passes.all] == [0, 3, 6]
    passes.clear()
    assert passes.rows == 0


def test_hooks_do_not_change_the_gradient():
    """Bit for bit."""
    model = policy()
    batch = rollouts(model)
    take_step(model, batch)
    watched = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    dapo(outputs(model, batch.ids, batch.prompt), batch, batch.mask.sum()).backward()

    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), watched, strict=True))


def test_parts_are_those_there_are():
    """None is left out."""
    logp = torch.zeros(1, 2)

    assert list(Outputs(logp).parts()) == ["logp"]
    assert list(Outputs(logp, aux=torch.zeros(())).parts()) == ["logp", "aux"]
