"""Watching a plain Trainer of Hugging Face: what is recorded, what it can be told, and that it never notices."""

import logging
import math
import sys

import accelerate
import pytest
import torch
import transformers
from preloaded import run_program
from tiny_loop import FakeRun
from tiny_trainer import make_trainer
from transformers import Trainer, TrainerCallback

import rlwatch
from rlwatch.errors import ConfigError
from rlwatch.integrations.transformers import RLWatchCallback, clip_layers, watch

pytestmark = pytest.mark.torch


def watched(tmp_path, *, level="full", **config):
    """(trainer, run) after training."""
    trainer, run = make_trainer(tmp_path, **config), FakeRun()
    watch(trainer, run=run, level=level)
    trainer.train()
    assert run.counters.snapshot() == {}
    return trainer, run


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_raw_loss_is_the_one_the_trainer_logs(tmp_path, accumulation):
    """Summed over micro-batches as the trainer sums it."""
    _, run = watched(tmp_path, gradient_accumulation_steps=accumulation)

    for step, row in run.steps.items():
        assert row["loss/raw"] == pytest.approx(row["loss"], rel=1e-4), step
    assert sorted(run.steps) == [1, 2, 3, 4]


def test_gradients_are_those_before_clipping(tmp_path):
    """Per layer, and their norm is the trainer's own."""
    _, run = watched(tmp_path)
    row = run.steps[2]
    layers = [row[f"grad_layer/layers.{i}"] for i in (0, 1)]

    assert row["optim/grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
    assert row["grad_norm"] > 0.1
    assert math.hypot(*layers) == pytest.approx(row["grad_norm"], rel=1e-4)
    assert row["nonfinite/grad"] == 0


def test_gradients_nobody_clips_are_read_before_the_optimizer_steps(tmp_path):
    """The trainer never asks for their norm."""
    _, run = watched(tmp_path, max_grad_norm=0.0)

    assert all(row["optim/grad_norm"] > 0 for row in run.steps.values())


def test_a_nan_loss_is_seen_where_the_log_reassures(tmp_path):
    """Hugging Face logs the running mean instead."""
    _, run = watched(tmp_path, bad=range(64), max_steps=2)
    row = run.steps[1]

    assert math.isnan(row["loss/raw"])
    assert row["nonfinite/loss"] == 1
    assert row["loss"] == 0.0
    assert row["nonfinite/grad"] == 4


LEVELS = {
    "scalars": set(),
    "tokens": {"loss/raw"},
    "gradients": {"loss/raw", "optim/grad_norm"},
    "full": {"loss/raw", "optim/grad_norm"},
}


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_adds_to_the_one_before(tmp_path, level):
    """Scalars alone need no tap."""
    _, run = watched(tmp_path, level=level, max_steps=1)

    assert {"loss/raw", "optim/grad_norm"} & set(run.steps[1]) == LEVELS[level]
    assert {"loss", "grad_norm", "learning_rate"} <= set(run.steps[1])


def test_an_unknown_level_is_refused_before_anything_changes(tmp_path):
    """Naming those there are."""
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match="level must be one of scalars, tokens, gradients, full, got 'all'"):
        watch(trainer, run=FakeRun(), level="all")

    assert "training_step" not in vars(trainer)


def state_of(trainer):
    optimizer = trainer.optimizer.state_dict()["state"]
    moments = [value for entry in optimizer.values() for value in entry.values()]
    return [*(p.detach().clone() for p in trainer.model.parameters()), *moments, torch.get_rng_state()]


@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}])
def test_training_is_bit_identical_to_training_unwatched(tmp_path, config):
    """Parameters, optimizer state and random state."""
    plain = make_trainer(tmp_path / "a", **config)
    plain.train()
    before = state_of(plain)
    seen, _ = watched(tmp_path / "b", **config)
    after = state_of(seen)

    assert len(before) == len(after)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("broken", ["loss_stats", "model_norms", "vocab_size_of"])
def test_a_failing_tap_neither_stops_nor_changes_training(tmp_path, monkeypatch, broken):
    """Counted and dropped."""
    plain = make_trainer(tmp_path / "a")
    plain.train()
    monkeypatch.setattr(f"rlwatch.integrations.transformers.taps.{broken}", lambda *a, **k: 1 / 0)
    trainer, run = make_trainer(tmp_path / "b"), FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert run.counters["errors"] > 0
    assert list(run.steps) == [1, 2, 3, 4]
    assert all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), trainer.model.parameters(), strict=True))


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def test_a_live_trainer_saves_slows_down_and_stops_on_command(tmp_path):
    """At the end of a step; every command is answered with the step."""
    trainer, run = make_trainer(tmp_path, max_steps=10), FakeRun()
    commands = {1: ("save-checkpoint", {}), 2: ("lower-lr", {"scale": 0.5}), 3: ("stop", {"save": "no"})}
    for step, (kind, args) in commands.items():
        trainer.add_callback(At(step, lambda kind=kind, args=args: run.send(kind, **args)))
    watch(trainer, run=run)
    trainer.train()

    assert trainer.state.global_step == 3
    assert (tmp_path / "out" / "checkpoint-1").is_dir()
    assert [(a.status, a.step) for a in run.answers] == [("done", 1), ("done", 2), ("done", 3)]
    assert run.steps[3]["learning_rate"] == pytest.approx(0.5e-2)


def test_what_no_plain_trainer_can_do_is_rejected_with_the_reason(tmp_path):
    """There is no reference to reset."""
    trainer, run = make_trainer(tmp_path, max_steps=1), FakeRun()
    trainer.add_callback(At(1, lambda: run.send("reset-reference")))
    watch(trainer, run=run)
    trainer.train()
    (answer,) = run.answers

    assert answer.status == "rejected"
    assert answer.result.startswith("this trainer cannot do 'reset-reference'")


def test_an_exception_ends_the_run_with_its_cause(tmp_path):
    """The step that died is recorded as far as it came, the cause named, and the exception raised unchanged."""
    store = str(tmp_path / "runs")
    trainer = make_trainer(tmp_path)
    trainer.add_callback(At(2, lambda: (_ for _ in ()).throw(ZeroDivisionError("no such batch"))))
    run = watch(trainer, store=store)
    with pytest.raises(ZeroDivisionError, match="no such batch"):
        trainer.train()
    stored = rlwatch.open_store(store)
    info = stored.run(run.info.run_id)
    (event,) = [e for e in stored.events(info.run_id) if e.kind == "exception"]

    assert (info.state, info.state_reason) == ("crashed", "ZeroDivisionError: no such batch")
    assert event.body["type"] == "ZeroDivisionError"
    assert info.source == "transformers"


def test_training_again_is_another_run(tmp_path):
    """It begins at the first step and resumes nothing; the first one stays as it was."""
    store = str(tmp_path / "runs")
    trainer = make_trainer(tmp_path, max_steps=1)
    watch(trainer, store=store)
    trainer.train()
    trainer.train()
    runs = rlwatch.open_store(store).runs()

    assert [(info.attempt, info.state, info.last_step) for info in runs] == [(1, "finished", 1)] * 2


def test_the_callback_alone_records_the_log(tmp_path):
    """``callbacks=[RLWatchCallback()]``, evaluation included."""
    store = str(tmp_path / "runs")
    trainer = make_trainer(tmp_path, callbacks=[RLWatchCallback(store=store)], eval_strategy="steps", eval_steps=2)
    trainer.train()
    stored = rlwatch.open_store(store)
    (info,) = stored.runs()
    names = stored.metric_names(info.run_id)

    assert {"loss", "grad_norm", "eval_runtime"} <= set(names)
    assert "train_runtime" not in names
    assert info.last_step == 4


def test_a_trainer_is_watched_once(tmp_path):
    """Twice would record every step twice."""
    trainer = make_trainer(tmp_path)
    watch(trainer, run=FakeRun())
    with pytest.raises(ConfigError, match="watched already"):
        watch(trainer, run=FakeRun())


class Renamed(Trainer):
    """An unknown version: what we wrap has another signature."""

    def training_step(self, batch):
        return super().training_step(*batch)


def test_what_a_trainer_lacks_is_left_out_with_one_warning(tmp_path, caplog, monkeypatch):
    """Named, and the rest is recorded."""
    monkeypatch.delattr(Trainer, "_clip_grad_norm")
    monkeypatch.setattr(accelerate.Accelerator, "clip_grad_norm_", None)
    trainer, run = make_trainer(tmp_path, cls=Renamed), FakeRun()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        watch(trainer, run=run)

    assert [r.getMessage() for r in caplog.records if r.name == "rlwatch"] == [
        f"rlwatch does not record the raw loss and gradients (transformers {transformers.__version__}; the rest is "
        "recorded): Renamed.training_step has no parameter 'model'; Renamed has no _clip_grad_norm"
    ]
    assert {"training_step", "_clip_grad_norm"} & set(vars(trainer)) == set()


class Inline(Trainer):
    """As in transformers before 5.3: the loop asks the accelerator to clip, without a method of its own."""

    def __getattribute__(self, name):
        if name == "_clip_grad_norm" and not sys._getframe(1).f_code.co_filename.endswith("transformers/trainer.py"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("clips", ["before", "after", "not"])
def test_gradients_of_a_loop_that_clips_through_its_accelerator_are_the_same(tmp_path, clips):
    """Read before any clipping, also where layers are clipped first, in whichever order that was asked for."""

    def norms(cls, where):
        trainer, run = make_trainer(tmp_path / where, cls=cls), FakeRun()
        if clips == "before":
            clip_layers(trainer, "layer-median")
        watch(trainer, run=run)
        if clips == "after":
            clip_layers(trainer, "layer-median")
        trainer.train()
        return {
            step: {name: value for name, value in row.items() if name.startswith(("grad_layer/", "optim/"))}
            for step, row in run.steps.items()
        }

    found = norms(Inline, "inline")

    assert found == norms(Trainer, "own")
    assert len([name for name in found[1] if name.startswith("grad_layer/")]) == 2


def test_without_the_extra_the_message_says_what_to_install():
    """The one import error a user can meet."""
    code = "import sys; sys.modules['transformers'] = None; import rlwatch.integrations.transformers"
    done = run_program(code)

    assert "the transformers integration needs the package 'transformers'" in done.stderr
    assert "pip install 'rlwatch-monitor[transformers]'" in done.stderr


def test_it_works_where_trl_is_not_installed(tmp_path):
    """Nothing of TRL is imported."""
    code = (
        "import sys; sys.modules['trl'] = None; sys.path.insert(0, 'tests/integrations')\n"
        "from pathlib import Path\n"
        "from tiny_trainer import make_trainer\n"
        "from rlwatch.integrations.transformers import watch\n"
        f"trainer = make_trainer(Path({str(tmp_path)!r}), max_steps=1)\n"
        f"run = watch(trainer, store={str(tmp_path / 'runs')!r})\n"
        "trainer.train()\n"
    )
    run_program(code, check=True)

    assert rlwatch.open_store(str(tmp_path / "runs")).runs()[0].last_step == 1
