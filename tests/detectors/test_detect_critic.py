"""The value function of PPO: divergence, clipping, drift; and what an untrained or a noisy one may look like."""

import math
import random

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.critic.value_function import ValueClipping, ValueDivergence, ValueDrift

AT = 120


def learning(start, end, over=80.0):
    """A curve that goes from one level to another as a head is trained."""
    return lambda step: end + (start - end) * math.exp(-step / over)


def noisy(curve, by=0.2, seed=0):
    """The curve with multiplicative noise."""
    noise = random.Random(seed)
    return lambda step: curve(step) * math.exp(noise.gauss(0.0, by))


def climbing(level, times, over):
    """A curve: ``level`` before ``AT``, ``times`` it from ``over`` steps later on, geometric between."""
    return lambda step: level * times ** min(max((step - AT) / over, 0.0), 1.0)


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_value_loss_that_explodes_is_warned_of_then_critical_at_any_cadence(every):
    """From 0.1 to a thousand times that in twenty steps."""
    rows = exact({"critic/value_loss": climbing(0.1, 1000.0, 20)}, length=300 // every, every=every)

    found = alarms(ValueDivergence(), rows)

    assert AT < found["warning"].step <= AT + 25 + 5 * every
    assert found["critical"].step <= AT + 45 + 5 * every
    assert AT <= found["critical"].onset_step <= AT + 10 + every
    assert found["critical"].metric == "critic/value_loss"


@pytest.mark.parametrize("seed", range(4))
def test_a_head_that_learns_is_no_news_however_it_began(seed):
    """The loss falls to a tenth, the explained variance rises from below nothing."""
    rows = exact(
        {
            "critic/value_loss": noisy(learning(2.0, 0.2), seed=seed),
            "critic/explained_var": learning(-0.8, 0.6),
        },
        length=400,
    )

    assert when(ValueDivergence(), rows) == {}


def test_a_loss_that_comes_back_to_how_it_began_is_no_divergence():
    """New data are as hard as the first were."""
    rows = exact({"critic/value_loss": lambda s: learning(1.0, 0.1)(s) if s < AT else 0.9}, length=250)

    assert when(ValueDivergence(), rows) == {}


@pytest.mark.parametrize("every", [1, 5, 20])
def test_explained_variance_that_is_lost_is_a_warning(every):
    """From half of the variance to less than none."""
    rows = exact({"critic/explained_var": then(0.5, -0.1, AT)}, length=max(300 // every, 30), every=every)

    found = alarms(ValueDivergence(), rows)

    assert set(found) == {"warning"}
    assert AT + 15 <= found["warning"].step <= AT + 30 + 5 * every
    assert "at its best 0.5" in found["warning"].message


def test_values_that_never_explain_anything_are_told_once_they_had_their_time():
    """Worse than the mean return for a hundred steps; just useless is left alone."""
    assert alarms(ValueDivergence(), exact({"critic/explained_var": always(-0.9)}, length=200))["warning"].step >= 100
    assert when(ValueDivergence(), exact({"critic/explained_var": always(-0.2)}, length=200)) == {}


def test_loss_and_explained_variance_together_are_critical():
    """Fivefold and negative: rlprobe's value divergence."""
    curves = {"critic/value_loss": climbing(0.2, 6.0, 60), "critic/explained_var": then(0.5, -0.3, AT)}

    assert worst(ValueDivergence(), exact(curves, length=260)) == "critical"


def test_values_that_are_clipped_are_told_and_few_are_not():
    """Four fifths of them, and a tenth."""
    assert set(when(ValueClipping(), exact({"critic/value_clipfrac": then(0.05, 0.8, AT)}, length=200))) == {"warning"}
    assert when(ValueClipping(), exact({"critic/value_clipfrac": then(0.05, 0.1, AT)}, length=200)) == {}


@pytest.mark.parametrize("metric", ["critic/value_mean", "critic/returns_mean"])
def test_values_and_returns_that_leave_the_reward_are_told(metric):
    """From beside it to five times its size away; as much of a rise of the reward itself moves nothing."""
    calm = {"reward/mean": always(0.5), "critic/returns_mean": always(0.45), "critic/value_mean": always(0.4)}
    away = alarms(ValueDrift(), exact(calm | {metric: then(0.4, -2.5, AT)}, length=200))
    rising = dict.fromkeys(calm, lambda s: 0.2 + 0.003 * s)

    assert set(away) == {"warning"}
    assert away["warning"].onset_step == AT
    assert when(ValueDrift(), exact(rising, length=200)) == {}


def test_without_a_reward_there_is_no_size_to_compare_with():
    """Values and returns alone say nothing."""
    rows = exact({"critic/returns_mean": always(0.4), "critic/value_mean": then(0.4, 90.0, AT)}, length=200)

    assert when(ValueDrift(), rows) == {}
