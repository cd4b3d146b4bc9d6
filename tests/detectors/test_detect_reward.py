"""Dead runs, falling rewards, answers that never end, and the harmless things that look like them."""

import pytest
from shaped_runs import findings, firsts, flat, ramp, run, warned_then_confirmed, worst

from rlwatch.detectors.context import RewardWatch, silent_share
from rlwatch.detectors.reward.reward_drop import RewardDrop
from rlwatch.detectors.reward.silent_groups import NoSignal
from rlwatch.detectors.rollouts.lengths import LengthExplosion
from rlwatch.records import ClosedStep, Severity


def dead_from(start, reward):
    """Groups agree and the gradient vanishes from ``start`` on."""
    return {
        "reward/zero_std_frac": lambda s, n: 1.0 if s >= start else 0.2,
        "reward/std": lambda s, n: 0.0 if s >= start else 0.3,
        "optim/grad_norm": lambda s, n: 1e-8 if s >= start else 0.5,
        "reward/mean": reward,
    }


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_run_that_dies_is_warned_of_then_confirmed(every):
    """Reward at the floor, every group agrees, no gradient."""
    rows = run(dead_from(100, ramp(0.6, 0.01, 90, 100)), length=300, every=every)

    critical = warned_then_confirmed(NoSignal(), rows, begins=100, within=30 + 12 * every)

    assert critical.evidence["silent_share"] > 0.9
    assert "zero-variance groups: " in critical.message


def test_a_run_dead_on_arrival_is_caught():
    """No signal from the first row on: there is nothing to compare with, and no need to."""
    assert worst(NoSignal(), run(dead_from(0, flat(0.01)), length=80)) is Severity.CRITICAL


def test_a_solved_task_is_only_information():
    """All groups agree because all are right."""
    rows = run(dead_from(120, ramp(0.4, 1.0, 10, 110, jitter=0.005)))

    said = firsts(NoSignal(), rows)

    assert set(said) == {Severity.INFO}
    assert "may be solved" in said[Severity.INFO].message


@pytest.mark.parametrize(
    "twist", [{"policy/entropy": ramp(0.3, 1e-4, 60, 110)}, {"len/clipped": lambda s, n: 1.0 if s > 60 else 0.1}]
)
def test_a_good_reward_excuses_neither_a_degenerate_policy_nor_endless_answers(twist):
    """Reward hacking looks healthy on the reward: a warning, and critical once the reward is lost.

    Critical it is not while the reward that was learnt stays: there would be nothing to go back to.
    """
    stays = run(dead_from(120, ramp(0.3, 1.0, 10, 110, jitter=0.005)) | twist)
    lost = run(dead_from(120, lambda s, n: 1.0 if 40 < s < 130 else 0.3) | twist)

    assert worst(NoSignal(), stays) is Severity.WARNING
    assert worst(NoSignal(), lost) is Severity.CRITICAL


def test_one_group_a_row_is_thin_evidence():
    """Without a share, only std = 0: a warning while reward, entropy and gradient object."""
    rows = run({"reward/std": lambda s, n: 0.0, "reward/mean": flat(0.5)}, only={"policy/entropy"})

    assert worst(NoSignal(), rows) is Severity.WARNING


def test_exact_zero_gradients_under_a_frozen_reward_need_no_share():
    """When only gradient norm and reward are logged."""
    rows = run({"optim/grad_norm": lambda s, n: 0.0, "reward/mean": lambda s, n: 0.1}, only=set())

    assert worst(NoSignal(), rows) is Severity.CRITICAL


def test_many_silent_batches_among_good_ones_are_normal():
    """Half of the rows without any gradient."""
    rows = run({"reward/zero_std_frac": lambda s, n: float(s % 2), "optim/grad_norm": lambda s, n: 0.5 * (1 - s % 2)})

    assert findings(NoSignal(), rows) == []


@pytest.mark.parametrize(
    ("metrics", "share"),
    [
        ({"reward/zero_std_frac": 0.4, "reward/std": 0.0}, 0.4),
        ({"reward/zero_std_frac": 7.0}, 1.0),
        ({"reward/std": 0.0, "reward/mean": 3.0}, 1.0),
        ({"reward/std": 0.1}, 0.0),
        ({"adv/min": 0.0, "adv/max": 0.0}, 1.0),
        ({"adv/min": -1.0, "adv/max": 1.0}, 0.0),
        ({"adv/max": 0.0}, None),
        ({}, None),
    ],
)
def test_the_best_measure_of_silence_is_taken(metrics, share):
    """The trainer's count, then the spread of rewards, then the advantages."""
    assert silent_share(ClosedStep(step=0, metrics=metrics)) == share


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_falling_reward_is_warned_of_then_confirmed(every):
    """0.7 to 0.1 in 40 steps, no other metric needed."""
    rows = run({"reward/mean": ramp(0.7, 0.1, 100, 140)}, length=320, every=every, only=set())

    critical = warned_then_confirmed(RewardDrop(), rows, begins=100, within=45 + 8 * every)

    assert critical.baseline == pytest.approx(0.7, rel=0.1)
    assert critical.message.startswith("reward fell from its best level 0.")


def test_a_reward_broken_by_the_first_updates_has_fallen_from_the_first_row():
    """One good row, then 0.2 for ever: the first row counts."""
    rows = run({"reward/mean": lambda s, n: 0.58 if s == 1 else 0.2 + n.gauss(0.0, 0.02)}, length=60, only=set())

    assert worst(RewardDrop(), rows) is Severity.CRITICAL


@pytest.mark.parametrize("outage", [1, 4, 8])
def test_a_short_outage_of_the_verifier_is_never_critical(outage):
    """Reward 0 for a few steps, then back."""
    rows = run({"reward/mean": lambda s, n: 0.0 if 100 <= s < 100 + outage else 0.7 + n.gauss(0.0, 0.03)}, only=set())

    assert worst(RewardDrop(), rows) in (None, Severity.INFO, Severity.WARNING)
    assert findings(RewardDrop(), rows)[-1:] == [] or findings(RewardDrop(), rows)[-1].step < 130


def test_a_noisy_reward_that_goes_nowhere_has_not_fallen():
    """Standard deviation as large as the mean."""
    rows = run({"reward/mean": lambda s, n: n.gauss(0.3, 0.3)}, length=500, only=set())

    assert findings(RewardDrop(), rows) == []


def test_a_smaller_loss_is_critical_once_it_lingers():
    """Two fifths down: a warning soon, critical after sixty steps."""
    rows = run({"reward/mean": lambda s, n: (0.7 if s < 80 else 0.42) + n.gauss(0.0, 0.03)}, only=set())

    said = firsts(RewardDrop(), rows)

    assert said[Severity.WARNING].step < 105
    assert 140 <= said[Severity.CRITICAL].step <= 155


def test_negative_rewards_are_measured_on_their_own_range():
    """From -3 up to -0.2, then -2 again."""
    rows = run(
        {"reward/mean": lambda s, n: (-3.0 if s < 40 else -0.2 if s < 120 else -2.0) + n.gauss(0.0, 0.05)}, only=set()
    )

    assert firsts(RewardDrop(), rows)[Severity.CRITICAL].onset_step == pytest.approx(120, abs=3)


def test_a_reward_that_is_logged_every_eighth_step_is_followed():
    """Reused batches carry no reward."""
    rows = run(
        {"reward/mean": lambda s, n: ramp(0.7, 0.1, 150, 200)(s, n) if s % 8 == 1 else None}, length=500, only=set()
    )

    assert worst(RewardDrop(), rows) is Severity.CRITICAL


def test_the_reward_watch_tells_what_it_sees():
    """Its words end up in the messages of others."""
    fallen, risen, still = RewardWatch(), RewardWatch(), RewardWatch()
    for step in range(60):
        fallen.update(ClosedStep(step=step, metrics={"reward/mean": 0.6 if step < 30 else 0.02}))
        risen.update(ClosedStep(step=step, metrics={"reward/mean": 0.2 + 0.01 * step}))
        still.update(ClosedStep(step=step, metrics={"reward/mean": 0.5}))

    assert fallen.in_words() == " while reward fell from 0.6 to 0.02"
    assert risen.in_words().startswith(" while reward rose from 0.2")
    assert still.in_words() == " while reward stalled: 0.5"
    assert (fallen.fallen(), risen.risen(), still.still) == (True, True, True)
    assert RewardWatch().in_words() == ""


@pytest.mark.parametrize("every", [1, 5])
def test_answers_that_run_into_the_limit_are_warned_of_then_confirmed(every):
    """0.3 to 1.0 truncated, under a reward that gains nothing."""
    rows = run({"len/clipped": lambda s, n: min(0.3 + max(s - 80, 0) / 40, 1.0), "reward/mean": flat(0.5)}, every=every)

    critical = warned_then_confirmed(LengthExplosion(), rows, begins=80, within=80)

    assert "cut at the length limit" in critical.message
    assert critical.evidence["clipped_start"] == pytest.approx(0.3)


def test_longer_answers_that_pay_are_a_remark():
    """The reward rises with them."""
    rows = run(
        {"len/clipped": lambda s, n: min(0.3 + max(s - 80, 0) / 40, 1.0), "reward/mean": ramp(0.3, 0.8, 60, 120)}
    )

    assert worst(LengthExplosion(), rows) is Severity.INFO


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_was_so_from_the_start_is_no_explosion(share):
    """A short limit is a choice."""
    assert findings(LengthExplosion(), run({"len/clipped": lambda s, n: share})) == []
