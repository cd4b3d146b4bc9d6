"""Trainers that log to wandb or TensorBoard by themselves, mirrored: their steps, and that training stays the same."""

import pytest
import torch
import wandb
from tiny_trainer import make_trainer

import rlwatch

pytestmark = pytest.mark.torch
TEES = {"wandb": rlwatch.tee_wandb, "tensorboard": rlwatch.tee_tensorboard}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """wandb says nothing and writes nothing; TensorBoard writes under the test's directory."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    monkeypatch.delenv("RLWATCH_RUN_ID", raising=False)
    yield
    wandb.finish()


def train(tmp_path, tracker, **config):
    """A trained plain Trainer that reports to ``tracker``."""
    if tracker == "wandb":
        wandb.init(mode="disabled", project="hf")
    trainer = make_trainer(tmp_path, report_to=tracker, **config)
    trainer.train()
    wandb.finish()
    return trainer


def steps_of(store, run):
    merged = {}
    for record in rlwatch.open_store(store).records(run.info.run_id):
        merged.setdefault(record.step, {}).update(record.metrics)
    return merged


@pytest.mark.parametrize("tracker", TEES)
def test_rows_of_the_trainer_are_at_its_global_step(tmp_path, tracker):
    """Whatever the tracker counts; evaluations at the step they are of."""
    store = str(tmp_path / "runs")
    with TEES[tracker](store=store) as tee:
        trainer = train(tmp_path, tracker, logging_steps=2, max_steps=4, eval_strategy="steps", eval_steps=2)
        run = tee.run
    steps = steps_of(store, run)
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}

    assert {step: row["train/loss"] for step, row in steps.items() if "train/loss" in row} == pytest.approx(logged)
    assert {step for step, row in steps.items() if "eval/runtime" in row} == {2, 4}
    assert rlwatch.open_store(store).run(run.info.run_id).state == "finished"


@pytest.mark.parametrize("tracker", TEES)
def test_training_is_bit_identical_with_and_without(tmp_path, tracker):
    """Parameters, optimizer state and random state."""
    results = []
    for name in ("plain", "mirrored"):
        if name == "plain":
            trainer = train(tmp_path / name, tracker)
        else:
            with TEES[tracker](store=str(tmp_path / "runs")):
                trainer = train(tmp_path / name, tracker)
        moments = [v for entry in trainer.optimizer.state_dict()["state"].values() for v in entry.values()]
        results.append([*trainer.model.parameters(), *moments, torch.get_rng_state()])

    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_trainers_configuration_is_recorded_without_its_secrets(tmp_path):
    """What Hugging Face gives wandb after the run began."""
    store = str(tmp_path / "runs")
    with rlwatch.tee_wandb(store=store) as tee:
        train(tmp_path, "wandb", hub_token="hf_secret", max_steps=1)
        config = tee.run.info.config

    assert config["learning_rate"] == 1e-2
    assert "hf_secret" not in repr(config)
