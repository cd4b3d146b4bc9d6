"""Settings in which runs differ."""

import math

import pytest

from rlwatch.compare import ABSENT, config_diff


def differing(*configs):
    """Name -> values of the settings that differ."""
    return {setting.name: setting.values for setting in config_diff(configs)}


def test_nested_settings_are_told_by_their_path():
    """What is the same is left out."""
    one = {"lr": 1e-6, "model": {"name": "q", "lora": {"r": 16}}, "tags": ["a", "b"]}
    other = {"lr": 2e-6, "model": {"name": "q", "lora": {"r": 32}}, "tags": ["a", "b"]}

    assert differing(one, other) == {"lr": (1e-6, 2e-6), "model.lora.r": (16, 32)}


def test_a_setting_that_one_run_lacks_is_not_null():
    """Three runs, three ways."""
    assert differing({"beta": None}, {}, {"beta": 0.1}) == {"beta": (None, ABSENT, 0.1)}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (True, 1, False),
        (0, False, False),
        (1, 1.0, True),
        (math.nan, math.nan, True),
        (math.nan, 0.1, False),
        ("1", 1, False),
    ],
)
def test_what_is_the_same_value(one, other, same):
    """A switch is no number; NaN is NaN."""
    assert bool(differing({"x": one}, {"x": other})) is not same


def test_lists_are_one_value_unless_they_hold_settings():
    """A reward's weight is found within its list."""
    one = {"rewards": [{"name": "math", "weight": 1.0}], "betas": [0.9, 0.95]}
    other = {"rewards": [{"name": "math", "weight": 0.5}], "betas": [0.9, 0.99]}

    assert differing(one, other) == {"betas": ([0.9, 0.95], [0.9, 0.99]), "rewards.0.weight": (1.0, 0.5)}


def test_secrets_are_not_shown():
    """Not as a difference either: both are blacked out."""
    one, other = ({"hub_token": f"hf_{letter * 20}", "env": {"API_KEY": letter * 30}} for letter in "ab")

    assert differing(one, other) == {}
    assert "hf_" not in str(config_diff([one, {}]))
