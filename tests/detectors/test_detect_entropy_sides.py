"""Entropy by the sign of the advantage: growth of the negative side, collapse of the positive one."""

import math

import pytest
from exact_runs import alarms, always, exact, then, when
from shaped_runs import findings, flat, ramp, run

from rlwatch.detectors.exploration.entropy_sides import EntropySides
from rlwatch.records import Severity

POS, NEG = "policy/entropy_pos", "policy/entropy_neg"


def sides(pos, neg, reward=None, **how):
    curves = {POS: pos, NEG: neg} | ({} if reward is None else {"reward/mean": reward})
    return exact(curves, **how)


def rise(before, after, start, end):
    return lambda s: before * (after / before) ** min(max((s - start) / (end - start), 0.0), 1.0)


@pytest.mark.parametrize("every", [1, 5, 10])
def test_growth_from_negative_samples_is_warned_of_before_entropy_explodes(every):
    """From 0.4 to 1.6 over eighty rows, the positive side still; the warning comes on the way up."""
    rows = sides(always(0.3), rise(0.4, 1.6, 40 * every, 120 * every), always(0.5), length=140, every=every)
    found = alarms(EntropySides(), rows)

    assert found["info"].step < found["warning"].step < 120 * every
    assert found["warning"].kind == "entropy_negative"
    assert 40 * every <= found["warning"].onset_step <= 75 * every
    assert found["warning"].evidence["share"] == 1
    assert "100% of the growth of both sides" in found["warning"].message


def test_a_fallen_reward_warns_earlier():
    """At half as much again."""
    rows = sides(always(0.3), rise(0.4, 0.68, 40, 90), lambda s: 0.8 if s < 50 else 0.2, length=120)

    assert "warning" in alarms(EntropySides(), rows)
    assert "warning" not in alarms(EntropySides(), sides(always(0.3), rise(0.4, 0.68, 40, 90), always(0.8), length=120))


def test_growth_the_reward_pays_for_is_only_told():
    """Clip-higher: entropy of negative samples doubles while the reward rises."""
    rows = sides(always(0.3), rise(0.4, 1.0, 40, 120), lambda s: 0.2 + 0.004 * s, length=160)

    assert list(alarms(EntropySides(), rows)) == ["info"]


def test_a_plateau_is_no_explosion_to_come():
    """It grew in twenty steps and then stayed: told, and a warning at most while it rose."""
    watch = EntropySides()
    rows = sides(always(0.3), rise(0.4, 0.9, 40, 60), always(0.5), length=300)
    said = {row.step: {f.severity for f in watch.update(row)} for row in rows}

    assert said[299] == {Severity.INFO}


def test_growth_of_both_sides_is_not_the_negative_one():
    """A higher temperature."""
    assert when(EntropySides(), sides(then(0.3, 1.0, 40), then(0.4, 1.4, 40), always(0.5), length=100)) == {}


@pytest.mark.parametrize(("after", "said"), [(0.58, []), (0.64, ["info"])])
def test_half_as_much_again_is_told(after, said):
    """Below that it is how runs go."""
    rows = sides(always(0.3), then(0.4, after, 40), lambda s: 0.2 + 0.01 * s, length=100)

    assert list(alarms(EntropySides(), rows)) == said


def test_the_positive_side_alone_may_collapse():
    """Only what is certain is rewarded, and the reward goes nowhere."""
    found = alarms(EntropySides(), sides(rise(0.3, 0.02, 40, 100), always(0.4), always(0.5), length=140))

    assert list(found) == ["warning"]
    assert found["warning"].kind == "entropy_positive"
    assert found["warning"].onset_step >= 80
    assert found["warning"].baseline == pytest.approx(0.3)


def test_a_positive_side_the_reward_is_paid_by_is_only_told():
    """Learning is just that."""
    rows = sides(rise(0.3, 0.02, 40, 100), always(0.4), lambda s: 0.2 + 0.005 * s, length=140)

    assert list(alarms(EntropySides(), rows)) == ["info"]


def test_both_sides_falling_is_left_to_entropy_collapse():
    """It judges the mean."""
    assert when(EntropySides(), sides(then(0.3, 0.02, 40), then(0.4, 0.03, 40), always(0.5), length=100)) == {}


def test_spikes_blips_and_gaps_are_nothing():
    """One row in ten far out, four rows of a learning rate, every third row missing."""
    curves = {
        POS: lambda s, n: None if s % 3 == 0 else 0.3 * math.exp(n.gauss(0, 0.1)),
        NEG: lambda s, n: None if s % 3 == 0 else math.nan if s % 3 == 1 and s % 7 == 0 else _odd(s, n),
        "reward/mean": flat(0.5),
    }

    assert findings(EntropySides(), run(curves, length=300)) == []


def _odd(step, noise):
    return 0.4 * (5.0 if step % 10 == 8 or 100 <= step < 104 else 1.0) * math.exp(noise.gauss(0, 0.1))


def test_a_coarse_noisy_run_is_judged_alike():
    """Mean over five steps."""
    curves = {POS: flat(0.3), NEG: ramp(0.4, 2.0, 100, 250), "reward/mean": flat(0.5)}

    assert any(f.severity is Severity.WARNING for f in findings(EntropySides(), run(curves, length=300, every=5)))


@pytest.mark.parametrize("level", [0.0, 1e-12])
def test_no_entropy_to_begin_with_is_no_beginning(level):
    """A deterministic start, or a broken column."""
    assert when(EntropySides(), sides(always(level), then(0.0, 1.0, 30), length=60)) == {}
