"""Groups that teach nothing, and answers that become one."""

import math

import pytest
from exact_runs import alarms, always, exact, then, when, worst
from shaped_runs import findings, flat, ramp, run

from rlwatch.detectors.exploration.diversity_decay import DiversityDecay
from rlwatch.detectors.reward.silent_groups import ZeroVariance

AT = 100


def groups(silent, right):
    """``silent`` share of the samples in groups that agree, ``right`` of those all right."""
    return {
        "reward/zero_std_frac": silent,
        "reward/zero_std_right_frac": lambda s: silent(s) * right,
        "reward/zero_std_wrong_frac": lambda s: silent(s) * (1.0 - right),
    }


@pytest.mark.parametrize(
    ("right", "side", "severity", "words"),
    [
        (0.9, "easy", "info", "the data have become too easy"),
        (0.1, "hard", "warning", "the data are too hard, or the policy got worse"),
        (0.5, "mixed", "warning", "few prompts are in between"),
    ],
)
def test_groups_that_agree_are_split_into_too_easy_and_too_hard(right, side, severity, words):
    """From 20 % to 85 %."""
    found = alarms(ZeroVariance(), exact(groups(then(0.2, 0.85, AT), right), length=160))

    assert set(found) == {severity}
    assert found[severity].evidence["side"] == side
    assert found[severity].message.startswith("8")
    assert words in found[severity].message
    assert found[severity].onset_step == AT


@pytest.mark.parametrize(("every", "within"), [(1, 50), (5, 75), (10, 130)])
def test_the_share_alone_is_a_warning_at_any_cadence(every, within):
    """As TRL logs it."""
    found = alarms(
        ZeroVariance(), exact({"reward/zero_std_frac": then(0.2, 0.9, AT)}, length=60 + 200 // every, every=every)
    )

    assert set(found) == {"warning"}
    assert AT + 20 <= found["warning"].step <= AT + within
    assert found["warning"].onset_step == AT
    assert found["warning"].evidence["side"] == "unknown"


def test_the_two_sides_add_up_where_only_they_are_logged():
    """And so do few effective groups."""
    sides = groups(then(0.2, 0.9, AT), 0.0)
    del sides["reward/zero_std_frac"]

    assert set(alarms(ZeroVariance(), exact(sides, length=160))) == {"warning"}
    few = alarms(ZeroVariance(), exact({"reward/effective_groups": then(60.0, 10.0, AT)}, length=160))["warning"]
    assert few.message == "only 10 groups have reward variance, 60 at the start"
    assert few.metric == "reward/effective_groups"


@pytest.mark.parametrize(
    "share",
    [always(0.85), then(0.6, 0.75, AT), then(0.2, 0.5, AT), lambda s: float(s % 2), then(0.2, math.nan, AT)],
    ids=["from the start", "a little more", "not half", "every second batch", "not measured"],
)
def test_what_has_always_been_so_or_is_not_most_of_the_batch_is_no_news(share):
    """A hard data set, an easy one, small batches."""
    assert when(ZeroVariance(), exact({"reward/zero_std_frac": share}, length=180)) == {}


def test_a_few_hard_batches_are_no_news():
    """Eight steps."""
    rows = run({"reward/zero_std_frac": lambda s, n: 1.0 if 100 <= s < 108 else 0.3}, only=set())

    assert findings(ZeroVariance(), rows) == []


def test_many_zero_advantages_under_rewards_that_differ_are_the_quantile_baseline_at_work():
    """QAE gives four fifths of the responses an advantage of 0; the share is that of rewards."""
    rows = exact({"reward/zero_std_frac": always(0.1), "adv/min": always(0.0), "adv/max": always(2.0)}, length=160)

    assert when(ZeroVariance(), rows) == {}


# Diversity


def test_pass_at_k_that_falls_while_pass_at_1_rises_is_told():
    """0.8 to 0.6 under 0.3 to 0.5."""
    rows = exact({"reward/pass_at_8": then(0.8, 0.6, AT), "reward/pass_at_1": then(0.3, 0.5, AT)}, length=160)

    finding = alarms(DiversityDecay(), rows)["warning"]

    assert (
        finding.message
        == "pass@8 fell from 0.8 to 0.6 while pass@1 (0.5) did not: the policy forgets answers it could find"
    )
    assert 100 < finding.onset_step <= 115
    assert finding.step <= 135
    assert finding.evidence["k"] == 8


def test_a_gap_that_closes_while_pass_at_1_stalls_is_told():
    """0.48 to 0.39 over 0.35: too little of a fall to count by itself, but a third of the gap."""
    rows = exact({"reward/pass_at_4": then(0.48, 0.39, AT), "reward/pass_at_1": always(0.35)}, length=160)

    finding = alarms(DiversityDecay(), rows)["warning"]

    assert "pass@4 is 0.04 above pass@1, 0.13 at the start" in finding.message
    assert "more samples find nothing new" in finding.message


@pytest.mark.parametrize("every", [1, 5, 10])
def test_distinct_answers_that_vanish_under_a_stalled_reward_are_told(every):
    """0.8 to 0.2; at every cadence."""
    rows = run(
        {"reward/unique_answers": ramp(0.8, 0.2, 200, 220), "reward/mean": lambda s, n: 0.4 + n.gauss(0.0, 0.02)},
        length=500,
        every=every,
        only=set(),
    )

    said = findings(DiversityDecay(), rows)

    assert {f.severity.value for f in said} == {"warning"}
    assert 200 < said[0].step <= 260 + 10 * every
    assert said[0].message.startswith("reward/unique_answers is 0.")
    assert said[-1].evidence["answers"] == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    "curves",
    [
        {"reward/pass_at_8": flat(0.85, 0.03), "reward/pass_at_1": ramp(0.3, 0.8, 20, 180, 0.03)},
        {"reward/unique_answers": ramp(0.8, 0.2, 20, 180), "reward/mean": ramp(0.3, 0.8, 20, 180)},
        {"reward/pass_at_8": ramp(0.8, 0.3, 90, 130), "reward/pass_at_1": ramp(0.5, 0.1, 90, 130)},
        {"reward/pass_at_8": lambda s, n: n.gauss(0.7, 0.1), "reward/pass_at_1": lambda s, n: n.gauss(0.4, 0.1)},
        {"reward/pass_at_8": lambda s, n: 0.1 if 100 <= s < 108 else 0.8, "reward/pass_at_1": flat(0.4)},
        {"reward/pass_at_8": flat(0.8)},
    ],
    ids=["learning", "right answers agree", "a crash", "noise", "hard batches", "no pass@1"],
)
@pytest.mark.parametrize("every", [1, 5])
def test_learning_crashes_noise_and_hard_batches_are_no_decay(curves, every):
    """The gap closes from below, answers become the right one, or everything falls (the reward's business)."""
    rows = run(curves, length=300, every=every, only=set())

    assert findings(DiversityDecay(), rows) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_many_noisy_rows_was_luck(seed):
    """Two groups a batch: a standard deviation of 0.2 around one level, for 500 rows."""
    curves = {"reward/pass_at_8": lambda s, n: n.gauss(0.7, 0.2), "reward/pass_at_1": lambda s, n: n.gauss(0.4, 0.2)}

    assert findings(DiversityDecay(), run(curves, length=500, seed=seed, only=set())) == []


def test_gaps_in_the_log_hide_no_decay():
    """Pass@k is logged every fourth step, and NaN now and then."""
    many = lambda s: None if s % 4 else math.nan if s == 120 else 0.8 if s < AT else 0.5  # noqa: E731
    rows = exact({"reward/pass_at_8": many, "reward/pass_at_1": always(0.4)}, length=240)

    assert worst(DiversityDecay(), rows) == "warning"
