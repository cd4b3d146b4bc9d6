"""A task that is solved is not broken, and what broke later did not break while it was solved."""

import pytest
from exact_runs import alarms, always, exact, then, worst

from rlwatch.detectors.exploration.entropy import EntropyCollapse
from rlwatch.detectors.joint import JointEvidence
from rlwatch.detectors.reward.silent_groups import NoSignal
from rlwatch.detectors.rollouts.broken_output import DegenerateBatch


def climbing(low, high, start, end):
    """A straight way from ``low`` to ``high``, with the noise of small batches."""

    def curve(step):
        share = min(max((step - start) / (end - start), 0.0), 1.0)
        return low + (high - low) * share + 0.02 * ((step * 7) % 5 - 2) * (1.0 - share)

    return curve


def solved(**more):
    """Reward .1 to .95 by step 40; from then on groups agree because they are right."""
    return {
        "reward/mean": climbing(0.1, 0.95, 5, 40),
        "reward/zero_std_frac": climbing(0.3, 0.95, 10, 45),
        "reward/std": climbing(0.4, 0.05, 5, 40),
        "optim/grad_norm": climbing(0.5, 0.01, 5, 45),
    } | more


CUT = {name: always(64.0) for name in ("len/min", "len/mean", "len/max")} | {"len/clipped": always(1.0)}
ALL = (NoSignal, EntropyCollapse, DegenerateBatch, JointEvidence)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(
    "curves",
    [
        pytest.param(solved(), id="learnt"),
        pytest.param(solved(**CUT), id="learnt within a limit that cuts every answer from the first row on"),
        pytest.param(
            {
                "reward/mean": lambda s: 0.95 + 0.01 * (s % 3),
                "reward/zero_std_frac": lambda s: 0.85 + 0.05 * (s % 3),
                "policy/entropy": climbing(0.15, 0.02, 0, 60),
                "optim/grad_norm": always(0.001),
            },
            id="good from the first row on, and ever surer",
        ),
        pytest.param(
            {
                "reward/mean": lambda s: 0.95 + 0.01 * (s % 3),
                "reward/zero_std_frac": climbing(0.2, 0.95, 20, 60),
                "policy/entropy": climbing(0.4, 0.05, 0, 60),
            },
            id="groups come to agree where the reward cannot rise",
        ),
    ],
)
def test_nothing_is_said_to_be_broken_where_the_task_is_solved(curves, every):
    """At most a remark."""
    rows = exact(curves, length=200 // every, every=every)

    assert {made.name: worst(made(), rows) for made in ALL if worst(made(), rows) not in (None, "info")} == {}


@pytest.mark.parametrize("every", [1, 5])
def test_a_policy_that_keeps_what_it_learnt_and_learns_no_more_is_not_broken(every):
    """The reward stands at .75, the most it can be or where it is stuck. There is nothing to roll back."""
    curves = {
        "reward/mean": climbing(0.17, 0.75, 3, 36),
        "reward/zero_std_frac": climbing(0.0, 0.95, 10, 45),
        "policy/entropy": climbing(2.7, 0.07, 0, 45),
        "optim/grad_norm": climbing(0.5, 0.0, 5, 45),
    }
    stuck = exact(curves, length=200 // every, every=every)
    lost = exact(curves | {"reward/mean": then(0.75, 0.1, 60)}, length=200 // every, every=every)

    assert worst(NoSignal(), stuck) == "warning"
    assert worst(EntropyCollapse(), stuck) in (None, "info")
    assert worst(JointEvidence(), stuck) in (None, "info")
    assert worst(NoSignal(), lost) == "critical"


def test_answers_that_came_to_be_cut_are_no_solution_however_the_reward_rose():
    """From a penalty to nothing: all answers are the limit, and none says anything."""
    curves = {
        "reward/mean": climbing(-2.5, 0.0, 5, 60),
        "reward/zero_std_frac": then(0.1, 0.95, 60),
        "len/clipped": then(0.5, 1.0, 60),
    }

    assert worst(NoSignal(), exact(curves, length=120)) == "critical"


def test_groups_that_agreed_from_the_first_row_on_answers_that_are_all_cut_teach_nothing():
    """The reward is high and never rose: it may not be looking at the answers."""
    curves = {"reward/mean": lambda s: 0.88 + 0.01 * (s % 3), "reward/zero_std_frac": always(1.0)} | CUT
    found = alarms(NoSignal(), exact(curves, length=60))

    assert found["critical"].onset_step == 0


@pytest.mark.parametrize("level", [0.9, 8.0])
@pytest.mark.parametrize("every", [1, 5])
def test_the_loss_of_signal_begins_where_groups_agree_on_wrong_answers(level, every):
    """Not with the 65 steps before, in which they agreed because they were right, on any scale."""
    curves = {
        "reward/mean": lambda s: level * climbing(0.1, 1.0, 3, 25)(s) if s < 90 else 0.0,
        "reward/zero_std_frac": climbing(0.3, 0.95, 5, 25),
        "optim/grad_norm": always(0.01),
    }
    found = alarms(NoSignal(), exact(curves, length=200 // every, every=every), "no_signal")

    assert 90 <= found["critical"].onset_step <= 90 + 2 * every


def test_a_reward_of_one_for_answers_that_are_all_cut_is_not_worthless():
    """Right at the limit until step 60, nothing after it: it broke then."""
    curves = solved(**CUT) | {
        "reward/mean": lambda s: climbing(0.2, 1.0, 3, 25)(s) if s < 60 else 0.0,
        "reward/zero_std_frac": then(0.3, 1.0, 25),
    }
    found = alarms(DegenerateBatch(), exact(curves, length=100))

    assert found["critical"].onset_step == 60
    assert found["critical"].step <= 72
