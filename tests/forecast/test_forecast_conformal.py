"""A threshold from healthy runs keeps its budget on the next ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.errors import ConfigError
from rlwatch.forecast.thresholds import recalibrated


def healthy(runs, steps=1000, seed=0):
    """Runs whose forecast is mostly low, with a bump now and then."""
    draw = np.random.default_rng(seed)
    found = {}
    for i in range(runs):
        p = 0.02 + 0.01 * draw.random(steps)
        for at in draw.integers(0, steps - 10, draw.poisson(2.0)):
            p[at : at + 10] += draw.random() ** 3
        found[f"r{i}"] = list(zip(range(1, steps + 1), np.minimum(p, 1.0).tolist(), strict=True))
    return found


def episodes(steps):
    """Stretches of alarms that 25 quiet steps keep apart."""
    return sum(1 for i, step in enumerate(steps) if i == 0 or step - steps[i - 1] > 25)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.5, 1.0, 2.0]))
def test_what_was_seen_is_within_the_budget_and_one_less(seed, budget):
    """The one that is still to come has its place; a threshold a little lower would alarm more often."""
    found = recalibrated(healthy(8, seed=seed), budget)
    assert found.steps == 8000
    assert found.episodes <= budget * 8 - 1


def test_the_next_runs_are_within_the_budget_on_average():
    """Over many draws of past and future, no more episodes than promised."""
    rates = []
    for seed in range(20):
        threshold = recalibrated(healthy(6, seed=seed), 1.0).threshold
        future = healthy(6, seed=1000 + seed)
        rates.append(sum(episodes([step for step, p in rows if p >= threshold]) for rows in future.values()) / 6.0)
    assert np.mean(rates) <= 1.0


def test_it_is_never_lower_than_what_it_is_told():
    """Runs that never moved do not make the forecaster jumpy."""
    quiet = {"a": [(s, 0.01) for s in range(1, 3001)]}
    found = recalibrated(quiet, 1.0, least=0.4)
    assert (found.threshold, found.episodes) == (0.4, 0)
    assert recalibrated(quiet, 1.0).threshold <= 0.0101


def test_too_few_healthy_steps_are_refused_with_what_it_takes():
    """Fewer than two thousand, or too few for a strict budget."""
    with pytest.raises(ConfigError, match=r"500 healthy steps are too few.*takes 2000"):
        recalibrated({"a": [(s, 0.1) for s in range(1, 501)]}, 1.0)
    with pytest.raises(ConfigError, match=r"takes 4000"):
        recalibrated({"a": [(s, 0.1) for s in range(1, 3001)]}, 0.25)
