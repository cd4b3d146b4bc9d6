"""Rewards that stand still, that are gamed, or that only the mix of data moved."""

import math
import random

import pytest
from exact_runs import alarms, always, exact, then, when, worst
from shaped_runs import findings, run

from rlwatch.detectors.reward.reward_constant import RewardConstant
from rlwatch.detectors.reward.reward_drop import RewardDrop
from rlwatch.detectors.reward.reward_hacking import HeldOut, RewardHacking
from rlwatch.records import ClosedStep, Event


def wobbling(level, by=0.02, seed=0):
    """A level, or a curve, with seeded noise that is the same at each call."""
    at = level if callable(level) else always(level)
    return lambda step: at(step) + by * random.Random(f"{seed}-{step}").gauss(0.0, 1.0)


def rising(start, end, last):
    """A line from ``start`` to ``end`` at ``last``, flat from there."""
    return lambda step: start + (end - start) * min(step / last, 1.0)


# A constant reward


@pytest.mark.parametrize(("every", "said"), [(1, 60), (5, 110), (10, 180)])
def test_a_reward_that_freezes_is_told_after_fifteen_rows(every, said):
    """Twenty steps at least; dated to the first row of the value."""
    rows = exact({"reward/mean": lambda s: 0.3 if s >= 40 else 0.5 + 1e-3 * s}, length=70, every=every)

    found = alarms(RewardConstant(), rows)

    assert set(found) == {"warning"}
    assert (found["warning"].step, found["warning"].onset_step) == (said, 40)
    assert found["warning"].message.startswith("the mean reward has been exactly 0.3 for")


def test_discrete_rewards_of_small_batches_repeat_and_that_is_usual():
    """A single group, nearly always wrong: stretches of a dozen zeros, then ones of forty are not yet three times that."""
    reward = lambda s: float(s % 13 == 0 and s < 100)  # noqa: E731

    assert when(RewardConstant(), exact({"reward/mean": reward}, length=127)) == {}
    assert when(RewardConstant(), exact({"reward/mean": reward}, length=140)) == {"warning": 127}


@pytest.mark.parametrize(
    ("reward", "spread", "severity", "words"),
    [
        (always(0.0), always(0.0), "warning", "the verifier or the policy always does the same"),
        (then(0.4, 0.0, 20), always(0.2), "warning", "most likely the metric itself is stuck"),
        (always(1.0), always(0.0), "info", "always does the same"),
        (always(0.0), always(None), "warning", "always does the same"),
    ],
)
def test_what_the_spread_says_of_a_constant_mean(reward, spread, severity, words):
    """No spread is a dead signal, or a full score."""
    curves = {
        "reward/mean": lambda s: reward(s) + (0.01 * s if s < 20 and reward(0) == 0.4 else 0.0),
        "reward/std": spread,
    }
    found = alarms(RewardConstant(), exact(curves), "reward_constant")

    assert set(found) == {severity}
    assert words in found[severity].message


@pytest.mark.parametrize(
    ("entropy", "gradient", "words"),
    [
        (then(1.0, math.nan, 20), then(0.5, math.nan, 20), "the policy is dead (policy/entropy = nan, optim/grad_norm"),
        (then(1.0, 1e-4, 20), always(0.5), "the policy always answers the same (policy/entropy = 0.0001)"),
        (always(1.0), then(0.5, 0.0, 20), "the policy gets no gradient (optim/grad_norm = 0)"),
        (always(1.0), always(0.5), "most likely the metric itself is stuck"),
    ],
)
def test_a_policy_that_is_dead_is_the_reason_and_not_the_metric(entropy, gradient, words):
    """Only a policy that does well leaves the metric to suspect."""
    curves = {"reward/mean": lambda s: 0.01 * s if s < 20 else 0.0, "reward/std": always(0.2)}

    found = alarms(RewardConstant(), exact(curves | {"policy/entropy": entropy, "optim/grad_norm": gradient}))

    assert words in found["warning"].message


def test_a_full_score_of_a_settled_policy_is_no_dead_one():
    """Solved: no entropy, no gradient, nothing wrong."""
    curves = {"reward/mean": always(1.0), "policy/entropy": always(1e-4), "optim/grad_norm": always(0.0)}

    assert "dead" not in alarms(RewardConstant(), exact(curves))["info"].message


def test_gaps_do_not_end_a_stretch_and_one_other_value_does():
    """NaN is no value of the reward."""
    gap = exact({"reward/mean": lambda s: math.nan if s in (10, 11) else 0.3})
    other = exact({"reward/mean": lambda s: 0.9 if s == 12 else 0.3}, length=30)

    assert when(RewardConstant(), gap, "reward_constant") == {"warning": 20}
    assert when(RewardConstant(), other, "reward_constant") == {}


@pytest.mark.parametrize("by", ["event", "step"])
def test_a_resume_counts_anew(by):
    """The same steps again are no longer stretch."""
    judge = RewardConstant()
    assert when(judge, exact({"reward/mean": always(0.3)}, length=14), "reward_constant") == {}
    if by == "event":
        judge.notice(Event("resume", step=14))

    assert when(judge, exact({"reward/mean": always(0.3)}, length=14), "reward_constant") == {}


@pytest.mark.parametrize("spread", ["reward/std", "optim/grad_norm"])
def test_a_mean_that_never_moved_over_rewards_that_vary_is_normalised(spread):
    """Spread, or a gradient where no spread is logged."""
    still = {"reward/mean": always(0.0), spread: always(1.0)}

    assert when(RewardConstant(), exact(still), "reward_constant") == {}
    assert when(RewardConstant(), exact(still), "reward_uninformative") == {"info": 9}
    assert when(RewardConstant(), exact(still | {spread: always(0.0)}), "reward_constant") == {"warning": 20}


@pytest.mark.parametrize("rows", [{"reward/mean": always(1.0)}, {"reward/mean": lambda s: 0.1 if s == 4 else 0.0}])
def test_a_mean_that_moved_and_a_full_score_carry_information(rows):
    """However small the step; a task that is solved from the first row on has nothing left to show."""
    assert when(RewardConstant(), exact(rows, length=60), "reward_uninformative") == {}


# A gamed reward


def test_a_held_out_score_that_falls_under_a_rising_reward_is_likely_gaming():
    """0.6 to 0.3 from step 150 on, evaluated every tenth step."""
    score = lambda s: (0.6 if s < 150 else 0.3) + 0.005 * (s // 10 % 2) if s % 10 == 0 else None  # noqa: E731
    rows = exact({"reward/mean": wobbling(rising(0.2, 0.8, 300)), "val/score": score}, length=300)

    found = alarms(RewardHacking(), rows)

    assert set(found) == {"warning"}
    assert 160 <= found["warning"].step <= 210
    assert found["warning"].evidence["sure"] == "likely"
    assert found["warning"].evidence["signs"] == ["val/score"]
    assert "the held-out score val/score fell from 0.6" in found["warning"].message


@pytest.mark.parametrize("name", ["val-core/gsm8k/acc/mean@1", "val/score"])
def test_any_held_out_score_will_do_but_its_spread_is_none(name):
    """As trainers name them."""
    rows = exact(
        {
            "reward/mean": wobbling(rising(0.2, 0.8, 200)),
            name: then(0.6, 0.2, 100),
            "val-core/x/std": then(0.6, 0.2, 100),
        },
        length=200,
    )

    assert alarms(RewardHacking(), rows)["warning"].evidence["signs"] == [name]


def test_two_unrelated_doubts_are_a_hint_and_no_more():
    """Three times as long, and nearly deterministic: learning can look like that."""
    doubts = {"len/mean": wobbling(then(200.0, 700.0, 80), by=5.0), "policy/entropy": then(0.5, 0.01, 80)}
    rows = exact({"reward/mean": wobbling(rising(0.2, 0.8, 60)), **doubts}, length=160)

    found = alarms(RewardHacking(), rows)

    assert set(found) == {"info"}
    assert found["info"].evidence["sure"] == "hint"
    assert "(only a hint)" in found["info"].message


@pytest.mark.parametrize(
    ("metric", "start", "fine", "doubtful", "weight"),
    [
        ("text/looping_frac", 0.01, 0.099, 0.1, 2),
        ("text/looping_frac", 0.25, 0.74, 0.75, 2),
        ("text/repetition", 0.1, 0.39, 0.4, 2),
        ("text/repetition", 0.25, 0.49, 0.5, 2),
        ("text/garbled", 0.001, 0.019, 0.02, 2),
        ("text/garbled", 0.125, 0.62, 0.625, 2),
        ("len/mean", 1000.0, 251.0, 250.0, 2),
        ("len/mean", 1000.0, 2990.0, 3000.0, 1),
        ("len/clipped", 0.125, 0.49, 0.5, 1),
        ("len/clipped", 0.375, 0.74, 0.75, 1),
        ("policy/entropy", 1.0, 0.051, 0.05, 1),
        ("reward/zero_std_frac", 0.25, 0.79, 0.8, 1),
        ("reward/zero_std_frac", 0.45, 0.89, 0.9, 1),
        ("reward/unique_answers", 0.5, 0.21, 0.2, 1),
        ("policy/kl_ref", 0.01, 0.99, 1.0, 1),
        ("policy/kl_ref", 0.0625, 1.2, 1.25, 1),
    ],
)
def test_each_doubt_begins_at_its_limit_and_has_its_weight(metric, start, fine, doubtful, weight):
    """Beside half of the distinct answers gone and agreement of entropies, two weak signs by themselves."""
    beside = {"policy/entropy": then(1.0, 0.01, 80), "reward/unique_answers": then(0.5, 0.1, 80)}
    pays = {"reward/mean": wobbling(rising(0.2, 0.8, 60))}
    said = {}
    for after in (fine, doubtful):
        rows = exact(beside | {metric: then(start, after, 80)} | pays, length=160)
        said[after] = next(iter(alarms(RewardHacking(), rows).values()), None)
    usual = 2 - (metric in beside)

    assert (said[fine].evidence["weight"] if said[fine] else usual) == usual
    assert said[doubtful].evidence["weight"] == usual + weight
    assert metric in said[doubtful].evidence["signs"]


@pytest.mark.parametrize(
    ("loops", "severity"), [(0.6, "warning"), (0.05, "info")], ids=["one of them is grave", "none of them is"]
)
def test_five_weights_warn_where_one_is_grave(loops, severity):
    """Weak signs come with learning, however many there are."""
    doubts = {
        "text/looping_frac": then(0.01, loops, 80),
        "len/clipped": then(0.125, 0.9, 80),
        "policy/entropy": then(1.0, 0.01, 80),
        "reward/zero_std_frac": then(0.25, 0.95, 80),
    }
    rows = exact({"reward/mean": wobbling(rising(0.2, 0.8, 60))} | doubts, length=160)
    without = exact({"reward/mean": wobbling(rising(0.2, 0.8, 60))} | dict(list(doubts.items())[:3]), length=160)

    assert worst(RewardHacking(), rows) == severity
    assert worst(RewardHacking(), without) == "info"


def test_many_doubts_one_of_them_grave_are_likely():
    """Loops, cut responses, agreeing groups, no entropy."""
    doubts = {
        "text/looping_frac": then(0.01, 0.6, 80),
        "len/clipped": then(0.1, 0.9, 80),
        "policy/entropy": then(0.5, 0.01, 80),
        "reward/zero_std_frac": then(0.3, 0.95, 80),
    }
    rows = exact({"reward/mean": wobbling(rising(0.2, 0.8, 60)), **doubts}, length=160)

    assert worst(RewardHacking(), rows) == "warning"


@pytest.mark.parametrize(
    "curves",
    [
        {"len/mean": then(200.0, 700.0, 80)},
        {"policy/entropy": then(0.5, 0.01, 80)},
        {"val/score": rising(0.2, 0.7, 150)},
        {"val/score": wobbling(0.5, by=0.05)},
        {"val/score": lambda s: 0.05 if s == 100 else 0.5},
    ],
    ids=["longer", "surer", "validated", "noisy score", "one bad evaluation"],
)
def test_one_weak_doubt_or_a_healthy_score_says_nothing(curves):
    """Learning shortens entropy, lengthens answers, and scores are noisy."""
    rows = exact({"reward/mean": wobbling(rising(0.2, 0.8, 150)), **curves}, length=200)

    assert alarms(RewardHacking(), rows) == {}


@pytest.mark.parametrize("reward", [always(0.5), rising(0.8, 0.1, 100)], ids=["flat", "falling"])
def test_without_a_rising_reward_nothing_is_gamed(reward):
    """A score that falls with the reward is a crash."""
    rows = exact({"reward/mean": wobbling(reward), "val/score": then(0.6, 0.1, 100)}, length=200)

    assert alarms(RewardHacking(), rows) == {}


def test_a_score_that_falls_with_the_training_reward_has_not_been_paid_for():
    """The level of the training reward at the best score is remembered."""
    score = HeldOut()
    for step, (value, reward) in enumerate([(0.6, 0.5)] * 10 + [(0.2, 0.3)] * 20):
        score.update(step, value, reward)

    assert (score.fell, score.stalls) == (False, False)
    assert score.best == pytest.approx(0.6)
    assert score.now == pytest.approx(0.2)


# The mix of data


def mixed(first, second, share, total=200):
    """Mean reward and those of two tasks; ``share(step)`` of the batch is of the first."""
    a, b = wobbling(first, seed=1), wobbling(second, seed=2)
    return exact(
        {
            "reward/by_task/easy": a,
            "reward/by_task/hard": b,
            "reward/mean": lambda s: share(s) * a(s) + (1.0 - share(s)) * b(s),
        },
        length=total,
    )


def test_a_change_of_the_data_mix_is_no_crash():
    """Nine tenths easy, then one tenth; each task pays what it paid."""
    rows = mixed(0.9, 0.1, then(0.9, 0.1, 100))

    found = alarms(RewardDrop(), rows)

    assert set(found) == {"info"}
    assert found["info"].message.endswith("no task became worse, their shares of the batch changed")


@pytest.mark.parametrize("second", [0.1, then(0.1, 0.02, 100)])
def test_a_task_that_became_worse_is_one_whatever_the_mix(second):
    """The easy one falls to a third."""
    rows = mixed(then(0.9, 0.3, 100), second, then(0.9, 0.7, 100))

    assert worst(RewardDrop(), rows) == "critical"


def test_more_tasks_than_are_followed_excuse_nothing():
    """Some of them are not seen."""
    tasks = {f"reward/by_task/{i}": always(0.5) for i in range(20)}

    assert worst(RewardDrop(), exact({"reward/mean": then(0.9, 0.1, 100), **tasks}, length=200)) == "critical"


@pytest.mark.parametrize("detector", [RewardConstant, RewardHacking])
@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize(
    "curves",
    [
        {"reward/mean": lambda s, n: 0.0 if 100 <= s < 108 else 0.5 + n.gauss(0.0, 0.05)},
        {"len/mean": lambda s, n: 2000.0 if s == 120 else 400.0 + n.gauss(0.0, 15.0)},
        {"optim/lr": lambda s, n: 1e-5 if 100 <= s < 110 else 1e-6},
    ],
    ids=["hard batches", "a spike", "a learning-rate blip"],
)
def test_harmless_events_are_none_of_its_business(detector, every, curves):
    """Hard data, one spike, another rate for ten steps."""
    assert findings(detector(), run(curves, length=300, every=every)) == []


def test_the_score_of_a_row_of_its_own_is_heard():
    """Evaluations are logged apart from training."""
    rows = [
        ClosedStep(step=s, metrics={"reward/mean": wobbling(rising(0.2, 0.8, 200))(s)})
        if s % 5
        else ClosedStep(step=s, metrics={"val/score": 0.6 if s < 150 else 0.2})
        for s in range(1, 260)
    ]

    assert worst(RewardHacking(), rows) == "warning"


def test_a_score_that_slips_from_evaluation_to_evaluation_is_a_fall_however_few_there_are():
    """Every 25 steps one: up for six of them, then down to two thirds under a reward that rises on."""
    level = lambda s: 0.2 + 0.0015 * s if s <= 150 else 0.425 - 0.0007 * (s - 150)  # noqa: E731
    score = lambda s: None if s % 25 else level(s) + (0.02 if s % 50 else -0.02)  # noqa: E731
    rows = exact({"reward/mean": wobbling(rising(0.2, 0.9, 300)), "val/score": score}, length=400)

    assert "fell from" in alarms(RewardHacking(), rows)["warning"].message
