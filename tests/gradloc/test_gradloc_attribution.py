"""Contributions of the tokens: they sum up to the norm of the gradient, and each is what brute force gives."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_step import LOSSES, outputs, plant, policy, rollouts, take_step

from rlwatch.gradloc import attribution
from rlwatch.gradloc.attribution import CURVED, METHODS, TOLERANCE, attribute, kappa_of
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import Outputs, RecordedPasses
from rlwatch.gradloc.report import Method, NotLocalised
from rlwatch.tensors.gradnorm import layer_of

FD, RICHARDSON, JVP = Method.FD, Method.RICHARDSON, Method.JVP


def attributed(model, passes, *methods, **more):
    """The gradient that ``model`` holds now."""
    return attribute(model, passes, Direction.of(model), methods=methods or METHODS, **more)


def brute_force(model, one, direction):
    """a <dlogp, u> + e <dH, u>, by one backward for each token and output of a loss pass."""
    named = dict(model.named_parameters())
    weights = [named[name] for name in direction.gradients]
    unit = [g.double() / direction.length for g in direction.gradients.values()]
    found = torch.zeros(one.shape, dtype=torch.float64)
    for name, part in one.forward().parts().items():
        coefficient = one.coefficient(name)
        for at in coefficient.nonzero().tolist():
            own = torch.autograd.grad(part[tuple(at)], weights, retain_graph=True)
            found[tuple(at)] += float(coefficient[tuple(at)]) * sum(
                (g * u).sum() for g, u in zip(own, unit, strict=True)
            )
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_contributions_sum_up_to_the_norm(name, micro_batches):
    """Whatever the loss: exactly by forward-mode, to a thousandth by finite differences."""
    model = policy()
    passes = take_step(model, rollouts(model), LOSSES[name], micro_batches=micro_batches)
    exact, differences, extrapolated = (attributed(model, passes, method) for method in (JVP, FD, RICHARDSON))

    assert abs(exact.gap) <= 1e-6
    assert abs(differences.gap) <= 1e-3
    assert abs(extrapolated.gap) <= 1e-4
    assert [len(a.contributions) for a in (exact, differences)] == [micro_batches] * 2
    for fine, coarse in zip(exact.contributions, differences.contributions, strict=True):
        torch.testing.assert_close(
            coarse, fine, rtol=0, atol=3e-3 * max(float(c.abs().max()) for c in exact.contributions)
        )


@pytest.mark.parametrize("name", ["dapo", "gspo", "dapo_entropy"])
def test_each_contribution_is_what_brute_force_gives(name):
    """One backward for each token, and the inner product with the unit gradient."""
    model = policy()
    passes = take_step(model, rollouts(model, batch=2, length=8), LOSSES[name])
    found = attributed(model, passes, JVP).contributions[0]

    expected = brute_force(model, passes.all[0], Direction.of(model))

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["dapo", "gspo", "dapo_entropy"])
@pytest.mark.parametrize("low", ["weights", "autocast"])
def test_half_precision_is_complete_to_a_hundredth(name, low):
    """The passes run in float32 all the same; what is left is the rounding of the gradient itself."""
    model = policy()
    batch = rollouts(model)
    model = model.bfloat16() if low == "weights" else model
    passes = take_step(model, batch, LOSSES[name], micro_batches=2, autocast=True if low == "autocast" else None)
    found = attributed(model, passes, FD)

    assert abs(found.gap) <= 1e-2
    assert found.complete
    assert found.contributions[0].dtype == torch.float64


def test_the_cheapest_complete_method_is_taken():
    """Two forward passes, and nothing else tried."""
    model = policy()
    found = attributed(model, take_step(model, rollouts(model)))

    assert (found.method, found.complete, found.forwards, found.notes) == (FD, True, 2, ())
    assert 0.003 <= found.moved <= 0.1


def test_a_failing_method_gives_way_to_the_next():
    """And is noted with its reason."""
    model = policy()
    passes = take_step(model, rollouts(model))
    one = passes.all[0]
    without_dual_numbers = outputs

    def forward(rows=None):
        if torch.autograd.forward_ad._current_level >= 0:
            raise NotImplementedError("no forward derivative")
        return without_dual_numbers(model, rollouts(model).ids, 4)

    one.forward = forward
    found = attributed(model, passes, JVP, FD)

    assert found.method is FD
    assert found.complete
    assert found.notes == ("jvp: NotImplementedError: no forward derivative",)
    assert found.forwards == 4


def test_what_two_steps_agree_on_is_right_though_it_does_not_sum_up():
    """Half of the loss is not in the coefficients: no further method would find it there."""
    model = policy()
    passes = take_step(model, rollouts(model), micro_batches=2)
    passes.all.pop()
    found = attributed(model, passes)

    assert found.settled
    assert not found.complete
    assert 0.02 < abs(found.gap) < 1
    assert found.forwards == 6  # two, and four with other steps


def test_where_nothing_is_complete_the_best_is_given_and_said_to_be_incomplete():
    """Another forward than the one that was trained: its log-probs differ, so nothing is settled."""
    model, other = policy(), policy(seed=5)
    passes = take_step(model, rollouts(model), micro_batches=2)
    passes.all[0].forward = take_step(other, rollouts(other), micro_batches=2).all[0].forward
    found = attributed(model, passes)

    assert not found.complete
    assert not found.settled
    assert 0.02 < abs(found.gap) < 1
    assert {note.split(":")[0] for note in found.notes} == {method.value for method in METHODS} - {found.method.value}
    assert found.forwards == 12  # two, twice four, and two


def test_an_entropy_bonus_counts_only_with_its_own_coefficient():
    """Without it the contributions miss the norm."""
    model = policy(std=0.3)
    passes = take_step(model, rollouts(model), lambda out, b, total: LOSSES["dapo_entropy"](out, b, total, coef=1.0))
    with_it = attributed(model, passes, JVP)
    del passes.all[0].coefficients["entropy"]

    assert abs(with_it.gap) < 1e-6
    assert abs(attributed(model, passes, JVP).gap) > 1e-2


def test_planted_culprits_stand_out():
    """Tokens off-policy by e^5 have the largest contributions, each of which is signed."""
    model = policy(hidden=64)
    batch, places = plant(rollouts(model), "ratio", 3, math.exp(5))
    passes = take_step(model, batch)
    found = attributed(model, passes).contributions[0]
    worst = found.abs().flatten().topk(3).indices

    assert {divmod(int(i), found.shape[1]) for i in worst} == set(places)


def test_layers_alone_sum_up_to_their_share():
    """And all layers together to the whole, for every token."""
    model = policy()
    passes = take_step(model, rollouts(model))
    direction = Direction.of(model)
    whole = attribute(model, passes, direction, methods=[JVP]).contributions[0]
    total = torch.zeros_like(whole)

    for name, share in direction.layers.items():
        held = {at: gradient for at, gradient in direction.gradients.items() if layer_of(at) == name}
        root = math.sqrt(share)  # the length of this layer's part of the unit vector
        alone = Direction(held, root * direction.norm, root * direction.length, {name: 1.0})
        part = root * attribute(model, passes, alone, methods=[JVP]).contributions[0]
        expected = share * direction.norm
        assert float(part.sum()) == pytest.approx(expected, rel=1e-4, abs=1e-6 * direction.norm)
        assert attribute(model, passes, alone, methods=[FD]).gap == pytest.approx(0, abs=5e-3)
        total += part
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-6 * direction.norm)


def test_a_clipped_gradient_gives_the_same_contributions():
    """Its direction is the same; its norm is given."""
    model = policy()
    passes = take_step(model, rollouts(model))
    before = Direction.of(model)
    expected = attribute(model, passes, before)
    torch.nn.utils.clip_grad_norm_(model.parameters(), before.norm / 20)
    found = attribute(model, passes, Direction.of(model, norm=before.norm))

    assert found.complete
    torch.testing.assert_close(found.contributions[0], expected.contributions[0], rtol=1e-3, atol=1e-6)


def test_what_was_clipped_or_unscaled_since_is_seen_in_the_gap():
    """Without the true norm the result says that it is not complete."""
    model = policy()
    passes = take_step(model, rollouts(model))
    torch.nn.utils.clip_grad_norm_(model.parameters(), Direction.of(model).norm / 20)

    assert not attributed(model, passes, JVP).complete


def test_cancelling_culprits_have_contributions_beyond_the_norm():
    """Two tokens that pull apart: the norm says nothing of them, their contributions do."""
    model = policy()
    batch = rollouts(model, batch=2)
    batch = replace(
        batch, ids=batch.ids[:1].repeat(2, 1), mask=batch.mask[:1].repeat(2, 1), old=batch.old[:1].repeat(2, 1)
    )
    advantages = torch.ones_like(batch.advantages)
    advantages[1] = -0.9
    passes = take_step(model, replace(batch, advantages=advantages))
    found = attributed(model, passes)

    assert found.complete
    assert float(found.contributions[0][0].sum()) > 3 * Direction.of(model).norm


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda b: replace(b, advantages=torch.zeros_like(b.advantages)), "all its coefficients are zero"),
        (lambda b: replace(b, mask=torch.zeros_like(b.mask)), "all its coefficients are zero"),
    ],
)
def test_a_step_without_gradient_is_said(spoil, why):
    """All advantages zero, or no token that counts."""
    model = policy()
    passes = take_step(model, spoil(rollouts(model)))

    with pytest.raises(NotLocalised, match=why):
        attributed(model, passes)


def test_a_zero_gradient_is_said():
    """Two sequences that cancel exactly: there is no direction."""
    model = policy()
    passes = take_step(model, rollouts(model))
    for p in model.parameters():
        p.grad.zero_()

    with pytest.raises(NotLocalised, match="the gradient is zero"):
        attributed(model, passes)


def test_a_gradient_that_is_not_finite_is_said():
    """It has no direction: that is for the tracer."""
    model = policy()
    passes = take_step(model, rollouts(model))
    model.model.norm.weight.grad[0] = math.nan

    with pytest.raises(NotLocalised, match="not finite"):
        attributed(model, passes)


def test_no_passes_are_said():
    """Nothing was kept."""
    model = policy()
    take_step(model, rollouts(model))

    with pytest.raises(NotLocalised, match="no loss pass"):
        attributed(model, RecordedPasses())


class Beside:
    """Another rank, which says ``theirs`` when it is asked how it fared, and else what this one says."""

    size, rank = 2, 0

    def __init__(self, theirs):
        self.theirs = torch.tensor(theirs, dtype=torch.float64)

    def gather(self, values):
        return [values, self.theirs if len(values) == len(self.theirs) else values]


def test_contributions_of_all_ranks_make_up_the_norm():
    """Gradients are means over ranks: each has half of its coefficients, and the gap is that of the sum."""
    model = policy()
    passes = take_step(model, rollouts(model))
    direction = Direction.of(model)
    alone = attribute(model, passes, direction, methods=[JVP])
    theirs = float(alone.contributions[0].sum()) / 2
    found = attribute(model, passes, direction, methods=[JVP], world=Beside([theirs, 0.0, 0.0, 0.0, 0.0]))

    assert found.complete
    torch.testing.assert_close(found.contributions[0], alone.contributions[0] / 2)


def test_a_failure_on_another_rank_is_one_here():
    """All ranks give up the same method, or they would wait for each other."""
    model = policy()
    passes = take_step(model, rollouts(model))

    with pytest.raises(NotLocalised, match="fd: it failed on another rank"):
        attribute(model, passes, Direction.of(model), methods=[FD], world=Beside([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]))


def test_numbers_that_are_not_finite_are_no_result():
    """The next method is tried."""
    model = policy()
    passes = take_step(model, rollouts(model))

    with pytest.raises(NotLocalised, match="fd: the numbers are not finite"):
        attribute(
            model, passes, Direction.of(model), methods=[FD], world=Beside([math.nan, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        )


def test_one_token_has_all_of_the_norm():
    """Its contribution is the norm."""
    model = policy()
    batch = rollouts(model, batch=1)
    mask = torch.zeros_like(batch.mask)
    mask[0, 5] = True
    passes = take_step(model, replace(batch, mask=mask))
    found = attributed(model, passes)

    assert found.complete
    assert float(found.contributions[0][0, 5]) == pytest.approx(Direction.of(model).norm, rel=1e-3)
    assert found.contributions[0].count_nonzero() == 1


def test_not_a_number_in_a_padded_slot_is_left_out():
    """The loss is NaN there and the gradient is not: nothing flows back through what was filled after the fact."""
    model = policy()
    batch = rollouts(model)

    def masked(model, ids, prompt):
        out = outputs(model, ids, prompt)
        keep = batch.mask if len(ids) == len(batch.ids) else batch.mask[: len(ids)]
        return Outputs(out.logp.masked_fill(~keep, 0.0), None)

    old = batch.old.masked_fill(~batch.mask, math.nan)
    spoilt = replace(batch, old=old)
    model.zero_grad()
    passes = RecordedPasses()
    out = masked(model, batch.ids, batch.prompt)
    tokens = take_step(policy(), batch).all[0]
    passes.add(lambda rows=None: masked(model, batch.ids, batch.prompt), out, tokens.tokens, random=tokens.random)
    (torch.exp(out.logp - spoilt.old) * batch.advantages).sum().backward()
    found = attributed(model, passes)

    assert passes.all[0].coefficient().isnan().any()
    assert found.complete
    assert found.contributions[0].isfinite().all()


def test_a_weak_step_of_many_sequences_is_as_complete():
    """Temperature, long sequences and a model whose head is not tied."""
    model = policy(tie=False, layers=3)

    def warm(model, ids, prompt):
        return outputs(model, ids, prompt, temperature=0.7)

    passes = take_step(model, rollouts(model, batch=4, length=64), micro_batches=2, forward=warm)

    assert abs(attributed(model, passes, JVP).gap) <= 1e-6
    assert attributed(model, passes).complete


def strange_to_norms(std, seed):
    """Attended vectors of zeros, as a padding row begins: a norm's slope changes there within a thousandth."""
    model = policy(std=std, seed=seed)
    batch = rollouts(model)
    batch.ids[:, ::3] = model.config.pad_token_id
    return model, take_step(model, batch)


@pytest.fixture
def steps_tried(monkeypatch):
    """The steps of the extrapolations that are made, in their order."""
    tried, extrapolated = [], attribution.richardson

    def richardson(model, passes, direction, step, **more):
        tried.append(step)
        return extrapolated(model, passes, direction, step, **more)

    monkeypatch.setattr(attribution, "richardson", richardson)
    return tried


@pytest.mark.parametrize(("std", "seed"), [(0.08, 1), (0.1, 0), (0.1, 3)])
def test_where_a_difference_is_too_coarse_a_finer_one_follows(steps_tried, std, seed):
    """How near it comes depends on the machine's arithmetic; that all is explained at last, at a known cost, does not."""
    model, passes = strange_to_norms(std, seed)
    coarse, finer = attributed(model, passes, FD), attributed(model, passes, FD, RICHARDSON)
    tried = list(steps_tried)
    found, exact = attributed(model, passes), attributed(model, passes, JVP).contributions[0]

    assert abs(coarse.gap) > CURVED
    assert not coarse.complete
    assert tried[0] == min(tried)
    assert finer.method is RICHARDSON
    assert abs(finer.gap) < abs(coarse.gap) / 50
    assert finer.forwards == 2 + 4 * len(tried) <= 10
    assert found.complete
    assert found.forwards <= 12
    assert found.notes[0] == f"fd: gap {coarse.gap:.1e}"
    torch.testing.assert_close(found.contributions[0], exact, rtol=0, atol=5e-3 * float(exact.abs().max()))


def test_a_gap_just_beyond_the_tolerance_may_be_curvature_as_well(steps_tried):
    """The same vectors, but small weights: the larger step of the extrapolation is worse, the smaller one complete."""
    model, passes = strange_to_norms(0.06, 1)
    coarse, found = attributed(model, passes, FD), attributed(model, passes)

    assert TOLERANCE < abs(coarse.gap) < CURVED
    assert found.complete
    assert found.method is RICHARDSON
    assert steps_tried == sorted(steps_tried, reverse=True)
    assert len(steps_tried) == 2


def test_the_step_shrinks_with_the_number_of_tokens():
    """Gradients of many tokens cancel, so that single log-probs move further for the same mean: up to a floor."""
    assert kappa_of(1) == kappa_of(1000) == 3e-3
    assert kappa_of(4000) == pytest.approx(1.5e-3)
    assert kappa_of(10**7) == 5e-4
