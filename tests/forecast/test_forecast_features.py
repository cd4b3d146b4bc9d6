"""Features: causal, relative to the run's own start, and the same at any cadence."""

import math
import random

import numpy as np
import pytest
from forecast_runs import scaled, steady
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.forecast.features import FEATURES, SHAPES, FeatureStream, median, nearest, spread
from rlwatch.forecast.signals import SIGNALS


def stream(rows):
    """Features of every row."""
    one = FeatureStream()
    return {step: one.update(step, row) for step, row in rows.items()}


def last(rows):
    """Name -> value after the last row."""
    found = list(stream(rows).values())[-1]
    return dict(zip(FEATURES, found.values.tolist(), strict=True))


@settings(max_examples=15, deadline=None)
@given(st.integers(45, 90), st.integers(0, 5))
def test_what_is_said_of_a_step_does_not_change_with_what_comes_later(cut, seed):
    """Features of a run that was cut off are those of the whole run up to there."""
    rows = steady(95, seed=seed)
    whole, part = stream(rows), stream({step: row for step, row in rows.items() if step <= cut})
    np.testing.assert_array_equal(whole[cut].values, part[cut].values)


def share_of(found, limit):
    """Way gone to a limit."""
    return float(found.values[FEATURES.index(f"limit:{limit}:share")])


def with_gaps(rows, seed):
    """Rows of which steps, metrics and numbers are missing, and some come again."""
    draw = random.Random(seed)
    found = [
        (step, {n: draw.choice((v, v, v, v, math.nan, math.inf, 0.0)) for n, v in row.items() if draw.random() < 0.9})
        for step, row in rows.items()
        if draw.random() < 0.8
    ]
    return [*found, *found[len(found) // 2 :]]


@pytest.mark.parametrize("run", [*range(4), "every 5", "every 20"])
def test_rows_taken_at_once_have_the_features_that_each_has_alone(run):
    """To the last bit, wherever the cut: the same windows, whatever is missing in them."""
    rows = list(steady(900, every=int(run[6:])).items()) if isinstance(run, str) else with_gaps(steady(300), run)
    alone, together = FeatureStream(), FeatureStream()
    one_by_one = [alone.update(step, row) for step, row in rows]
    at_once, cut = [], 17
    for i in range(0, len(rows), cut):
        at_once += together.extend([step for step, _ in rows[i : i + cut]], [row for _, row in rows[i : i + cut]])

    assert [one is None for one in one_by_one] == [one is None for one in at_once]
    for one, same in zip(one_by_one, at_once, strict=True):
        if one is not None:
            np.testing.assert_array_equal(one.values, same.values)
            assert repr((one.step, one.reaches, one.read)) == repr((same.step, same.reaches, same.read))


def test_rows_taken_at_once_that_are_nan_have_plain_numbers():
    """What is found is stored and compared as text: a number of numpy's reads otherwise."""
    rows = steady(60) | {step: {"reward/mean": math.nan, "policy/entropy": math.nan} for step in range(61, 66)}

    found = FeatureStream().extend(list(rows), list(rows.values()))

    assert found[-1] is not None
    assert found[-1].reaches
    assert {type(reach.share) for reach in found[-1].reaches} == {float}


def test_there_is_nothing_before_the_baseline_and_the_reason_is_given():
    """Forty steps, and five rows of them."""
    one = FeatureStream()
    assert one.waiting() == "no step has closed yet"
    for step, row in steady(40).items():
        assert one.update(step, row) is None
    assert one.waiting().startswith("it needs the first 40 steps as a baseline, and has 39")
    assert one.update(41, steady(41)[41]) is not None
    assert one.waiting() == ""


@pytest.mark.parametrize(
    "unit", [{"reward/mean": 100.0, "reward/std": 100.0}, {"optim/grad_norm": 1000.0}, {"len/mean": 64.0}]
)
def test_the_unit_of_a_metric_does_not_matter(unit):
    """Rewards in percent, gradients of a larger model, longer answers: the same features (but for the floors)."""
    rows = steady(100, **{"reward/mean": lambda s: 0.5 - 0.003 * max(0, s - 60)})
    plain, other = last(rows), last(scaled(rows, **unit))
    for name, value in plain.items():
        assert other[name] == pytest.approx(value, rel=0.03, abs=0.02, nan_ok=True), name


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_slope_is_that_of_steps_at_any_cadence(every):
    """Entropy that halves every 50 steps, logged each step, every fifth or every tenth: a fifth is 16 steps away."""
    rows = steady(160, every=every, **{"policy/entropy": lambda s: 2.0 ** (-max(0, s - 60) / 50)})
    found = last(rows)
    left = 50 * math.log2(1 / 0.2) - 100
    assert found["limit:ent_low:entropy:steps"] == pytest.approx(left, abs=0.5 * every + 3)
    assert found["entropy:slope60"] < -3.0
    assert found["entropy:low"] <= found["entropy:high"] < -0.9
    assert found["entropy:fallen"] < -1.0


def test_a_metric_that_is_not_logged_has_no_features_and_changes_no_other():
    """Missing is missing."""
    rows = steady(80)
    without = {step: {n: v for n, v in row.items() if n != "mismatch/k3"} for step, row in rows.items()}
    whole, part = last(rows), last(without)
    for name, value in part.items():
        if "mismatch:" in name:
            assert math.isnan(value), name
        else:
            assert value == pytest.approx(whole[name], nan_ok=True), name


def test_a_column_that_was_never_a_number_is_switched_off_and_not_broken():
    """It is no number, but it is news."""
    found = last(steady(80, **{"policy/entropy": lambda _: math.nan}))
    assert math.isnan(found["entropy:z"])
    assert found["broken"] == 0.0
    assert nearest(stream(steady(80, **{"policy/kl_ref_k3": lambda _: math.nan}))[80].reaches) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("every", "shares"),
    [
        (1, {90: 0.0, 91: 0.4, 92: 0.6, 93: 0.8, 94: 1.0, 100: 1.4}),
        (5, {80: 0.0, 90: 0.4, 95: 0.6, 100: 0.8}),
        (10, {80: 0.0, 90: 0.4, 100: 0.6}),
    ],
)
def test_steps_that_are_no_longer_finite_are_on_their_way_to_a_loop(value, every, shares):
    """One such row is a bad batch; from the second on they count: five within 25 steps, or of five rows, are a loop."""
    broken = range(90, 97) if every == 1 else (80, 90, 95, 100)
    found = stream(steady(100, every=every, **{"optim/grad_norm": lambda s: value if s in broken else 0.3}))

    for step, share in shares.items():
        close = nearest(found[step].reaches)
        assert (close.share if close else 0.0) == pytest.approx(share), step
        assert close is None or (close.limit.type, close.limit.signal) == ("nan", "optim/grad_norm")


def test_broken_rows_long_ago_are_forgotten():
    """A run that got over a bad stretch is no longer near it."""
    rows = steady(120, **{"optim/grad_norm": lambda s: math.nan if 60 <= s < 64 else 0.3})
    found = stream(rows)

    assert nearest(found[63].reaches).share == pytest.approx(0.8)
    assert nearest(found[90].reaches) is None


def test_a_run_in_which_nothing_moves_has_features_of_zero():
    """Constant metrics divide by no zero."""
    rows = {step: dict.fromkeys(steady(1)[1], 0.5) for step in range(1, 100)}
    found = last(rows)
    moving = [value for name, value in found.items() if not name.startswith("limit") and not math.isnan(value)]
    assert moving
    assert set(moving) == {0.0}


def test_steps_that_come_again_take_back_what_came_after_them():
    """A run resumed from an earlier checkpoint: its windows hold the new rows only."""
    rows, again = steady(90), steady(90, seed=9)
    one = FeatureStream()
    for step, row in rows.items():
        one.update(step, row)
    for step in range(60, 91):
        one.update(step, again[step])
    assert one.history.steps.tolist() == sorted(set(one.history.steps.tolist()))
    joined = stream({step: again[step] if step >= 60 else rows[step] for step in range(1, 91)})[90]
    one_slope = FEATURES.index("entropy:slope25")
    assert one.update(91, rows[90]).values[one_slope] == pytest.approx(
        _after(joined, rows, again).values[one_slope], abs=1e-9
    )


def _after(joined, rows, again):
    one = FeatureStream()
    for step in range(1, 91):
        one.update(step, again[step] if step >= 60 else rows[step])
    return one.update(91, rows[90])


def test_a_reset_of_the_reference_is_no_fall_of_kl():
    """KL to the old reference is forgotten; the rest goes on."""
    rows = steady(90, **{"policy/kl_ref_k3": lambda s: 0.2 if s < 85 else 0.001})
    one = FeatureStream()
    for step, row in rows.items():
        if step == 85:
            one.forget_reference()
        found = one.update(step, row)
    named = dict(zip(FEATURES, found.values.tolist(), strict=True))
    assert named["kl_ref:slope25"] == pytest.approx(0.0, abs=1e-9)
    assert math.isfinite(named["entropy:slope25"])


def test_the_nearest_limit_is_the_one_a_signal_has_clearly_moved_to():
    """Entropy at half of the way to a fifth of its start; nothing is near in a steady run."""
    half = steady(90, **{"policy/entropy": lambda s: 1.0 if s < 60 else math.sqrt(0.2)})
    close = nearest(stream(half)[90].reaches)
    assert (close.limit.type, close.limit.signal) == ("ent_low", "entropy")
    assert close.share == pytest.approx(0.5, abs=0.03)
    assert nearest(stream(steady(90))[90].reaches) is None


@pytest.mark.parametrize(("reward", "told"), [(0.5, True), (0.51, True), (0.53, False), (0.95, False), (0.2, True)])
def test_entropy_that_buys_reward_is_on_no_way_to_a_failure(reward, told):
    """The same fall of entropy: told where the reward stands still or falls, not where it has clearly risen."""
    moved = {
        "policy/entropy": lambda s: 1.0 if s < 60 else 0.3,
        "reward/mean": lambda s: (0.5 if s < 60 else reward) + 0.01 * math.sin(7 * s),
    }
    found = stream(steady(90, **moved))[90]

    assert ("ent_low" in {reach.limit.type for reach in found.reaches}) == told
    assert share_of(found, "ent_low:entropy") == pytest.approx(math.log(0.3) / math.log(0.2), abs=0.05)


def test_entropy_that_stays_low_after_the_reward_fell_back_is_told_again():
    """What was bought is lost."""
    moved = {
        "policy/entropy": lambda s: 1.0 if s < 60 else 0.3,
        "reward/mean": lambda s: (0.5 if s < 60 else 0.95 if s < 75 else 0.75) + 0.01 * math.sin(7 * s),
    }
    assert "ent_low" in {reach.limit.type for reach in stream(steady(90, **moved))[90].reaches}


@pytest.mark.parametrize(("gain", "exploded", "near"), [(0.6, False, False), (0.0, False, True), (0.6, True, True)])
def test_the_way_of_gradients_to_their_limit_begins_where_the_reward_has_taken_off(gain, exploded, near):
    """Groups that all failed taught nothing: ten times the gradient is how learning looks, ten times that is not."""

    def climb(step):
        return min(max((step - 60) / 50, 0.0), 1.0)

    moved = {
        "reward/mean": lambda s: 0.02 + gain * climb(s) + 0.005 * math.sin(7 * s),
        "reward/std": lambda _: 0.14,
        "optim/grad_norm": lambda s: (0.05 + 0.45 * climb(s)) * (10 if exploded and s > 170 else 1),
    }
    found = stream(steady(180, **moved))
    before = share_of(found[160], "grad:grad")

    assert any(reach.limit.type == "grad" and reach.share > 1.0 for reach in found[180].reaches) is near
    assert (before < 0.5) is (gain > 0.0)


def test_a_straight_line_says_when_a_limit_is_reached():
    """KL that grows by 0.02 a step from 0.3 on reaches 1.5 in about sixty steps, in log scale sooner."""
    rows = steady(100, **{"policy/kl_ref_k3": lambda s: 0.02 * math.exp(0.04 * max(0, s - 50))})
    reach = next(r for r in stream(rows)[100].reaches if r.limit.type == "ref_kl")
    left = math.log(1.5 / rows[100]["policy/kl_ref_k3"]) / 0.04
    assert reach.steps == pytest.approx(left, rel=0.25)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.just(math.nan), st.floats(-9, 9)), min_size=3, max_size=3), min_size=1, max_size=7)
)
def test_medians_and_spreads_are_those_of_numpy(rows):
    """With missing values, column by column."""
    table = np.array(rows)
    for i, column in enumerate(table.T):
        there = column[np.isfinite(column)]
        expected = (np.median(there), np.std(there)) if len(there) else (math.nan, math.nan)
        assert median(table)[i] == pytest.approx(expected[0], nan_ok=True)
        assert spread(table)[i] == pytest.approx(expected[1], nan_ok=True, abs=1e-12)


def test_every_feature_has_a_name_of_its_own():
    """Signals times shapes, and the rest."""
    assert len(set(FEATURES)) == len(FEATURES)
    assert {f"{signal.name}:{shape}" for signal in SIGNALS for shape in SHAPES} < set(FEATURES)


def test_a_turn_is_a_change_against_what_was_usual_shortly_before():
    """Entropy that has fallen for long and then stands still has not turned; one that jumps has."""
    slow = steady(140, **{"policy/entropy": lambda s: 0.3 if s > 60 else 1.0})
    jump = steady(140, **{"policy/entropy": lambda s: 0.3 if s > 130 else 1.0})
    assert abs(last(slow)["entropy:turn"]) < 3.0
    assert last(jump)["entropy:turn"] < -8.0


def test_slopes_and_distances_are_in_the_noise_that_the_run_has_now():
    """The same fall of entropy means less in a run whose rows have begun to scatter."""
    draw = random.Random(3)
    fall = {s: 2.0 ** (-max(0, s - 60) / 50) for s in range(200)}
    calm = last(steady(160, **{"policy/entropy": lambda s: fall[s]}))
    wild = last(steady(160, **{"policy/entropy": lambda s: fall[s] * math.exp(draw.gauss(0.0, 0.3) if s > 50 else 0)}))
    for shape in ("low", "high", "z", "slope25", "slope60", "fallen"):
        assert abs(calm[f"entropy:{shape}"]) > 2 * abs(wild[f"entropy:{shape}"])


@pytest.mark.parametrize(("scale", "shift", "near"), [(1.0, 0.0, True), (100.0, 0.0, True), (1.0, 20.0, False)])
def test_a_reward_is_lost_when_much_of_its_best_is(scale, shift, near):
    """From 0.7 to 0.45 it has gone most of the way, in any unit; from 20.7 to 20.45 hardly any."""
    rows = steady(
        120,
        **{
            "reward/mean": lambda s: shift + scale * (0.5 if s < 50 else 0.7 if s < 80 else 0.45),
            "reward/std": lambda _: 0.45 * scale,
        },
    )
    share = share_of(stream(rows)[120], "reward:reward")
    assert (share > 0.7) == near
    assert share < 1.2


def test_the_noise_of_small_batches_is_no_fall_from_the_best():
    """Means of eight responses jump by half of the spread; the best of a hundred of them is nothing to fall from."""
    draw = np.random.default_rng(3)
    rows = steady(300, **{"reward/mean": lambda _: 1.0 + 0.35 * draw.standard_normal(), "reward/std": lambda _: 1.0})
    shares = [share_of(found, "reward:reward") for found in stream(rows).values() if found]
    assert max(shares) < 0.7
