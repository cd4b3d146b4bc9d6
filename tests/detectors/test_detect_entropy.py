"""Entropy collapse and explosion: caught with reward as witness, silent when the reward pays for it."""

import math

import pytest
from shaped_runs import findings, firsts, flat, ramp, run, warned_then_confirmed, worst

from rlwatch.detectors.exploration.entropy import EntropyCollapse, EntropyExplosion
from rlwatch.records import Severity

FALLING_REWARD = ramp(0.6, 0.02, 100, 120)


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_collapse_beside_a_falling_reward_is_warned_of_then_confirmed(every):
    """0.31 to 0.004 nats in 60 steps, at any logging cadence."""
    rows = run({"policy/entropy": ramp(0.31, 0.004, 100, 160), "reward/mean": FALLING_REWARD}, length=300, every=every)

    critical = warned_then_confirmed(EntropyCollapse(), rows, begins=100, within=60 + 6 * every)

    assert critical.baseline == pytest.approx(0.31, rel=0.1)
    assert critical.evidence["ratio"] < 0.25
    assert "entropy fell from 0.3" in critical.message
    assert "while reward fell from 0." in critical.message
    assert critical.evidence["reward_best"] == pytest.approx(0.6, rel=0.05)


def test_a_slow_collapse_is_caught_too():
    """0.38 to 0.01 over 250 steps under a reward that stays down."""
    rows = run({"policy/entropy": ramp(0.38, 0.01, 20, 270), "reward/mean": ramp(0.58, 0.2, 20, 60)}, length=300)

    assert worst(EntropyCollapse(), rows) is Severity.CRITICAL


def test_a_collapse_inside_the_warm_up_is_judged_by_the_first_rows():
    """Broken from step 4 on: the baseline is what the run began with, not its ruins."""
    rows = run({"policy/entropy": ramp(0.3, 0.002, 4, 20), "reward/mean": ramp(0.58, 0.01, 3, 10)}, length=60)

    critical = firsts(EntropyCollapse(), rows)[Severity.CRITICAL]

    assert critical.step <= 30
    assert critical.baseline == pytest.approx(0.3, rel=0.15)


def test_entropy_spent_on_reward_is_no_collapse():
    """Sixfold down while the reward doubles: the normal course."""
    rows = run({"policy/entropy": ramp(0.35, 0.058, 1, 200), "reward/mean": ramp(0.4, 0.85, 1, 150)}, length=300)

    assert findings(EntropyCollapse(), rows) == []


def test_a_deterministic_policy_is_worth_a_warning_even_at_a_good_reward():
    """A hundredfold down: nothing is left to explore with."""
    rows = run({"policy/entropy": ramp(0.35, 0.003, 50, 150), "reward/mean": ramp(0.4, 0.85, 1, 150)}, length=250)

    assert worst(EntropyCollapse(), rows) is Severity.WARNING


def test_silent_groups_stand_in_for_a_falling_reward():
    """The reward goes nowhere, all groups agree, entropy is a tenth: nothing leads back."""
    rows = run(
        {
            "policy/entropy": ramp(0.9, 0.05, 20, 100),
            "reward/mean": flat(2.0),
            "reward/zero_std_frac": lambda s, n: 0.97 if s > 60 else 0.3,
        }
    )

    critical = firsts(EntropyCollapse(), rows)[Severity.CRITICAL]

    assert "no gradient restores it" in critical.message
    assert critical.evidence["silent_share"] > 0.9


def test_an_unknown_reward_needs_a_deeper_fall():
    """Without corroboration: a warning below 0.15, critical below 0.02 of the start."""

    def at(level):
        return run({"policy/entropy": ramp(0.4, level, 50, 100)}, only={"policy/entropy"})

    assert worst(EntropyCollapse(), at(0.4 * 0.2)) is None
    assert worst(EntropyCollapse(), at(0.4 * 0.08)) is Severity.WARNING
    assert worst(EntropyCollapse(), at(0.4 * 0.005)) is Severity.CRITICAL


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, None])
def test_single_odd_values_neither_alarm_nor_blind(bad):
    """Every tenth row broken: silent while healthy, and the collapse is still caught."""

    def broken(curve):
        return lambda s, n: bad if s % 10 == 0 else curve(s, n)

    healthy = run({"policy/entropy": broken(flat(0.3))})
    dying = run({"policy/entropy": broken(ramp(0.31, 0.004, 100, 150)), "reward/mean": FALLING_REWARD})

    assert findings(EntropyCollapse(), healthy) == []
    assert worst(EntropyCollapse(), dying) is Severity.CRITICAL


def test_a_finding_carries_on_over_rows_without_a_reading():
    """Entropy logged every fourth row: no flapping in between."""
    rows = run(
        {
            "policy/entropy": lambda s, n: ramp(0.31, 0.004, 60, 90)(s, n) if s % 4 == 0 else None,
            "reward/mean": FALLING_REWARD,
        }
    )
    detector = EntropyCollapse()
    said = [bool(detector.update(row)) for row in rows]

    assert all(said[said.index(True) :])


def test_but_not_for_ever():
    """Once the metric is gone for good, so is the finding."""
    rows = run(
        {
            "policy/entropy": lambda s, n: 0.001 if 60 <= s < 100 else 0.3 if s < 60 else None,
            "reward/mean": FALLING_REWARD,
        }
    )
    detector = EntropyCollapse()
    said = [bool(detector.update(row)) for row in rows]

    assert any(said)
    assert not any(said[-20:])


def test_a_recovered_collapse_stops_holding():
    """Findings are what holds now."""
    rows = run(
        {
            "policy/entropy": lambda s, n: 0.005 if 60 <= s < 110 else 0.3,
            "reward/mean": lambda s, n: 0.05 if 60 <= s < 110 else 0.6,
        }
    )
    detector = EntropyCollapse()
    said = [detector.update(row) for row in rows]

    assert said[105]
    assert said[-1] == []


@pytest.mark.parametrize("every", [1, 5])
def test_an_explosion_under_a_falling_reward_is_warned_of_then_confirmed(every):
    """0.3 to 2.5 nats, the reward goes to nothing."""
    rows = run(
        {
            "policy/entropy": ramp(0.3, 2.5, 60, 120, jitter=0.02),
            "policy/vocab_size": lambda s, n: 15.0,
            "reward/mean": ramp(0.6, 0.01, 70, 110),
        },
        every=every,
    )

    critical = warned_then_confirmed(EntropyExplosion(), rows, begins=60, within=60 + 6 * every)

    assert critical.evidence["log_vocab"] == pytest.approx(math.log(15), abs=1e-5)
    assert "uniform noise would be 2.71" in critical.message


def test_more_exploration_at_a_rising_reward_is_welcome():
    """Clip-higher: entropy doubles while the reward rises."""
    rows = run({"policy/entropy": ramp(0.3, 0.7, 10, 80), "reward/mean": ramp(0.3, 0.7, 10, 150)})

    assert findings(EntropyExplosion(), rows) == []


def test_the_ceiling_warns_before_any_reward_does():
    """Three quarters of log V is noise, whatever the reward still says."""
    rows = run(
        {"policy/entropy": ramp(1.2, 2.3, 60, 90), "policy/vocab_size": lambda s, n: 15.0, "reward/mean": flat(0.5)}
    )

    assert worst(EntropyExplosion(), rows) is Severity.WARNING
