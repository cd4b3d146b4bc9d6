"""Reward, signal and length at their thresholds: what counts as a fall, as silence, as endless answers."""

import random

import pytest
from exact_runs import alarms, always, exact, swinging, then, when, worst

from rlwatch.detectors.context import RewardWatch, RunContext, silent_share
from rlwatch.detectors.reward.reward_drop import RewardDrop
from rlwatch.detectors.reward.silent_groups import NoSignal
from rlwatch.detectors.rollouts.lengths import LengthExplosion
from rlwatch.records import ClosedStep, Severity


def watched(curve, length=60):
    """A reward watch that has seen the run."""
    watch = RewardWatch()
    for row in exact({"reward/mean": curve}, length=length):
        watch.update(row)
    return watch


def rewards(curve, *, length=120, every=1):
    return exact({"reward/mean": curve}, length=length, every=every)


@pytest.mark.parametrize(("after", "fallen"), [(0.76, False), (0.74, True)])
def test_a_quarter_of_the_best_level_is_a_fall(after, fallen):
    """Of a reward without noise."""
    assert watched(then(1.0, after, 30)).fallen() is fallen


@pytest.mark.parametrize(("value", "low"), [(0.76, False), (0.74, True)])
def test_a_single_row_is_low_by_a_quarter_of_the_best_level(value, low):
    """Or by two deviations, where there is noise: 4.4 of swings of 2."""
    assert watched(always(1.0)).low(value) is low
    assert watched(swinging(10.0, 10.0, at=0, by=2.0)).low(10.0 - 4.3) is False
    assert watched(swinging(10.0, 10.0, at=0, by=2.0)).low(10.0 - 4.5) is True
    assert RewardWatch().low(value) is False


@pytest.mark.parametrize(("by", "fallen"), [(4.2, False), (4.6, True)])
def test_a_fall_is_five_standard_errors_of_its_noise(by, fallen):
    """Swings of 2 around 10 are a deviation of 2.2 a row, 0.87 of a median of ten."""
    assert watched(swinging(10.0, 10.0 - by, at=70, by=2.0), length=100).fallen() is fallen


@pytest.mark.parametrize(("by", "risen"), [(1.3, False), (1.7, True)])
def test_a_rise_is_four_standard_errors_above_the_start(by, risen):
    """The start is the median of the first three rows, 8."""
    assert watched(swinging(10.0, 10.0 + by, at=70, by=2.0), length=100).risen() is risen


@pytest.mark.parametrize(("after", "risen"), [(1.09, False), (1.12, True)])
def test_a_tenth_above_the_start_is_a_rise(after, risen):
    """Of a reward without noise."""
    assert watched(then(1.0, after, 30)).risen() is risen


@pytest.mark.parametrize(("after", "fallen"), [(0.0, False), (-1.5, True)])
def test_a_reward_around_zero_is_measured_on_the_range_it_has_covered(after, fallen):
    """From -10 up to 0.5: half of that level is nothing, a fifth of the way is."""
    curve = lambda s: -10.0 if s < 20 else 0.5 if s < 60 else after  # noqa: E731

    assert watched(curve, length=90).fallen(share=0.1) is fallen


def test_noise_is_the_deviation_of_one_row():
    """Of normal rewards within a fifth, and a jump of the level does not count."""
    noise = random.Random(3)
    values = [noise.gauss(5.0 if i < 30 else 50.0, 0.2) for i in range(60)]

    assert watched(lambda s: values[s]).noise == pytest.approx(0.2, rel=0.2)


def test_the_first_row_is_a_level_less_what_luck_explains():
    """One row of 10 before swings around 4: one and a half deviations off."""
    watch = watched(lambda s: 10.0 if s == 0 else 4.0 + (1.0 if s % 2 else -1.0))

    assert watch.best == pytest.approx(10.0 - 1.5 * watch.noise)
    assert watch.noise == pytest.approx(2.0 / (1.2816 * 2**0.5))


@pytest.mark.parametrize(("after", "first"), [(0.76, {}), (0.74, {"warning": 43}), (0.52, {"warning": 43})])
def test_a_fallen_reward_is_said_after_eight_steps_below(after, first):
    """The median turns at the sixth row, step 35."""
    said = when(RewardDrop(), rewards(then(1.0, after, 30), length=46))

    assert said == first


@pytest.mark.parametrize(("after", "critical"), [(0.68, None), (0.65, 95), (0.52, 95), (0.49, 47)])
def test_half_the_reward_is_critical_after_twelve_steps_and_a_third_after_sixty(after, critical):
    """A smaller loss is only ever a warning."""
    found = alarms(RewardDrop(), rewards(then(1.0, after, 30), length=150))

    assert {f.onset_step for f in found.values()} == {30}
    assert ("critical" in found and found["critical"].step) == (critical or False)


@pytest.mark.parametrize(("every", "change", "warned"), [(5, 200, 210), (10, 200, 220)])
def test_a_fall_in_a_coarse_log_is_said_at_the_second_row_of_a_low_median(every, change, warned):
    """Two of three rows turn the median; a third makes sure, or the same where a row stands for ten steps."""
    found = alarms(RewardDrop(), rewards(then(1.0, 0.1, change), length=60, every=every))
    finding = found.get("warning", found["critical"])

    assert (finding.step, finding.onset_step) == (warned, change)


@pytest.mark.parametrize("every", [16, 25, 50])
def test_the_highest_of_many_noisy_single_rows_is_no_level_to_fall_from(every):
    """Where a row is a level by itself: of 100 rewards that only wander at most a tenth is critical, of falls each one."""

    def critical(seed, fall, noise):
        rng, detector = random.Random(seed), RewardDrop()
        found = [
            finding
            for i in range(60)
            for finding in detector.update(
                ClosedStep(
                    every * i,
                    {"reward/mean": (0.35 if i >= fall else 0.8 if noise < 0.2 else 0.1) + rng.gauss(0, noise)},
                )
            )
        ]
        return any(finding.severity is Severity.CRITICAL for finding in found)

    assert sum(critical(seed, 99, 0.35) for seed in range(100)) <= 10
    assert all(critical(seed, 30, 0.04) for seed in range(100))


def test_a_mean_that_moves_by_a_millionth_of_its_answers_spread_has_not_moved():
    """Rewards that are made alike in every batch have a mean of rounding errors; without their spread nobody knows."""

    def found(spread):
        detector = RewardDrop()
        rows = [{"reward/mean": 1e-6 if i < 20 else -1e-6} | spread for i in range(80)]
        return [finding for i, row in enumerate(rows) for finding in detector.update(ClosedStep(i, row))]

    assert found({"reward/std": 0.5}) == []
    assert found({}) != []


def test_one_row_of_wild_answers_hides_no_later_fall():
    """The usual spread counts: a verifier that once gave a thousand has not made every reward noise."""
    detector, found = RewardDrop(), []
    for i in range(80):
        row = {"reward/mean": 0.8 if i < 40 else 0.2, "reward/std": 1000.0 if i == 10 else 0.3}
        found += detector.update(ClosedStep(i, row))

    assert Severity.CRITICAL in {finding.severity for finding in found}


@pytest.mark.parametrize(("by", "soon"), [(5.4, False), (6.2, True)])
def test_a_noisy_half_must_be_six_standard_errors_to_be_critical_soon(by, soon):
    """Swings of 2.2 around 10; otherwise it has to last."""
    rows = rewards(swinging(10.0, 10.0 - by, at=100, by=2.2), length=220)

    critical = alarms(RewardDrop(), rows)["critical"].step

    assert (critical < 130) is soon
    assert soon or critical >= 160


def test_the_numbers_of_a_fall():
    """Score over the threshold, level before, noise."""
    finding = alarms(RewardDrop(), rewards(then(0.8, 0.3, 30)))["critical"]

    assert finding.score == pytest.approx(0.5 / 0.2)
    assert finding.evidence == {"reward": 0.3, "best": 0.8, "noise": 0}
    assert finding.message == "reward fell from its best level 0.8 to 0.3 over 17 steps"


def test_a_fall_of_negative_rewards_is_scored_by_the_size_of_the_best():
    """From -1 to -3: eight quarters of it."""
    finding = alarms(RewardDrop(), rewards(then(-1.0, -3.0, 30)))["critical"]

    assert (finding.score, finding.baseline, finding.onset_step) == (8.0, -1.0, 30)


@pytest.mark.parametrize(
    ("metrics", "share"),
    [
        ({"reward/std": 0.9e-6}, 1.0),
        ({"reward/std": 1.1e-6}, 0.0),
        ({"reward/std": 1.1e-6, "reward/mean": -2.0}, 1.0),
        ({"reward/std": -0.5}, 0.0),
        ({"adv/min": -2e-6, "adv/max": 0.0}, 0.0),
        ({"adv/min": 0.0, "adv/max": 0.9e-6}, 1.0),
        ({"reward/zero_std_frac": -0.3}, 0.0),
        ({"reward/zero_std_frac": float("nan"), "reward/std": 0.0}, 1.0),
    ],
)
def test_agreement_is_a_millionth_of_the_rewards_size(metrics, share):
    """Floating point leaves a little; a share is a share; NaN is no count."""
    assert silent_share(ClosedStep(step=0, metrics=metrics)) == share


def silence(share, ratio, entropy=1.0, reward=0.5, *, length=80, **more):
    """A share of silent samples and a gradient norm, after twenty rows with 0 and 1."""
    more = {name.replace("_", "/", 1): always(value) for name, value in more.items()}
    return exact(
        {
            "reward/zero_std_frac": then(0.0, share, 20),
            "optim/grad_norm": then(1.0, ratio, 20),
            "policy/entropy": then(1.0, entropy, 20),
            "reward/mean": always(reward),
            **more,
        },
        length=length,
    )


@pytest.mark.parametrize(
    ("share", "ratio", "said"),
    [
        (0.89, 1.0, None),
        (0.91, 1.0, "critical"),
        (0.76, 0.06, None),
        (0.76, 0.04, "critical"),
        (0.74, 0.001, None),
    ],
)
def test_hardly_any_signal_is_nine_tenths_silent_or_three_quarters_with_a_twentieth_of_the_gradient(share, ratio, said):
    """By count alone, or by count and norm."""
    assert worst(NoSignal(), silence(share, ratio)) == said


def one_group_a_row(silent, now):
    """Two answers a row, no gradient logged: rewards of 0.2 and 0.8 by turns, then ``now``, ``silent`` of the groups."""
    quiet = lambda s: 0.3 if s < 40 or s % 10 >= 10 * silent else 0.0  # noqa: E731
    return exact({"reward/mean": lambda s: (0.2, 0.8)[s % 2] if s < 40 else now(s), "reward/std": quiet}, length=120)


@pytest.mark.parametrize(
    ("silent", "now", "said"),
    [
        (0.8, always(0.5), "warning"),
        (0.8, lambda s: 0.5 if s % 5 else 0.9, None),
        (0.7, always(0.5), None),
    ],
)
def test_where_no_gradient_is_logged_batches_that_all_end_the_same_are_its_witness(silent, now, said):
    """Three quarters silent are enough then; batches that still differ, though most of them repeat, are no witness."""
    assert worst(NoSignal(), one_group_a_row(silent, now)) == said


@pytest.mark.parametrize(("reward", "said"), [(0.68, "critical"), (0.72, "info"), (1.0, "info"), (1.05, "critical")])
def test_only_on_the_scale_of_zero_to_one_does_a_high_reward_mean_solved(reward, said):
    """A reward of 3 that stands still says nothing about the task."""
    assert worst(NoSignal(), silence(1.0, 0.0, reward=reward)) == said


@pytest.mark.parametrize(("entropy", "said"), [(0.11, "info"), (0.09, "critical")])
def test_agreement_at_a_tenth_of_the_entropy_is_a_collapse_not_a_solution(entropy, said):
    """However good the reward."""
    assert worst(NoSignal(), silence(1.0, 0.0, entropy, reward=1.0)) == said


@pytest.mark.parametrize(("vocabulary", "said"), [(2.0**40, "critical"), (2.0**20, "info")])
def test_agreement_below_a_thousandth_of_log_v_is_one_too(vocabulary, said):
    """A fifth of the start is little enough where the vocabulary is large."""
    rows = silence(1.0, 0.0, 0.2, reward=1.0, policy_vocab_size=vocabulary)
    small = [ClosedStep(r.step, {**r.metrics, "policy/entropy": 0.1 * r.metrics["policy/entropy"]}) for r in rows]

    assert worst(NoSignal(), small) == said


@pytest.mark.parametrize(("clipped", "said"), [(0.94, "info"), (0.96, "critical")])
def test_agreement_of_answers_that_never_end_is_no_solution(clipped, said):
    """Nineteen in twenty cut off."""
    assert worst(NoSignal(), silence(1.0, 0.0, reward=1.0, len_clipped=clipped)) == said


def test_the_numbers_of_silence():
    """Share, norm and reward, with the rows before as measure."""
    finding = alarms(NoSignal(), silence(1.0, 0.01))["critical"]

    assert finding.onset_step == 20
    assert finding.evidence["silent_share"] >= 0.75
    assert finding.evidence["grad_norm"] == 0.01
    assert finding.evidence["grad_ratio"] == 0.01
    assert (finding.evidence["reward"], finding.evidence["reward_start"]) == (0.5, 0.5)
    assert finding.score == pytest.approx(finding.evidence["silent_share"] / 0.75, rel=1e-5)
    assert "reward 0.5, gradient norm 0.01" in finding.message


@pytest.mark.parametrize(("norm", "said"), [(0.9e-7, "critical"), (1.1e-7, None)])
def test_a_gradient_of_nothing_under_a_frozen_reward_is_silence_by_itself(norm, said):
    """Below 1e-7 there is none."""
    rows = exact({"optim/grad_norm": always(norm), "reward/mean": always(0.2)})

    assert worst(NoSignal(), rows) == said


@pytest.mark.parametrize("witness", [{"reward/mean": then(1.0, 0.1, 20)}, {"optim/grad_norm": always(0.9e-7)}, {}])
def test_a_spread_of_zero_needs_a_witness_to_be_critical(witness):
    """One group a row agrees easily: a fallen reward or a vanished gradient must say so too."""
    rows = exact({"reward/std": then(0.3, 0.0, 20), "reward/mean": always(0.5)} | witness, length=80)

    assert worst(NoSignal(), rows) == ("critical" if witness else "warning")


def test_a_gradient_that_was_always_zero_has_no_ratio_but_zero():
    """And one that appears where there was none has none at all."""
    company = RunContext()
    for row in exact({"optim/grad_norm": always(0.0)}):
        company.update(row)
    still = company.grad_ratio
    for row in exact({"optim/grad_norm": lambda s: 1.0 if s > 59 else None}, length=80):
        company.update(row)

    assert (still, company.grad_ratio, company.mute()) == (0.0, None, False)


def cut(before, after, **more):
    return exact({"len/clipped": then(before, after, 30)} | more, length=90)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(0.3, 0.94, "warning"), (0.3, 0.96, "critical"), (0.87, 0.96, None), (0.85, 0.96, "critical")],
)
def test_answers_run_into_the_limit_from_nineteen_in_twenty_up_and_a_tenth_more_than_at_first(before, after, said):
    """What was nearly so from the start is a choice; less than nearly all is never critical."""
    assert worst(LengthExplosion(), cut(before, after)) == said


def test_endless_answers_are_said_after_eight_steps_and_critical_after_thirty():
    """With the share then and now, and the length if it is known."""
    found = alarms(LengthExplosion(), cut(0.2, 1.0, **{"len/mean": always(512.0), "reward/mean": always(0.5)}))

    assert {severity: (f.step, f.onset_step) for severity, f in found.items()} == {
        "warning": (43, 30),
        "critical": (65, 30),
    }
    assert found["warning"].evidence == {"clipped": 1, "clipped_start": 0.2, "length": 512, "reward": 0.5}
    assert found["warning"].score == pytest.approx(1 / 0.95)
    assert found["warning"].message == (
        "100% of responses are cut at the length limit (mean length 512 tokens), 20% at the start"
        " while reward stalled: 0.5"
    )


def test_endless_answers_are_dated_to_half_way_up():
    """Between the start and nineteen in twenty."""
    rows = exact({"len/clipped": lambda s: 0.15 if s < 30 else 0.54 if s < 35 else 0.56 if s < 40 else 1.0}, length=90)

    assert alarms(LengthExplosion(), rows)["critical"].onset_step == 35
