"""Entropy collapse and explosion at their thresholds: just below silent, just above said, and when."""

import math

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.exploration.entropy import EntropyCollapse, EntropyExplosion

FALLEN, RISEN = then(1.0, 0.1, 20), then(0.2, 0.6, 20)
SOLVED, FULL = then(0.2, 0.8, 20), then(0.5, 1.0, 20)


def fall(to, reward=None, *, of=1.0, length=60, **more):
    """Entropy ``of`` for twenty steps, then ``to``."""
    curves = {"policy/entropy": then(of, to, 20)} | {name.replace("_", "/", 1): always(v) for name, v in more.items()}
    return exact(curves if reward is None else curves | {"reward/mean": reward}, length=length)


@pytest.mark.parametrize(
    ("to", "reward", "said"),
    [
        (0.155, None, None),
        (0.145, None, "warning"),
        (0.021, None, "warning"),
        (0.019, None, "critical"),
        (0.41, FALLEN, None),
        (0.39, FALLEN, "warning"),
        (0.21, FALLEN, "warning"),
        (0.19, FALLEN, "critical"),
        (0.052, RISEN, None),
        (0.048, RISEN, "warning"),
        (0.001, RISEN, "warning"),
        (0.048, SOLVED, "info"),
        (0.019, SOLVED, "warning"),
        (0.001, FULL, "info"),
    ],
)
def test_a_fall_of_entropy_is_judged_by_what_the_reward_did(to, reward, said):
    """Alone 0.15 and 0.02 of the start, beside a fallen reward 0.4 and 0.2, paid for 0.05 and never critical.

    Of a solved task it is a remark: down to 0.02 from a reward of 0.7 on, and all of it where that is full.
    """
    assert worst(EntropyCollapse(), fall(to, reward)) == said


def test_a_reward_that_rose_and_fell_again_pays_for_nothing():
    """It is above its start, but it has lost: a third of the entropy is then too little."""
    reward = lambda s: 0.2 if s < 10 else 1.0 if s < 30 else 0.6  # noqa: E731
    rows = exact({"policy/entropy": then(1.0, 0.3, 30), "reward/mean": reward}, length=70)

    assert worst(EntropyCollapse(), rows) == "warning"


@pytest.mark.parametrize(("vocabulary", "said"), [(None, "warning"), (152_000, "critical"), (10_000, "warning")])
def test_a_policy_as_good_as_deterministic_is_critical_whatever_the_ratio(vocabulary, said):
    """A third of the start, but below a thousandth of log V, the entropy of noise."""
    more = {} if vocabulary is None else {"policy_vocab_size": vocabulary}

    assert worst(EntropyCollapse(), fall(0.0105, FALLEN, of=0.03, **more)) == said


@pytest.mark.parametrize(("every", "change", "warned"), [(1, 20, 27), (5, 200, 210), (10, 200, 210)])
def test_a_collapse_is_said_at_the_third_row_of_a_low_median_and_dated_to_its_first(every, change, warned):
    """The median turns at the sixth of ten rows, or the second of three where rows are far apart."""
    rows = exact({"policy/entropy": then(1.0, 0.01, change)}, length=60, every=every)

    found = alarms(EntropyCollapse(), rows)

    assert {finding.step for finding in found.values()} == {warned}
    assert found["critical"].onset_step == change


def test_two_odd_rows_do_not_undo_the_date_of_a_collapse():
    """Up to three rows above half the start are forgiven, a fourth begins anew."""

    def onset(odd):
        rows = exact({"policy/entropy": lambda s: 1.0 if s < 20 or 25 <= s < 25 + odd else 0.01})
        return alarms(EntropyCollapse(), rows)["critical"].onset_step

    assert onset(3) == 20
    assert onset(4) == 29


def test_the_numbers_of_a_collapse():
    """What a person is told, to the digit."""
    finding = alarms(EntropyCollapse(), fall(0.09, FALLEN, of=0.5))["critical"]

    assert finding.score == pytest.approx(0.4 / 0.18)
    assert finding.baseline == 0.5
    assert finding.evidence == {
        "entropy": 0.09,
        "entropy_baseline": 0.5,
        "ratio": 0.18,
        "reward": 0.1,
        "reward_best": 1,
    }
    assert finding.message == "entropy fell from 0.5 to 0.09 nats/token over 7 steps while reward fell from 1 to 0.1"


def test_an_entropy_logged_with_the_sign_of_a_loss_is_the_same_entropy():
    """Some trainers log minus H."""
    plain, negated = fall(0.1, FALLEN), exact({"policy/entropy": then(-1.0, -0.1, 20), "reward/mean": FALLEN})

    assert when(EntropyCollapse(), negated) == when(EntropyCollapse(), plain)


@pytest.mark.parametrize("detector", [EntropyCollapse, EntropyExplosion])
def test_a_run_that_began_without_entropy_has_no_level_to_leave(detector):
    """Zero divides nothing."""
    rows = exact({"policy/entropy": then(0.0, 3.0, 20), "reward/mean": FALLEN})

    assert worst(detector(), rows) is None


def test_a_finding_is_carried_over_ten_rows_without_a_reading_and_no_further():
    """With the step of the row it is carried to."""
    rows = exact({"policy/entropy": lambda s: 1.0 if s < 20 else 0.01 if s < 30 else None}, length=45)
    detector = EntropyCollapse()
    said = {row.step: detector.update(row) for row in rows}

    assert [step for step in range(27, 45) if said[step]] == list(range(27, 40))
    assert [(f.step, f.onset_step, f.seq) for f in said[39]] == [(39, 20, 40)]


@pytest.mark.parametrize(
    ("to", "reward", "said"),
    [
        (1.48, FALLEN, None),
        (1.52, FALLEN, "warning"),
        (1.98, FALLEN, "warning"),
        (2.02, FALLEN, "critical"),
        (2.95, None, None),
        (3.05, None, "warning"),
        (9.0, None, "warning"),
        (9.0, RISEN, None),
    ],
)
def test_a_rise_of_entropy_is_judged_by_what_the_reward_did(to, reward, said):
    """Beside a fallen reward 1.5 and 2 times the start, alone 3 and never critical, paid for not at all."""
    assert worst(EntropyExplosion(), fall(to, reward)) == said


@pytest.mark.parametrize(
    ("start", "to", "reward", "said"),
    [
        (1.2, 1.87, RISEN, None),
        (1.2, 1.92, RISEN, "warning"),
        (1.5, 1.92, RISEN, None),
        (1.2, 1.78, FALLEN, None),
        (1.2, 1.92, FALLEN, "critical"),
    ],
)
def test_close_to_uniform_noise_counts_once_it_is_a_rise(start, to, reward, said):
    """Seven tenths of log 15 = 1.896 nats, and at least 1.3 times the start."""
    assert worst(EntropyExplosion(), fall(to, reward, of=start, policy_vocab_size=15.0)) == said


@pytest.mark.parametrize(("every", "change", "warned"), [(1, 20, 26), (5, 200, 210), (10, 200, 210)])
def test_an_explosion_is_said_at_the_third_row_of_a_high_median_and_dated_to_its_first(every, change, warned):
    """The median of eight rows, three where rows are far apart."""
    rows = exact({"policy/entropy": then(1.0, 4.0, change)}, length=60, every=every)

    finding = alarms(EntropyExplosion(), rows)["warning"]

    assert (finding.step, finding.onset_step) == (warned, change)


def test_the_numbers_of_an_explosion():
    """What a person is told, to the digit."""
    finding = alarms(EntropyExplosion(), fall(1.25, FALLEN, of=0.5, policy_vocab_size=math.e**3))["critical"]

    assert finding.score == pytest.approx(2.5 / 1.5)
    assert finding.evidence == {
        "entropy": 1.25,
        "entropy_baseline": 0.5,
        "ratio": 2.5,
        "log_vocab": 3,
        "reward": 0.1,
        "reward_best": 1,
    }
    assert finding.message == (
        "entropy rose from 0.5 to 1.25 nats/token (uniform noise would be 3) while reward fell from 1 to 0.1"
    )


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_collapse_within_the_first_rows_is_held_to_the_very_first(after, every):
    """A learning rate of 0.03 from the first step on: forty rows, hardly one of them as the model was."""
    curves = {"policy/entropy": then(1.2, 0.01, after * every), "reward/mean": then(0.3, 0.05, after * every)}

    assert worst(EntropyCollapse(), exact(curves, length=40, every=every)) == "critical"


def test_a_format_that_is_learnt_in_the_first_step_is_no_collapse():
    """Entropy falls to a tenth at once, the reward rises from then on."""
    curves = {"policy/entropy": then(1.2, 0.12, 1), "reward/mean": lambda s: min(0.02 + 0.02 * s, 0.8)}

    assert worst(EntropyCollapse(), exact(curves, length=60)) is None


@pytest.mark.parametrize(("low", "high"), [(4.7e-20, 4.0e-8), (1e-3, 0.04)])
def test_multiples_of_hardly_any_entropy_are_no_explosion(low, high):
    """The policy is as certain as before, whatever the ratio."""
    assert worst(EntropyExplosion(), exact({"policy/entropy": then(low, high, 20), "reward/mean": FALLEN})) is None


def test_from_hardly_any_entropy_to_much_is_one():
    """The floor stands in for the start."""
    assert (
        worst(EntropyExplosion(), exact({"policy/entropy": then(1e-3, 0.4, 20), "reward/mean": FALLEN})) == "critical"
    )
