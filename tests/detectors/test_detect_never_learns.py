"""Dead from the start, and the slow starts that are none."""

import pytest
from exact_runs import alarms, always, exact, swinging, when

from rlwatch.detectors.reward.reward_constant import RewardConstant


@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_reward_of_next_to_nothing_is_told_after_fifty_rows(every):
    """Once it is sure, from the first row on."""
    nothing = {"reward/mean": lambda step: 0.02 + 0.02 * (step // every % 2)}
    found = alarms(RewardConstant(), exact(nothing, length=80, every=every))

    assert set(found) == {"warning"}
    assert found["warning"].step == max(50, 49 * every)
    assert found["warning"].onset_step == 0
    assert found["warning"].kind == "never_learns"


def test_little_reward_counts_where_most_groups_agree():
    """An eighth, with and without a signal in the groups."""
    little = {"reward/mean": swinging(0.15, 0.15, 0, 0.01)}

    assert when(RewardConstant(), exact(little | {"reward/zero_std_frac": always(0.75)}, length=80)) == {"warning": 50}
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
