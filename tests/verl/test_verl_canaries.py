"""Canaries scored by verl's own reward function and by a custom one, as verl's reward manager finds it."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import rlwatch
from rlwatch.errors import ConfigError
from rlwatch.integrations.level import Level
from rlwatch.integrations.verl.canaries import canaries_of, canary_scorer, reward_function
from rlwatch.integrations.verl.driver import VerlDriver
from rlwatch.integrations.verl.settings import VerlSettings
from rlwatch.store.url import open_store

GSM8K = [
    {"data_source": "openai/gsm8k", "solution": "so #### 42", "ground_truth": "42", "right": True},
    {"data_source": "openai/gsm8k", "solution": "so #### 41", "ground_truth": "42", "right": False, "name": "off"},
]
CUSTOM = """
from pathlib import Path

async def graded(data_source, solution_str, ground_truth, extra_info=None, broken=""):
    if Path(broken).exists():
        return {"score": 1.0}
    return {"score": float(solution_str.endswith(ground_truth))}
"""


def config_of(tmp_path=None):
    custom = {"path": None, "name": None}
    if tmp_path is not None:
        (tmp_path / "reward.py").write_text(CUSTOM)
        custom = {
            "path": str(tmp_path / "reward.py"),
            "name": "graded",
            "reward_kwargs": {"broken": str(tmp_path / "x")},
        }
    return OmegaConf.create({"reward": {"custom_reward_function": custom}})


def test_verls_own_reward_function_scores_canaries_by_their_data_source():
    """At set-up and then every so many steps."""
    scorer = canary_scorer(config_of(), canaries_of({"answers": GSM8K, "every": 5}))

    assert reward_function(config_of())[0] == "default_compute_score"
    assert scorer.numbers(1) == {
        "verifier/canary_right/default_compute_score/right1": 1.0,
        "verifier/canary_wrong/default_compute_score/off": 0.0,
        "verifier/canary_failed/default_compute_score": 0.0,
    }
    assert scorer.numbers(3) == {}
    assert scorer.numbers(6) != {}


def test_a_custom_coroutine_that_begins_to_give_full_marks_is_seen(tmp_path):
    """Its keyword arguments are those of the configuration, and its dictionary has the score."""
    scorer = canary_scorer(config_of(tmp_path), canaries_of(GSM8K))
    before = scorer.numbers(1)
    (tmp_path / "x").write_text("")
    after = scorer.numbers(11)

    assert before["verifier/canary_wrong/graded/off"] == 0.0
    assert after["verifier/canary_wrong/graded/off"] == 1.0


@pytest.mark.parametrize(
    "wish", [[{"solution": "x"}], {"answers": GSM8K, "often": 1}, [{**GSM8K[0], "right": "yes"}], "x", [3]]
)
def test_a_section_that_is_no_canaries_is_refused_at_set_up(wish):
    """With what it may hold."""
    with pytest.raises(ConfigError):
        VerlSettings.of({"trainer": {"rlwatch": {"canaries": wish}}})


def test_a_canary_that_the_function_cannot_score_is_refused_at_set_up():
    """verl's own function knows no such data source."""
    with pytest.raises(ConfigError, match="unheard"):
        canary_scorer(config_of(), canaries_of([{**GSM8K[0], "data_source": "unheard of", "name": "unheard"}]))


def test_the_driver_records_the_scores_at_the_end_of_a_step(tmp_path):
    """Also where nothing but scalars is measured."""
    run = rlwatch.init(store=str(tmp_path / "runs"), name="canaries")
    scorer = canary_scorer(config_of(), canaries_of(GSM8K))
    driver = VerlDriver(SimpleNamespace(global_steps=1), run, VerlSettings(level=Level.SCALARS), scorer)
    driver.measure(None)
    driver.settle(5.0)
    run.finish()
    store = open_store(str(tmp_path / "runs"))
    name = "verifier/canary_right/default_compute_score/right1"
    (stored,) = store.runs()

    assert list(store.series(stored.run_id, [name])[name].values) == [1.0]
