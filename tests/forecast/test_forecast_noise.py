"""Runs as small batches would have logged them: the same course, more scatter, the same kinds of values."""

import math

import numpy as np
from forecast_runs import steady
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.forecast.examples import hard_at_times, noisy


def scatter(rows, name):
    values = np.array([metrics[name] for _, metrics in rows])
    return float(np.std(np.diff(np.log(np.maximum(values, 1e-9)))))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_values_stay_what_they_can_be(seed):
    """Shares in [0, 1], positive numbers positive, effective sample sizes at most 1; steps and names unchanged."""
    rows = list(steady(40).items())
    for (step, before), (at, after) in zip(rows, noisy(rows, seed), strict=True):
        assert (at, list(after)) == (step, list(before))
        assert 0.0 <= after["len/clipped"] <= 1.0
        assert 0.0 <= after["mismatch/ess"] <= 1.0
        assert min(after["optim/grad_norm"], after["policy/kl_ref_k3"], after["len/mean"]) > 0.0


def test_a_small_batch_scatters_more_and_goes_the_same_way():
    """Ten to fifty times the scatter of KL; the level is where it was."""
    rows = list(steady(400).items())
    small = noisy(rows, 3)
    assert scatter(small, "policy/kl_ref_k3") > 5 * scatter(rows, "policy/kl_ref_k3")
    assert scatter(small, "policy/entropy") < 0.5 * scatter(small, "policy/kl_ref_k3")
    middle = float(np.median([metrics["policy/kl_ref_k3"] for _, metrics in small]))
    assert 0.8 < middle / 0.02 < 1.25


def test_the_same_seed_gives_the_same_noise_and_nothing_odd_is_touched():
    """NaN, infinities, and metrics that no signal reads."""
    rows = [(1, {"policy/entropy": math.nan, "optim/grad_norm": math.inf, "optim/lr": 1e-3, "reward/mean": 0.5})]
    ((_, one),) = noisy(rows, 5)
    assert math.isnan(one["policy/entropy"])
    assert (one["optim/grad_norm"], one["optim/lr"], one["reward/mean"]) == (math.inf, 1e-3, 0.5)
    many = list(steady(20).items())
    assert noisy(many, 5) == noisy(many, 5) != noisy(many, 6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_on_hard_data_values_stay_what_they_can_be(seed):
    """The same steps and names; shares in [0, 1], positive numbers positive, effective sample sizes at most 1."""
    rows = list(steady(40).items())
    for (step, before), (at, after) in zip(rows, hard_at_times(rows, seed), strict=True):
        assert (at, list(after)) == (step, list(before))
        assert 0.0 <= after["len/clipped"] <= 1.0
        assert 0.0 <= after["mismatch/ess"] <= 1.0
        assert min(after["optim/grad_norm"], after["policy/kl_ref_k3"], after["len/mean"]) > 0.0


def test_where_data_are_hard_rewards_fall_and_answers_grow_longer_in_the_same_rows():
    """Of most runs: how much each of them moves is drawn. Over all of a run nothing is gained or lost."""
    together, levels = [], []
    for seed in range(40):
        rows = hard_at_times(list(steady(200, noise=0.0).items()), seed)
        reward, length = (np.array([metrics[name] for _, metrics in rows]) for name in ("reward/mean", "len/mean"))
        together.append(np.corrcoef(reward, length)[0, 1])
        levels.append(float(np.median(reward)))

    assert np.median(together) < -0.9
    assert abs(np.median(levels) - 0.5) < 0.05


def test_nothing_odd_is_touched_by_hard_data():
    """NaN, infinities, and metrics that no signal reads."""
    rows = [(1, {"policy/entropy": math.nan, "optim/grad_norm": math.inf, "optim/lr": 1e-3, "reward/mean": 0.5})]
    ((_, one),) = hard_at_times(rows, 5)

    assert math.isnan(one["policy/entropy"])
    assert (one["optim/grad_norm"], one["optim/lr"]) == (math.inf, 1e-3)
