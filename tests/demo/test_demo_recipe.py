"""The schedule of the demo: settled and harmless first, then growing without anybody's doing."""

from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.demo import Recipe
from rlwatch.demo.checks import PATIENCE

RECIPE = Recipe()
RATES = [RECIPE.learning_rate_at(step) for step in range(RECIPE.steps)]


def test_it_warms_up_settles_and_then_holds_until_the_range_test():
    """No growth between the warm-up and the slip."""
    top, settled, slip = RECIPE.warm_up_steps - 1, RECIPE.settled_step, RECIPE.range_test_step

    assert RATES[: top + 1] == sorted(RATES[: top + 1])
    assert RATES[top] == RECIPE.top_learning_rate
    assert all(later <= earlier for earlier, later in pairwise(RATES[top : slip + 1]))
    assert set(RATES[settled : slip + 1]) == {RECIPE.learning_rate}


def test_the_range_test_grows_by_a_fixed_factor_up_to_its_end():
    """Every step by the same share, then no further."""
    tested = RATES[RECIPE.range_test_step :]
    growing = [rate for rate in tested if rate < RECIPE.range_test_end]
    factors = [later / earlier for earlier, later in pairwise(growing)]

    assert factors == pytest.approx([RECIPE.range_test_growth] * len(factors))
    assert max(RATES) == tested[-1] == RECIPE.range_test_end


@given(st.integers(0, 10_000))
def test_the_rate_is_always_positive_and_never_beyond_the_largest_named(step):
    """Also far behind the end."""
    assert 0.0 < RECIPE.learning_rate_at(step) <= max(RECIPE.top_learning_rate, RECIPE.range_test_end)


def test_a_person_has_time_to_act_before_the_slip():
    """Even one who waits for the chart, on a machine that makes ten steps a second and answers within two."""
    assert RECIPE.range_test_step - PATIENCE >= 40
    assert RECIPE.steps - RECIPE.range_test_step >= 120


def test_the_batch_is_whole_groups():
    """TRL refuses anything else."""
    assert RECIPE.batch % RECIPE.generations == 0


def test_a_recipe_survives_the_way_to_another_process():
    """It travels as JSON."""
    changed = Recipe(seed=7, steps=11)

    assert Recipe(**asdict(changed)) == changed


def test_without_warm_up_and_settling_the_rate_is_constant():
    """As the sample logs use it."""
    flat = Recipe(warm_up_steps=0, settled_step=0, range_test_step=10**9)

    assert {flat.learning_rate_at(step) for step in range(500)} == {flat.learning_rate}
