"""``report_to="rlwatch"``: the registry of transformers knows the callback once the integration is imported."""

import math

import pytest
import tiny_trainer
import tiny_trl
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import rlwatch
from rlwatch.errors import ConfigError
from rlwatch.integrations.transformers import RLWatchCallback, watch
from rlwatch.integrations.transformers.compat import offer

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("make", [tiny_trainer.make_trainer, tiny_trl.make_trainer], ids=["trainer", "grpo"])
def test_a_trainer_told_to_report_to_rlwatch_leaves_a_run_with_its_log(tmp_path, monkeypatch, make):
    """Into the store that the environment names, beside another tracker."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = make(tmp_path, report_to=["rlwatch", "tensorboard"], max_steps=3)
    trainer.train()
    (run,) = rlwatch.open(tmp_path / "store")
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}

    assert run.info.source == ("trl/grpo" if "grpo" in type(trainer).__name__.lower() else "transformers")
    recorded = run.history(["loss"])
    assert dict(zip(recorded["step"], recorded["loss"], strict=True)) == pytest.approx(logged)
    assert list(logged) == [1, 2, 3]
    assert all(map(math.isfinite, logged.values()))
    assert list((tmp_path / "board").glob("events.out.tfevents*"))


def test_watching_a_trainer_that_reports_to_rlwatch_is_refused(tmp_path):
    """Both would record the same rows; the message names the setting."""
    trainer = tiny_trainer.make_trainer(tmp_path, report_to="rlwatch")

    with pytest.raises(ConfigError, match='report_to="rlwatch"'):
        watch(trainer)


def test_nobody_else_s_name_is_taken_and_all_means_what_it_meant(monkeypatch):
    """A callback that somebody registered under the name stays; other trackers are untouched."""
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "rlwatch", dict)
    offer(RLWatchCallback)

    assert INTEGRATION_TO_CALLBACK["rlwatch"] is dict
    assert "rlwatch" not in get_available_reporting_integrations()
