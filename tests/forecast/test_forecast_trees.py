"""Trees are read as they were grown, and what they say is shared out without a remainder."""

import math

import numpy as np
import pytest
from forecast_models import DEEP, FEATURES, LINE, STUMP, small_model
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.forecast.model import LEAF, Head, Tree, probability, reasons, shipped_model, signal_of

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
    assert Head(0.0, (STUMP,)).logit(x) == stump
    assert Head(0.0, (DEEP,)).logit(x) == deep
    assert Head(-2.0, (STUMP, DEEP), 0.9, 0.1).logit(x) == pytest.approx(0.9 * (-2.0 + stump + deep) + 0.1)


def walked(tree, x):
    """The value of the leaf that a walk from the root ends in."""
    node = 0
    while (feature := tree.feature[node]) != LEAF:
        left = tree.missing_left[node] if math.isnan(x[feature]) else x[feature] <= tree.threshold[node]
        node = tree.left[node] if left else tree.right[node]
    return tree.value[node]


def rows_of_all_kinds(features, thresholds):
    """Noise, thresholds met exactly, and what is missing or infinite."""
    draw = np.random.default_rng(0)
    rows = 3.0 * draw.standard_t(2, (100, features))
    rows[:30] = draw.choice(thresholds, (30, features))
    rows[draw.random(rows.shape) < 0.3] = math.nan
    rows[:, 1][::7], rows[:, 2][::7], rows[50] = math.inf, -math.inf, math.nan
    return rows


def test_all_trees_at_once_end_where_a_walk_of_each_ends():
    """To the last bit, in the shipped model, added up tree by tree."""
    head = shipped_model().hazards[0]
    bare = Head(head.base, head.trees)
    for x in rows_of_all_kinds(305, [t for tree in head.trees for t in tree.threshold]).tolist():
        total = head.base
        for tree in head.trees:
            total += walked(tree, x)
        assert bare.logit(x) == total


def test_many_rows_at_once_are_told_what_each_is_told_alone():
    """To the last bit, of the shipped model, however many there are."""
    model = shipped_model()
    rows = rows_of_all_kinds(
        len(model.features), [t for h in model.hazards for tree in h.trees for t in tree.threshold]
    )
    assert model.chances_of(rows) == [model.chances(x) for x in rows.tolist()]


def test_a_tree_may_have_as_many_leaves_as_a_number_has_bits():
    """A chain of 63 questions: the last leaf is the 64th bit."""
    asked = [i if i % 2 == 0 else LEAF for i in range(127)]
    asked[126] = LEAF
    feature = tuple(0 if node != LEAF else LEAF for node in asked)
    inner = [node for node in range(127) if feature[node] == 0]
    chain = Tree(
        feature,
        tuple(float(node // 2) for node in range(127)),
        (0,) * 127,
        tuple(node + 1 if node in inner else 0 for node in range(127)),
        tuple(node + 2 if node in inner else 0 for node in range(127)),
        tuple(float(node) for node in range(127)),
    )
    for x in ([-1.0], [0.0], [30.5], [61.5], [62.5], [math.nan]):
        assert Head(0.0, (chain,)).logit(x) == walked(chain, x)


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
