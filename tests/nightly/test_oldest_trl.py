"""The oldest TRL and transformers that pyproject.toml promises; collected by ``make nightly`` only."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
import tiny_trl
import trl

from rlwatch.integrations.trl import watch

KNOWN = {one.name for one in dataclasses.fields(trl.GRPOConfig)}


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_tokens_rewards_and_gradients_are_recorded(tmp_path, kind, caplog, monkeypatch):
    """Three steps: every level's metrics, no warning, no error."""
    monkeypatch.setattr(tiny_trl, "COMMON", {name: v for name, v in tiny_trl.COMMON.items() if name in KNOWN})
    trainer, run = tiny_trl.make_trainer(tmp_path, kind=kind, beta=0.05), tiny_trl.FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert not [record for record in caplog.records if record.name == "rlwatch"]
    assert run.counters.snapshot() == {}
    assert list(run.taps()) == list(run.rows()) == [1, 2, 3]
    expected = {"policy/entropy", "reward/mean", "optim/grad_norm", "loss/raw", "policy/kl_ref_k3"}
    assert expected <= run.taps()[2].keys()
    assert len([name for name in run.taps()[2] if name.startswith("grad_layer/")]) >= 3
