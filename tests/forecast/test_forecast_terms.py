"""What a run is held to depends on what it logs."""

import pytest
from forecast_models import small_model

from rlwatch.forecast.forecaster import ENOUGH, LEAN, LIMITED, terms
from rlwatch.forecast.model import shipped_model
from rlwatch.forecast.signals import SIGNALS

EVERYTHING = frozenset(signal.name for signal in SIGNALS)


def test_a_run_that_logs_everything_has_the_thresholds_of_its_budget():
    """Of the whole profile, and nothing is said against it."""
    model = shipped_model()
    held = terms(model, EVERYTHING, "1")

    assert (held.model, held.static) == (model.profiles[0].thresholds["1"], model.profiles[0].static["1"])
    assert (held.limits_only, held.lean, held.absent) == ("", False, "")


@pytest.mark.parametrize(
    "signals", [{"entropy", "grad"}, {"reward"}, {"entropy", "grad", "reward", "kl_ref", "length"}]
)
def test_the_less_a_run_logs_the_less_its_alarm_says(signals):
    """Below a share of the gain its word alone is a remark; below another limits alone, with what would help."""
    model = shipped_model()
    known = model.known(frozenset(signals))
    held = terms(model, frozenset(signals), "1")
    profile = model.profile(frozenset(signals))

    assert held.lean == (known < LEAN)
    assert held.static == profile.static["1"]
    assert bool(held.limits_only) == (known < ENOUGH)
    if held.limits_only:
        assert f"logs {known:.0%} of what the model goes by; it would need " in held.limits_only


def test_without_a_signal_that_has_a_limit_there_is_no_forecast():
    """Neither layer has anything to go by."""
    poor = terms(shipped_model(), frozenset({"advantage"}), "1")

    assert "advantage" not in LIMITED
    assert poor.absent.startswith("no forecast because this run logs")


def test_a_threshold_of_ones_own_counts_down_to_that_of_twice_the_budget():
    """Above it as it is; below it the model's for a budget of 1 holds."""
    model = shipped_model()
    floor = model.profiles[0].thresholds["1"]

    assert terms(model, EVERYTHING, "0.5", 0.99).model == 0.99
    assert terms(model, EVERYTHING, "0.5", floor / 2).model == floor
    assert terms(small_model(), EVERYTHING, "1", 0.5).static == small_model().profiles[0].static["1"]
