"""Which metric of two runs parted first: at the planted step and in the planted order, and never by chance."""

import math

import numpy as np
import pytest
from twins import collapsed, parted, records, rows, sound, subject

from rlwatch.compare import Divergence, compare, divergence_of

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("seed", range(5))
def test_metrics_part_at_the_planted_steps_and_in_their_order(seed):
    """The gradient first, then entropy, then reward; nothing else."""
    found = parted(records(collapsed(300, seed, at=170)), records(sound(300, 100 + seed)))

    assert list(found) == ["optim/grad_norm", "policy/entropy", "reward/mean"]
    assert 165 <= found["optim/grad_norm"] <= 175
    assert 185 <= found["policy/entropy"] <= 205
    assert 205 <= found["reward/mean"] <= 215


@pytest.mark.parametrize("steps", [25, 80, pytest.param(250, marks=pytest.mark.thorough)])
def test_sound_twins_do_not_part(steps):
    """Ten metrics each, noise of ten kinds: in 95 of 100 pairs chance explains every one."""
    pairs = [parted(records(sound(steps, seed)), records(sound(steps, 1000 + seed))) for seed in range(100)]

    assert sum(bool(found) for found in pairs) <= 5


def taught(steps, seed, answers, top=0.7, dies=None):
    """Reward of a run that learns, and from a row on is right no more."""
    rate = top * (1.0 - np.exp(-6.0 * np.arange(steps) / steps))
    if dies is not None:
        rate[dies:] = 0.0
    return np.random.default_rng(seed).binomial(answers, rate) / answers


@pytest.mark.parametrize("steps", [40, 80, 200, 400])
@pytest.mark.parametrize("answers", [16, 64])
def test_a_reward_that_dies_in_one_run_diverges(steps, answers):
    """Few rows, or few answers a row: all rows after the place say it, and date it within 12 % of the length."""
    at = round(0.45 * steps)
    found = [
        divergence_of(
            "reward/mean", rows(taught(steps, seed, answers, dies=at)), rows(taught(steps, 100 + seed, answers))
        )
        for seed in range(10)
    ]
    dated = [one for one in found if one is not None and one.dated]

    assert sum(one is not None for one in found) >= (8 if steps * answers == 640 else 10)
    assert len(dated) >= (6 if steps * answers == 640 else 9)
    assert all(abs(one.at - at) <= 0.12 * steps for one in dated)


def test_a_slow_fall_is_dated_to_its_beginning():
    """Not to where it lies far out: of 200 rows the reward is lost over twenty."""
    whole, lost = taught(200, 1, 64), taught(200, 2, 64)
    lost *= np.clip(1.0 - (np.arange(200) - 110) / 20.0, 0.0, 1.0)

    found = divergence_of("reward/mean", rows(lost), rows(whole))

    assert found is not None
    assert abs(found.at - 110) <= 8


@pytest.mark.parametrize("answers", [8, 64])
def test_rewards_of_sound_twins_do_not_diverge(answers):
    """However few rows and answers."""
    pairs = [(steps, seed) for steps in (40, 80, 200) for seed in range(10)]

    assert not [
        (steps, seed)
        for steps, seed in pairs
        if divergence_of("reward/mean", rows(taught(steps, seed, answers)), rows(taught(steps, 500 + seed, answers)))
    ]


def test_what_diverged_and_cannot_be_dated_is_said_so():
    """Two levels so far apart in time that noise hides where the one began: never that it is chance."""
    one, other = taught(24, 3, 4), taught(24, 7, 4, dies=12)
    found = divergence_of("reward/mean", rows(one), rows(other))
    words = compare(subject(records({"reward": one})), subject(records({"reward": other}))).answer

    assert "chance" not in words
    if found is None:
        assert "are too few to tell a divergence from noise" in words or "within noise" in words
    undated = Divergence("reward/mean", 14, 0.62, 0.0, 7.0, 13, dated=False)
    assert undated.text() == "reward/mean diverged, too few rows to date it: 0.62 against 0 at the end, 7 x noise"


def test_identical_runs_have_nothing_to_tell():
    """Not even where they are noisy, or not finite in the same rows."""
    run = collapsed(200, 1, at=100)
    run["kl"][150:] = NAN

    found = compare(subject(records(run)), subject(records(run)))

    assert (found.partings, found.differs_from, found.end) == ((), None, 199)
    assert len(found.compared) == 10


def test_twins_with_one_seed_are_told_apart_where_they_first_differ():
    """The same to the digit up to the change; chance is then each run's own noise, not nothing."""
    one, other = sound(300, 3), sound(300, 3)
    other["entropy"][120:] *= 1.001
    other["grad_norm"][150:] *= 8.0

    found = compare(subject(records(one)), subject(records(other)))

    assert found.differs_from == 120
    assert [(one.metric, one.at) for one in found.partings] == [("optim/grad_norm", 150)]


def test_the_evidence_is_a_sentence():
    """Values of the very row, and how far beyond what was usual."""
    noise = 1 + 0.1 * np.sin(np.arange(300) * 2.4)
    left, right = 0.9 * noise, 0.9 * noise[::-1]
    left[171:] *= 5

    found = divergence_of("optim/grad_norm", rows(left), rows(right))

    assert found is not None
    assert (found.at, found.together, found.left, found.right) == (171, 170, left[171], right[171])
    assert found.text().startswith(f"optim/grad_norm diverged at 171: {left[171]:.3g} against {right[171]:.3g}, ")
    assert found.text().endswith(" x noise")
    assert 10 < found.times < 100


def test_of_runs_that_were_always_apart_it_is_the_change_that_is_measured():
    """A learning rate that was half as large and then was raised, not less than what separated them."""
    x = np.arange(60.0)
    raised = np.where(x < 40, 3e-4, 3e-4 * 1.08 ** (x - 39))
    found = divergence_of("optim/lr", rows(raised), rows(np.full(60, 2e-4)))

    assert found is not None
    assert (found.at, found.times) == (40, INF)
    assert found.text() == "optim/lr diverged at 40: 0.000324 against 0.0002, always 0.0001 apart before"


def test_a_difference_that_is_there_from_the_first_row_is_no_event():
    """Another learning rate is a setting; what parts later comes before it."""
    one, other = sound(200, 3), sound(200, 4)
    one["learning_rate"][:] = 1e-6
    other["learning_rate"][:] = 3e-6
    other["entropy"][100:] += 3.0

    found = compare(subject(records(one)), subject(records(other))).partings

    assert [(one.metric, one.apart_from_start) for one in found] == [("policy/entropy", False), ("optim/lr", True)]
    assert found[0].at == 100
    assert found[1].text().startswith("optim/lr differs from the first rows on: ")


# Values that are no numbers.


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_row_that_is_not_finite_in_one_run_parts(value):
    """At once, whatever comes after."""
    left, right = sound(100, 1)["loss"], sound(100, 2)["loss"]
    left[60] = value

    found = divergence_of("loss/policy", rows(left), rows(right))

    assert found is not None
    assert (found.at, found.together, found.times) == (60, 59, INF)
    assert "both were finite before" in found.text()


def test_rows_that_are_not_finite_in_both_are_no_difference():
    """A metric that is NaN where nothing is generated is so in both; and once so, it is its way."""
    left, right = sound(100, 1)["loss"], sound(100, 2)["loss"]
    left[10] = right[10] = left[70] = NAN

    assert divergence_of("loss/policy", rows(left), rows(right)) is None


def test_a_rise_before_the_nan_is_what_is_dated():
    """The explosion came first."""
    left, right = sound(200, 1)["grad_norm"], sound(200, 2)["grad_norm"]
    left[100:] *= 50
    left[130:] = NAN

    found = divergence_of("optim/grad_norm", rows(left), rows(right))

    assert found is not None
    assert 98 <= found.at <= 104


def test_the_last_rows_of_a_run_that_died_are_enough_where_they_are_far_out():
    """A crash ends the rows; one that is odd is not a parting."""
    left, right = sound(120, 1)["entropy"], sound(200, 2)["entropy"]
    left[-2:] *= 20
    odd = sound(200, 1)["entropy"]
    odd[118] *= 20

    found = divergence_of("policy/entropy", rows(left), rows(right))

    assert found is not None
    assert found.at == 118
    assert divergence_of("policy/entropy", rows(odd), rows(right)) is None


def test_runs_that_come_together_again_say_so_and_come_last():
    """A detour is not where the crash began."""
    one, other = sound(300, 5), sound(300, 6)
    one["entropy"][60:100] *= 4
    one["completions/mean_length"][200:] *= 4

    found = compare(subject(records(one)), subject(records(other)))

    assert [one.metric for one in found.partings] == ["len/mean", "policy/entropy"]
    assert found.first is not None
    assert found.first.metric == "len/mean"
    detour = found.partings[1]
    assert (detour.at, detour.until) == (60, pytest.approx(100, abs=4))
    assert ", until " in detour.text()


# Cadence, gaps, resumes, length.


@pytest.mark.parametrize(("left", "right"), [(1, 5), (5, 1), (4, 6), (10, 10)])
def test_rows_at_other_cadences_are_compared_where_both_have_some(left, right):
    """Dated to the coarser of them."""
    found = parted(
        records(collapsed(1200, 1, at=600), every=left),
        records(sound(1200, 2), every=right),
    )

    assert next(iter(found)) == "optim/grad_norm"
    assert 590 <= found["optim/grad_norm"] <= 640


def test_rows_that_never_meet_are_compared_by_the_stretch_they_stand_for():
    """One logs steps 0, 10, 20, the other 5, 15, 25."""
    left = records(collapsed(1200, 1, at=600), every=10)
    right = [row for row in records(sound(1200, 2)) if row.step % 10 == 5]

    found = parted(left, right)

    assert next(iter(found)) == "optim/grad_norm"
    assert 580 <= found["optim/grad_norm"] <= 660
    assert parted([row for row in records(sound(1200, 3)) if row.step % 10 == 0], right) == {}


def test_what_a_resume_replaced_is_not_compared():
    """The crash of the first attempt was run again and went well."""
    first = records(collapsed(250, 1, at=170))
    again = sound(300, 1)
    second = records({name: values[150:] for name, values in again.items()}, first=150, attempt=2, seq=1000)

    assert "optim/grad_norm" in parted(first, records(sound(300, 2)))
    assert parted([*first, *second], records(sound(300, 2))) == {}


def test_metrics_that_one_lacks_and_metrics_with_too_few_rows_are_named():
    """Nothing is silently left out."""
    one, other = sound(100, 1), sound(100, 2)
    del one["kl"], other["entropy"]
    rare = records(other)
    for row in rare[:5]:
        row.metrics["custom/score"] = 1.0
    mine = records({**one, "custom/score": np.ones(100)})

    found = compare(subject(mine), subject(rare))

    assert (found.only_left, found.only_right, found.short) == (
        ("policy/entropy",),
        ("policy/kl_ref",),
        ("custom/score",),
    )


def test_a_long_series_is_dated_to_the_row():
    """A hundred thousand rows are looked at in blocks first."""
    rng = np.random.default_rng(0)
    left, right = (1 + 0.1 * rng.normal(size=100_000) for _ in range(2))
    left[70_123:] *= 3

    found = divergence_of("optim/grad_norm", rows(left), rows(right))

    assert found is not None
    assert found.at == 70_123
