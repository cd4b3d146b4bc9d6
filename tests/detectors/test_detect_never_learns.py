"""Dead from the start, and the slow starts that are none."""

import random

import pytest
from exact_runs import alarms, always, exact, swinging, when, worst

from rlwatch.detectors.reward.reward_constant import RewardConstant


@pytest.mark.parametrize(("every", "step"), [(1, 49), (2, 98), (5, 150), (10, 150), (20, 280)])
def test_a_reward_of_next_to_nothing_is_told_after_fifty_rows_or_fifteen_that_are_far_apart(every, step):
    """Once it is sure, from the first row on."""
    nothing = {"reward/mean": lambda step: 0.02 + 0.02 * (step // every % 2)}
    found = alarms(RewardConstant(), exact(nothing, length=80, every=every))

    assert set(found) == {"warning"}
    assert found["warning"].step == step
    assert found["warning"].onset_step == 0
    assert found["warning"].kind == "never_learns"


def test_little_reward_counts_where_most_groups_agree():
    """An eighth, with and without a signal in the groups."""
    little = {"reward/mean": swinging(0.15, 0.15, 0, 0.01)}

    assert when(RewardConstant(), exact(little | {"reward/zero_std_frac": always(0.75)}, length=80)) == {"warning": 49}
    assert when(RewardConstant(), exact(little | {"reward/zero_std_frac": always(0.3)}, length=80)) == {}


@pytest.mark.parametrize(
    "reward",
    [
        swinging(0.5, 0.5, 0, 0.1),
        swinging(0.02, 0.4, 30, 0.01),
        lambda s: 0.02 + 0.004 * s,
        swinging(-3.0, -3.0, 0, 0.1),
        lambda s: 0.3 if s % 5 == 0 else 0.0,
    ],
    ids=["some", "takes off", "rises slowly", "another scale", "now and then"],
)
def test_a_run_that_earns_something_is_left_alone(reward):
    """However little it began with."""
    assert when(RewardConstant(), exact({"reward/mean": reward}, length=90)) == {}


def test_a_run_that_has_learnt_once_is_never_told_of():
    """It collapsed: others say so."""
    reward = lambda s: 0.001 * (s % 2) + (0.0 if s < 20 or s >= 60 else 0.6)  # noqa: E731

    assert when(RewardConstant(), exact({"reward/mean": reward}, length=900)) == {}


def flat(level, noise, seed=0):
    """A reward that stays where it is."""
    chance = random.Random(seed)
    return lambda step: level + chance.gauss(0.0, noise)


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize(
    ("level", "noise", "said"),
    [
        pytest.param(-0.97, 0.01, "warning", id="a PPO's score that hardly differs"),
        pytest.param(0.18, 0.04, "warning", id="little, and nobody counts the groups"),
        pytest.param(-2.0, 0.5, None, id="another scale, which may be as high as it can be"),
        pytest.param(0.45, 0.02, None, id="half of the answers"),
        pytest.param(0.93, 0.02, None, id="nearly all of the answers"),
    ],
)
def test_a_reward_that_certainly_gained_nothing_has_never_learnt(level, noise, said, every):
    """On any scale, whether or not a silent share is logged; and from its first row on."""
    rows = exact({"reward/mean": flat(level, noise)}, length=max(400 // every, 45), every=every)
    found = alarms(RewardConstant(), rows, "never_learns")

    assert worst(RewardConstant(), rows, "never_learns") == said
    assert all(finding.onset_step == 0 and finding.step >= 200 for finding in found.values())


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_rise_is_learning(seed):
    """Four deviations of a row in 400 steps, on a scale of its own; and what rose once and fell again is for others."""
    noise = flat(0.0, 0.1, seed)
    rising = exact({"reward/mean": lambda s: -2.0 + 0.001 * s + noise(s)}, length=400)
    fallen = exact({"reward/mean": lambda s: (-1.0 if 40 <= s < 90 else -2.0) + 0.2 * noise(s)}, length=400)

    assert worst(RewardConstant(), rising, "never_learns") is None
    assert worst(RewardConstant(), fallen, "never_learns") is None
