"""Trees are read as they were grown, and what they say is shared out without a remainder."""

import math

import pytest
from forecast_models import DEEP, FEATURES, LINE, STUMP, small_model
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.forecast.model import Head, probability, reasons, signal_of

VALUES = st.one_of(st.just(math.nan), st.floats(-20, 20))


@pytest.mark.parametrize(
    ("entropy", "slope", "stump", "deep"),
    [
        (-16.0, 0.0, 3.0, 0.1),
        (0.3, 0.0, -1.0, -0.5),
        (-8.0, 4.0, 3.0, 1.5),
        (math.nan, math.nan, -1.0, -0.5),
        (0.0, 2.0, -1.0, 0.1),
    ],
)
def test_a_value_at_or_below_the_threshold_goes_left_and_nan_where_the_node_says(entropy, slope, stump, deep):
    """Leaves written out by hand."""
    x = [entropy, slope]
    assert STUMP.value[STUMP.walk(x)[-1]] == stump
    assert DEEP.value[DEEP.walk(x)[-1]] == deep
    assert Head(-2.0, (STUMP, DEEP), 0.9, 0.1).logit(x) == pytest.approx(0.9 * (-2.0 + stump + deep) + 0.1)


@given(VALUES, VALUES)
def test_a_line_weighs_and_adds_up_to_five_spreads(entropy, slope):
    """What was not measured adds nothing."""
    moved = [0.0 if math.isnan(v) else max(-5.0, min(5.0, v / by)) for v, by in ((entropy, 4.0), (slope, 2.0))]
    head = Head(-2.0, (), 0.9, 0.1, LINE)
    assert head.logit([entropy, slope]) == pytest.approx(0.9 * (-2.0 - 0.2 * moved[0] + 0.3 * moved[1]) + 0.1)


@given(VALUES, VALUES)
def test_shares_sum_to_what_the_walk_and_the_line_added(entropy, slope):
    """The logit is that of the roots plus all shares."""
    head, x = Head(-2.0, (STUMP, DEEP), 0.9, 0.1, LINE), [entropy, slope]
    roots = 0.9 * (-2.0 + STUMP.value[0] + DEEP.value[0]) + 0.1
    assert head.logit(x) == pytest.approx(roots + sum(head.shares(x).values()))


@given(VALUES, VALUES)
def test_a_failure_within_more_steps_is_never_less_likely(entropy, slope):
    """p20 <= p50 <= p100, all of them chances."""
    found = small_model().chances([entropy, slope])
    assert 0.0 <= found.p20 <= found.p50 <= found.p100 <= 1.0


@pytest.mark.parametrize("logit", [-1e6, -745.0, -3.0, 0.0, 3.0, 745.0, 1e6])
def test_any_logit_is_a_probability(logit):
    """Without overflow, and symmetrical."""
    assert 0.0 <= probability(logit) <= 1.0
    assert probability(logit) + probability(-logit) == pytest.approx(1.0)
    assert probability(math.log(3.0)) == pytest.approx(0.75)


def test_steps_to_the_onset_are_expected_only_where_one_is_likely():
    """The middle of the interval that holds nearly all of the chance."""
    soon = small_model(hazards=(Head(9.0, ()), Head(0.0, ()), Head(0.0, ())))
    later = small_model(hazards=(Head(-9.0, ()), Head(-9.0, ()), Head(9.0, ())))
    never = small_model(hazards=(Head(-9.0, ()), Head(-9.0, ()), Head(-9.0, ())))
    x = [0.0, 0.0]
    assert soon.chances(x).steps_to == pytest.approx(10.0, abs=0.1)
    assert later.chances(x).steps_to == pytest.approx(75.0, abs=0.1)
    assert never.chances(x).steps_to is None


def test_reasons_are_what_speaks_for_a_failure():
    """In order, as shares, and only what matters."""
    names = {"entropy": "policy/entropy", "mismatch": "mismatch/k3", "reward": "reward/mean"}
    told = reasons({"entropy": 3.0, "mismatch": 1.0, "grad": -5.0, "reward": 0.01}, names)
    assert [(r.metric, round(r.share, 2)) for r in told] == [("policy/entropy", 0.75), ("mismatch/k3", 0.25)]
    assert reasons({"grad": -1.0}, names) == ()
    assert reasons({"length": 2.0}, names) == ()


def test_a_model_knows_what_a_run_can_tell_and_which_thresholds_fit():
    """By gain; the richest profile whose signals are nearly all there."""
    model = small_model()
    assert model.known(frozenset({"entropy", "length"})) == pytest.approx(0.8)
    assert model.profile(frozenset({"entropy", "mismatch", "length"})).name == "both"
    assert model.profile(frozenset({"entropy"})).name == "entropy alone"
    assert model.profile(frozenset()).name == "entropy alone"
    assert model.limit([-16.0, 0.0]) == "ent_low"
    assert set(model.why([-16.0, 0.0])) == {"entropy", "mismatch"}
    assert [signal_of(f) for f in (*FEATURES, "limit:ent_low:entropy:share", "broken")] == [
        "entropy",
        "mismatch",
        "entropy",
        "broken",
    ]
