"""How watched training that goes wrong is recorded: NaN, exceptions, interrupts, far-out tokens."""

import logging
import math

import pytest
import torch
from fake_vllm import install
from tiny_trl import FakeRun, digits, make_trainer
from transformers import TrainerCallback

from rlwatch.integrations.trl import watch
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch


class At(TrainerCallback):
    """Does something to the trainer at the end of a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.act(model)


def poison(model):
    """One weight of the first layer becomes NaN."""
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.view(-1)[7] = math.nan


def crash(trainer):
    def at_the_third_batch(completions, **kwargs):
        if trainer.state.global_step == 2:
            raise ZeroDivisionError("no such reward")
        return digits(completions)

    trainer.reward_funcs = [at_the_third_batch]


def test_an_exception_ends_the_run_with_its_cause_and_is_raised_unchanged(tmp_path):
    """The event says what and where; every finished step is recorded first."""
    trainer, run = make_trainer(tmp_path, max_steps=5), FakeRun()
    watch(trainer, run=run)
    crash(trainer)

    with pytest.raises(ZeroDivisionError, match="no such reward") as caught:
        trainer.train()

    (event,) = run.events
    assert (event.kind, event.step) == ("exception", 2)
    assert event.body["error"] == "ZeroDivisionError: no such reward"
    assert "at_the_third_batch" in event.body["where"]
    assert "no such reward" in event.body["traceback"]
    assert list(run.taps()) == [1, 2]
    assert caught.value.__cause__ is None
    assert run.ends == []  # the run was given: whoever made it ends it


def test_a_run_made_by_watch_ends_as_crashed(tmp_path, monkeypatch):
    """And one of training that ends well, as finished."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path / "runs"))
    bad, good = make_trainer(tmp_path / "a", max_steps=3), make_trainer(tmp_path / "b", max_steps=1)
    watch(bad)
    watch(good)
    crash(bad)

    with pytest.raises(ZeroDivisionError):
        bad.train()
    good.train()

    ends = {(str(run.state), run.state_reason) for run in open_store(tmp_path / "runs").runs()}
    assert ends == {("crashed", "ZeroDivisionError: no such reward"), ("finished", "")}


def test_an_interrupt_is_recorded_too(tmp_path):
    """Ctrl-C is a BaseException; it must reach the user."""
    trainer, run = make_trainer(tmp_path), FakeRun()
    watch(trainer, run=run)

    def interrupt(model):
        raise KeyboardInterrupt

    trainer.add_callback(At(1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert run.events[0].body["type"] == "KeyboardInterrupt"
    assert list(run.taps()) == [1]


def test_nan_weights_are_counted_where_the_log_reassures(tmp_path):
    """HF logs loss 0.0 and clip ratios 0.0; the taps say NaN, and how many tokens and tensors."""
    trainer, run = make_trainer(tmp_path, max_steps=3, beta=0.1, num_iterations=4), FakeRun()
    watch(trainer, run=run)
    trainer.add_callback(At(2, poison))
    trainer.train()
    tap, row = run.taps()[3], run.rows()[3]

    assert row["loss"] == 0.0
    assert row["clip_ratio/region_mean"] == 0.0
    assert math.isnan(row["entropy"])
    assert math.isnan(tap["loss/raw"])
    assert math.isnan(tap["ratio/clipfrac_low"])
    assert (tap["nonfinite/loss"], tap["nonfinite/ref_logp"], tap["nonfinite/old_logp"]) == (1, 0, 0)
    assert tap["nonfinite/logp"] == run.taps()[1]["len/mean"] * 8  # the generation is trained on again
    assert tap["nonfinite/grad"] > 0
    assert run.taps()[2]["nonfinite/logp"] == run.taps()[2]["nonfinite/grad"] == 0
    assert run.spikes[-1].step == 3
    assert run.spikes[-1].reason == "non-finite tokens"


def test_the_step_that_died_is_recorded_as_far_as_it_came(tmp_path):
    """The loss pass saw NaN, the backward pass raised: the counts are kept under the step that failed."""
    trainer, run = make_trainer(tmp_path, max_steps=4, num_iterations=4), FakeRun()
    watch(trainer, run=run)
    trainer.add_callback(At(2, poison))
    backward = trainer.accelerator.backward

    def refuse_nan(loss, **kwargs):
        if loss.isnan():
            raise FloatingPointError("loss is NaN")
        backward(loss, **kwargs)

    trainer.accelerator.backward = refuse_nan
    with pytest.raises(FloatingPointError):
        trainer.train()

    assert list(run.taps()) == [1, 2, 3]
    assert run.taps()[3]["nonfinite/loss"] == 1
    assert run.events[-1].step == 2


def test_sampling_from_nan_weights_dies_and_is_recorded(tmp_path):
    """The usual end: generate() raises before any log row shows a NaN."""
    trainer, run = make_trainer(tmp_path, max_steps=4), FakeRun()
    watch(trainer, run=run)
    trainer.add_callback(At(2, poison))

    with pytest.raises(RuntimeError, match="probability tensor"):
        trainer.train()

    assert run.events[0].body["error"].startswith("RuntimeError: probability tensor")
    assert run.events[0].step == 2


def test_far_out_tokens_are_kept_with_ids_and_text_on_request(tmp_path):
    """A sampler that drifts far: at most 64 tokens, worst first, with what the trainer knows of each."""
    trainer, run = make_trainer(tmp_path, max_steps=1), FakeRun()
    watch(trainer, run=run, text=True)
    install(trainer, noise=0.02, surprise=4.0)
    trainer.train()
    (batch,) = run.spikes
    columns = batch.columns
    d = abs(columns["old_logp"] - columns["rollout_logp"])

    assert 0 < len(batch) <= 64
    assert (batch.step, batch.reason) == (1, "far-out tokens")
    assert (d > 3).all()
    assert (d[:-1] >= d[1:] - 1e-6).all()
    assert columns["sequence"].dtype == columns["token_id"].dtype == "int64"
    assert columns["text"] == [trainer.processing_class.decode([t]) for t in columns["token_id"]]
    assert set(columns) == {
        "sequence", "position", "token_id", "logp", "old_logp", "rollout_logp", "ratio", "advantage", "screen",
        "entropy", "text",
    }  # fmt: skip


def test_ordinary_steps_keep_no_tokens_and_no_text(tmp_path):
    """Nothing far out, nothing kept; and never text unless asked."""
    trainer, run = make_trainer(tmp_path, max_steps=2), FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert run.spikes == []
    assert [batch.step for batch in run.distributions] == [1, 2]


def test_the_hidden_nan_filter_is_mentioned_once(tmp_path, caplog):
    """HF's default hides NaN losses; watched, that is information, not a warning."""
    with caplog.at_level(logging.INFO, logger="rlwatch"):
        watch(make_trainer(tmp_path), run=FakeRun())

    assert [r.levelname for r in caplog.records if "logging_nan_inf_filter" in r.getMessage()] == ["INFO"]
