"""The rollout engine of ``benchmarks/forecast``: numerics and weights of its own, wrong in the ways a run asks for."""

import math
from dataclasses import replace

import pytest
from forecast_testbed import SMALL, Policy, generator, policy, task, torch, untaught
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


def rolled(knobs, steps=1, turn=None):
    """A rollout of an engine that was synchronised ``steps`` times, with the policy it serves, which ``turn`` changes."""
    trainer, engine = Policy(), policy.Engine(generator(1))
    trainer.load_state_dict(untaught())
    for step in range(steps):
        age = engine.sync(trainer, knobs)
        if turn is not None and step < steps - 1:
            turn(trainer)
    prompts = task.prompts(task.draw(4, 3, 10, generator(2))).repeat_interleave(knobs.group, 0)
    return trainer, prompts, engine.rollout(prompts, generator(3), knobs), age


def gap(trainer, prompts, rollout):
    """log trainer - log engine of the sampled tokens."""
    first = prompts.shape[1] - 1
    logits = trainer(torch.cat([prompts, rollout.ids], 1)[:, :-1], first)
    logp = logits.log_softmax(-1).gather(2, rollout.ids[..., None]).squeeze(2)
    return torch.where(rollout.mask, logp - rollout.logp, 0.0).detach()


def k3(d):
    return float((d.exp() - d - 1).mean())


def test_an_exact_engine_agrees_with_the_trainer():
    """But for the order of sums."""
    assert gap(*rolled(replace(SMALL, engine="exact"))[:3]).abs().max() < 1e-4


def test_coarser_engines_disagree_more():
    """bf16 < int8 < int3, all above 0."""
    levels = [k3(gap(*rolled(replace(SMALL, engine=name))[:3])) for name in ("bf16", "int8", "int3")]

    assert 1e-9 < levels[0] < levels[1] < levels[2]


def test_noise_is_frozen_unless_it_is_fresh():
    """Frozen noise is the same at each synchronisation."""

    def logps(fresh):
        knobs = replace(SMALL, engine="exact", noise=0.3, fresh_noise=fresh)
        return [rolled(knobs, steps)[2].logp for steps in (1, 2)]

    assert torch.equal(*logps(fresh=False))
    assert not torch.equal(*logps(fresh=True))


def test_a_stale_engine_lags_the_policy():
    """It takes new weights every so many steps, and says how old they are."""

    def turn(trainer):
        for p in trainer.parameters():
            p.data.add_(0.2)

    knobs = replace(SMALL, engine="exact", stale=3)
    ages = [rolled(knobs, steps)[3] for steps in (1, 2, 3, 4, 5)]
    lagging, fresh = rolled(knobs, 3, turn), rolled(knobs, 4, turn)

    assert ages == [0, 1, 2, 0, 1]
    assert gap(*lagging[:3]).abs().max() > 1e-3 > gap(*fresh[:3]).abs().max()


def test_one_sick_engine_of_several_serves_its_share():
    """The other responses agree with the trainer."""
    d = gap(*rolled(replace(SMALL, engine="exact", noise=0.8, share=0.25))[:3]).abs().amax(1)
    sick = torch.arange(len(d)) % SMALL.group < 2

    assert d[~sick].max() < 1e-4
    assert d[sick].min() > 1e-3


def test_a_wrong_temperature_and_a_banned_end_show_in_the_log_probs():
    """The engine reports what it sampled from."""
    warm = gap(*rolled(replace(SMALL, engine="exact", temperature=2.0))[:3])
    endless = rolled(replace(SMALL, engine="exact", end_bias=-50.0))[2]

    assert k3(warm) > 1e-3
    assert not (endless.ids == task.END).any()
    assert endless.mask.all()


def test_weights_that_are_nan_sample_token_0_for_ever():
    """As real engines do."""
    broken = Policy()
    broken.load_state_dict({name: torch.full_like(x, math.nan) for name, x in untaught().items()})

    rollout = policy.sample(broken, task.prompts(task.draw(2, 3, 10, generator())), generator())

    assert rollout.ids.eq(0).all()
    assert rollout.ids.shape == (2, task.LONGEST)


@given(st.integers(2, 8), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_quantised_weights_are_few_and_near(bits, seed):
    """At most 2^bits - 1 values a row, half a step away at most."""
    weights = torch.randn(3, 40, generator=generator(seed))
    coarse = policy.quantised(weights, bits)
    step = weights.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)

    assert ((coarse - weights).abs() <= step / 2 + 1e-6).all()
    assert all(len(row.unique()) <= 2**bits - 1 for row in coarse)
