"""Recipes of ``benchmarks/forecast``: what goes wrong in a run, when, and what its twin is."""

import json
import math
from dataclasses import fields, replace
from itertools import islice

import pytest
from forecast_testbed import Change, Config, Knobs, recipes
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


def test_every_recipe_makes_runs_that_it_describes():
    """All knobs are real, faults begin after the forecasts do, and a failing recipe turns something."""
    names = {f.name for f in fields(Knobs)}
    for name, recipe in recipes.RECIPES.items():
        for number in range(12):
            made = recipes.plan(name, 1, number)
            late = [change for change in made.config.changes if change.at]

            assert (made.recipe, made.family) == (name, recipe.family)
            assert {knob for change in made.config.changes for knob in change.knobs} <= names
            assert all(60 <= change.at < 250 < made.config.steps for change in late)
            assert recipe.healthy or made.config.changes
            assert json.loads(json.dumps(made.config.record()))["steps"] == made.config.steps


def test_there_are_enough_ways_to_fail_and_most_come_slow_and_sudden():
    failing = [recipe for recipe in recipes.FAILING if not recipe.healthy]
    speeds = {}
    for recipe in failing:
        overs = [change.over for n in range(30) for change in recipes.plan(recipe.name, 1, n).config.changes]
        speeds[recipe.name] = (any(overs), not all(overs))

    assert len(failing) >= 25
    assert len({recipe.family for recipe in failing}) >= 8
    assert sum(both == (True, True) for both in speeds.values()) >= 25


def test_any_stretch_of_runs_is_a_fair_mix():
    """A corpus that is cut short is still one: over a third healthy, recipes alike, no run twice."""
    made = list(islice(recipes.plans(1), 300))
    healthy = sum(plan.family == "healthy" for plan in made)
    counts = [sum(plan.recipe == recipe.name for plan in made) for recipe in recipes.FAILING]

    assert len({plan.run for plan in made}) == 300
    assert 0.35 * 300 < healthy < 0.55 * 300
    assert min(counts) >= 3
    assert max(counts) <= 5
    assert made[:50] == list(islice(recipes.plans(1), 50))


def test_a_pair_differs_in_the_fault_alone():
    made = {plan.run: plan for plan in islice(recipes.plans(1), 150)}
    twins = [plan for plan in made.values() if plan.pair]

    assert len(twins) >= 8
    for twin in twins:
        of = recipes.plan(twin.pair.rsplit("-", 2)[0], 1, int(twin.pair.rsplit("-", 1)[1]))
        assert (twin.seed, twin.config) == (of.seed, of.config.without_changes())
        assert (twin.recipe, twin.family, twin.fault_step) == ("control", "healthy", None)
        assert of.fault_step is not None


def test_no_recipe_is_known_by_what_it_starts_from():
    """The base is drawn from one distribution: means of its numbers do not tell recipes apart."""
    many = 300
    rates = {
        name: sum(math.log(recipes.plan(name, 1, n).config.knobs.lr) for n in range(many)) / many
        for name in ("plain", "lr_step", "kl_k1", "hack_magic")
    }

    assert max(rates.values()) - min(rates.values()) < 0.12


@given(st.integers(0, 60), st.integers(0, 30), st.floats(0.01, 5), st.floats(0.01, 5), st.booleans())
def test_a_change_grows_to_its_end_and_never_past_it(step, over, old, new, exponential):
    change = Change(20, {"lr_factor": new}, over, exponential=exponential)
    now = Config(Knobs(lr_factor=old), (change,)).at(step).lr_factor

    assert min(old, new) * (1 - 1e-9) <= now <= max(old, new) * (1 + 1e-9)
    assert step >= 20 or now == old
    assert step < 20 + over or now == pytest.approx(new)


def test_a_change_may_end_and_what_is_no_number_changes_at_once():
    change = Change(5, {"engine": "int3", "stale": 11, "entropy": 1.0}, over=10, until=9, exponential=True)
    config = Config(Knobs(stale=1, entropy=0.0), (change,))

    assert [config.at(s).engine for s in (4, 5, 8, 9)] == ["bf16", "int3", "int3", "bf16"]
    assert config.at(5).entropy == pytest.approx(0.01 * 100**0.1)
    assert isinstance(config.at(7).stale, int)
    assert config.at(9) == config.knobs


@pytest.mark.parametrize(("pace", "least"), [(recipes.Pace.GRADUAL, 60), (recipes.Pace.LONG, 120)])
def test_slow_faults_grow_but_for_those_that_come_at_once_by_nature(pace, least):
    """The healthy runs, the bases and the steps at which faults begin are the same."""
    sudden, slow = (list(islice(recipes.plans(7, pace=each), 74)) for each in (recipes.Pace.DRAWN, pace))
    for one, other in zip(sudden, slow, strict=True):
        assert (one.run, one.fault_step, one.config.knobs) == (other.run, other.fault_step, other.config.knobs)
        if one.recipe in recipes.UNSEEN:
            assert other.config.changes[0].over >= least, "it grows, only nobody sees it"
        if one.recipe == "control" or recipes.RECIPES[one.recipe].healthy or one.recipe in recipes.AT_ONCE:
            assert one.config.changes == other.config.changes
        else:
            assert all(
                b.over > a.over and b.over >= least
                for a, b in zip(one.config.changes, other.config.changes, strict=True)
            )


def test_a_larger_batch_is_the_same_run_with_more_prompts():
    """Also in a step whose event or fault changes their number; nothing else is drawn anew."""
    small, large = (list(islice(recipes.plans(5, batch=batch), 148)) for batch in (1, 4))
    for one, other in zip(small, large, strict=True):
        assert (one.run, one.seed, one.fault_step) == (other.run, other.seed, other.fault_step)
        for step in (0, 100, 220):
            before, after = one.config.at(step), other.config.at(step)
            assert after == replace(before, prompts=4 * before.prompts)

    assert {change.knobs.get("prompts") for plan in large for change in plan.config.changes} >= {None, 16}


def test_a_cold_start_is_drawn_alike_for_all_and_changes_neither_fault_nor_the_rest():
    """Else what a run starts from would tell the recipes apart."""
    warm, cold = (list(islice(recipes.plans(9, start=start), 148)) for start in recipes.Start)
    for one, other in zip(warm, cold, strict=True):
        before, after = one.config, other.config
        assert (one.run, one.seed, one.fault_step, before.changes) == (
            *(other.run, other.seed, other.fault_step),
            after.changes,
        )
        assert before.base < recipes.BASES <= after.base < recipes.BASES + len(recipes.LOOSE)
        drawn = {"lr": before.knobs.lr, "format_bonus": 0.0, "partial": before.knobs.partial, "right": 1.0}
        assert replace(after.knobs, **drawn) == before.knobs
        assert 0.2 <= after.knobs.lr / before.knobs.lr <= 1.0

    for plan in cold:
        if plan.pair:
            of = next(other for other in cold if other.run == plan.pair)
            assert plan.config == of.config.without_changes()
