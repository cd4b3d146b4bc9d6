"""The entropy law R = -a exp(H) + b: recovered from a run, told once the budget is spent, silent where it does not hold."""

import math
import random
from itertools import pairwise

import pytest
from exact_runs import alarms, always, exact, when, worst
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.detectors.exploration.entropy_budget import EntropyBudget, Law, LawFit

A, B, H0 = 0.2, 0.6, 0.6


def fall(rate=0.03, start=H0):
    """Entropy that falls by ``rate`` a step."""
    return lambda step: start * math.exp(-rate * step)


def law(entropy, a=A, b=B, noise=0.0, seed=0):
    """The reward the law gives for it."""
    draw = random.Random(seed)
    return lambda step: b - a * math.exp(entropy(step)) + draw.gauss(0.0, noise)


def run(entropy, reward, **how):
    return exact({"policy/entropy": entropy, "reward/mean": reward}, **how)


def fitted(entropy, reward, steps):
    fit = LawFit()
    for step in range(steps):
        fit.update(step, entropy(step), reward(step))
    return fit


@given(st.floats(0.05, 2.0), st.floats(-1.0, 3.0), st.floats(0.3, 2.0))
@settings(max_examples=40, deadline=None)
def test_an_exact_law_is_recovered(a, b, start):
    """From any run that spends three quarters of its entropy."""
    entropy = fall(0.02, start)
    found = fitted(entropy, law(entropy, a, b), 100).get()

    assert found.a == pytest.approx(a, rel=0.01)
    assert found.ceiling == pytest.approx(b - a, abs=0.01 * a)
    assert found.binds


def test_the_ceiling_is_the_reward_at_no_entropy():
    """a = .2, b = .6: .4 (METHODS)."""
    found = fitted(fall(), law(fall()), 80).get()

    assert (found.a, found.b, found.ceiling) == pytest.approx((0.2, 0.6, 0.4), abs=1e-3)
    assert found.at(0.0) == pytest.approx(0.4, abs=1e-3)


def test_the_first_36_steps_predict_the_next_200():
    """To the published 1 % or so, with noise of two points a row."""
    entropy = fall(0.03, 1.2)
    reward = law(entropy, noise=0.005)
    found = fitted(entropy, reward, 36).get()
    errors = [(found.at(entropy(s)) - (B - A * math.exp(entropy(s)))) for s in range(36, 236)]

    assert math.sqrt(sum(e * e for e in errors) / 200) < 0.012 * (B - A)


def test_one_batch_in_ten_of_hard_data_hardly_moves_it():
    """A reward half a point too low."""
    entropy = fall()
    clean = law(entropy, noise=0.005)
    found = fitted(entropy, lambda s: clean(s) - (0.5 if s % 10 == 5 else 0.0), 120).get()

    assert found.a == pytest.approx(A, rel=0.3)
    assert found.ceiling == pytest.approx(0.4, abs=0.03)


def test_a_run_of_any_length_is_kept_in_few_points():
    """And its beginning is still among them."""
    entropy = fall(1e-3)
    fit = fitted(entropy, law(entropy), 5000)

    assert len(fit._points) <= 48
    assert fit._points.get()[0][0] == pytest.approx(math.exp(H0), rel=0.05)
    assert fit.get().a == pytest.approx(A, rel=0.02)


@pytest.mark.parametrize(
    ("entropy", "reward"),
    [
        (always(0.4), always(0.5)),
        (fall(), always(0.5)),
        (fall(), law(fall(), a=-0.2)),
        (lambda s: H0 * math.exp(-0.001 * s), law(lambda s: H0 * math.exp(-0.001 * s))),
    ],
    ids=["nothing moves", "reward does not", "reward falls with entropy", "hardly any entropy was spent"],
)
def test_without_a_law_there_is_no_fit(entropy, reward):
    """Within a tenth of the entropy any curve is a line."""
    found = fitted(entropy, reward, 100).get()

    assert found is None or not found.binds


def test_noise_alone_is_no_law():
    """Reward that has nothing to do with a falling entropy: not in one of thirty draws."""
    bound = 0
    for seed in range(30):
        noise = random.Random(seed)
        found = fitted(fall(), lambda s, noise=noise: 0.5 + noise.gauss(0.0, 0.05), 120).get()
        bound += found is not None and found.binds

    assert bound == 0


def test_the_arrival_is_when_it_will_be_there():
    """At 3 % a step a tenth of now is ln 10 / 0.03 = 76.8 steps away; noise opens an interval around it."""
    exactly = fitted(fall(), law(fall()), 40).arrival(fall()(39), fall()(39) / 10.0)
    noise = random.Random(0)
    noisy = [fall()(s) * math.exp(noise.gauss(0.0, 0.1)) for s in range(40)]
    roughly = fitted(lambda s: noisy[s], law(fall()), 40).arrival(fall()(39), fall()(39) / 10.0)

    assert (exactly.steps, exactly.low, exactly.high) == pytest.approx((76.75, 76.75, 76.75), abs=0.1)
    assert roughly.low < 76.75 < roughly.high
    assert roughly.high < 2.0 * roughly.low


@pytest.mark.parametrize("entropy", [always(0.5), lambda s: 0.1 + 0.01 * s, lambda s: 0.5 + 0.1 * (-1) ** s])
def test_entropy_that_does_not_fall_for_sure_never_arrives(entropy):
    """Level, rising, or swinging."""
    assert fitted(entropy, always(0.5), 60).arrival(0.5, 0.05) is None


def test_the_run_is_told_once_four_fifths_are_spent_and_warned_at_nine_tenths():
    """With the law, the ceiling and the time that is left."""
    rows = run(fall(), law(fall()), length=120)
    found = alarms(EntropyBudget(), rows)
    told, warned = found["info"], found["warning"]

    assert 53 <= told.step <= 65
    assert told.evidence["spent"] == pytest.approx(0.8, abs=0.05)
    assert told.evidence["ceiling"] == pytest.approx(0.4, abs=0.005)
    assert told.evidence["arrival_low"] <= told.evidence["arrival_steps"] <= told.evidence["arrival_high"]
    assert "explains 100% of it; so it will stall at 0.4" in told.message
    assert "nine tenths will be spent in" in told.message
    assert told.score == pytest.approx(told.evidence["spent"] / 0.8, rel=1e-4)
    assert (told.metric, told.onset_step) == ("policy/entropy", told.step - 2)
    assert told.baseline == pytest.approx(H0, rel=0.05)
    assert f"{told.evidence['spent']:.0%} of the entropy is spent" in told.message
    left = math.log((1 - told.evidence["spent"]) / 0.1)  # of log H, down to a tenth of the start
    assert told.evidence["arrival_steps"] == pytest.approx(left / 0.03, rel=0.01)
    assert 76 <= warned.step <= 90
    assert warned.evidence["gain_left"] == pytest.approx(A * (math.exp(0.05) - 1.0), abs=0.01)
    assert "critical" not in found


@pytest.mark.parametrize("every", [5, 10])
def test_a_coarse_log_says_the_same(every):
    """Once it has twelve rows."""
    entropy = fall(0.03 / every)
    found = alarms(EntropyBudget(), run(entropy, law(entropy), length=120, every=every))

    assert {"info", "warning"} == set(found)
    assert found["info"].evidence["ceiling"] == pytest.approx(0.4, abs=0.005)


@pytest.mark.parametrize(
    ("a", "b", "best", "said"),
    [(0.2, 0.6, None, "warning"), (0.5, 1.48, None, "info"), (0.2, 0.6, 0.41, "info"), (0.2, 0.6, 1.0, "warning")],
    ids=["stalls below the top", "solved on the common scale", "solved by the best of the batch", "far from it"],
)
def test_a_solved_task_needs_no_entropy(a, b, best, said):
    """At 0.98 of 1, or at the best reward a batch holds, low entropy is convergence."""
    curves = {"policy/entropy": fall(), "reward/mean": law(fall(), a, b)}
    if best is not None:
        curves["reward/max"] = always(best)

    assert worst(EntropyBudget(), exact(curves, length=150)) == said


def test_a_law_that_the_reward_has_passed_is_withdrawn():
    """No run stalls below where it is: the reward jumps clear of the ceiling that was told."""
    curve = law(fall(), noise=0.002)
    watch, said = EntropyBudget(), []
    for row in run(fall(), lambda s: curve(s) + (0.25 if s >= 90 else 0.0), length=140):
        said += [(row.step, finding) for finding in watch.update(row)]

    assert said[0][0] < 90
    assert all(found.evidence["ceiling"] > found.evidence["reward"] / 1.06 for _, found in said)
    assert max(step for step, _ in said) < 110


def test_a_collapse_is_not_called_a_budget():
    """Reward that fell with the entropy: another detector's, with other advice."""
    noise = random.Random(0)
    rows = run(fall(), lambda s: 0.1 + 0.5 * fall()(s) + noise.gauss(0, 0.01), length=150)

    assert when(EntropyBudget(), rows) == {}


def test_entropy_that_comes_back_ends_it():
    """A bonus, a higher temperature, a reset of the data."""
    curve = lambda s: fall()(s) if s < 100 else 0.5  # noqa: E731
    watch, said = EntropyBudget(), []
    for row in run(curve, law(curve), length=140):
        said += [row.step for _ in watch.update(row)]

    assert 100 <= said[-1] <= 110


def test_gaps_nan_and_single_spikes_change_little():
    """A third of the rows without entropy, one in ten with a wild one."""
    plain = fall()
    odd = {1: None, 4: math.nan}
    rows = run(lambda s: odd.get(s % 6, plain(s) * (10.0 if s % 10 == 9 else 1.0)), law(plain), length=150)
    found = alarms(EntropyBudget(), rows)

    assert {"info", "warning"} >= set(found) > set()
    assert found["info"].evidence["ceiling"] == pytest.approx(0.4, abs=0.03)


def test_a_resume_forgets_what_was_undone():
    """Steps 60 to 79 were a collapse that never happened."""
    watch = EntropyBudget()
    lost = lambda s: fall()(s) if s < 60 else 1e-4  # noqa: E731
    for row in run(lost, lambda s: law(fall())(s) if s < 60 else 0.0, length=80):
        watch.update(row)
    said = [f for row in run(fall(), law(fall()), length=120)[60:] for f in watch.update(row)]

    assert said[-1].evidence["ceiling"] == pytest.approx(0.4, abs=0.01)


def test_rewards_below_zero_and_above_one_have_their_law_too():
    """Rewards are on any scale."""
    for a, b in [(3.0, -2.0), (10.0, 30.0)]:
        found = alarms(EntropyBudget(), run(fall(), law(fall(), a, b), length=120))
        assert found["info"].evidence["ceiling"] == pytest.approx(b - a, rel=0.02)


def test_more_entropy_left_means_more_reward_left():
    """Along the run the gain that is left shrinks to nothing."""
    watch = EntropyBudget()
    left = [f.evidence["gain_left"] for row in run(fall(), law(fall()), length=200) for f in watch.update(row)]

    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(left))
    assert left[-1] < 0.01 * A


def test_a_law_is_a_number_at_any_entropy():
    """A broken log may say a million nats."""
    assert math.isfinite(Law(0.2, 0.6, 0.0, 1.0).at(1e6))


def test_the_best_of_the_last_ten_batches_is_the_top():
    """From 0.41 at most on, which the reward has nearly reached, there is nothing left to buy."""
    curves = {"policy/entropy": fall(), "reward/mean": law(fall()), "reward/max": lambda s: 1.0 if s < 100 else 0.41}
    watch = EntropyBudget()
    said = {row.step: [f.severity.value for f in watch.update(row)] for row in exact(curves, length=140)}

    assert [step for step in said if said[step] != said.get(step - 1, [])] == [62, 87, 107]
    assert (said[62], said[87], said[107]) == (["info"], ["warning"], ["info"])
