"""The scalars-only callback: what it makes, records and ends."""

import logging
import math

import pytest
from preloaded import run_program
from tiny_trl import FakeRun, make_trainer
from transformers import TrainingArguments
from trl import GRPOConfig

from rlwatch.errors import RLWatchError
from rlwatch.integrations.transformers.attach import scalars
from rlwatch.integrations.transformers.compat import source_of
from rlwatch.integrations.trl import RLWatchCallback, watch

pytestmark = pytest.mark.torch


@pytest.fixture
def made(monkeypatch):
    """Runs made by ``rlwatch.init``, with the arguments it got."""
    calls = []

    def init(**kwargs):
        calls.append((kwargs, FakeRun()))
        return calls[-1][1]

    monkeypatch.setattr("rlwatch.init", init, raising=False)
    return calls


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_callback_makes_the_run_from_what_the_trainer_knows(tmp_path, made, kind):
    """Source, output directory, configuration and rank; what the user gives wins."""
    trainer = make_trainer(tmp_path, kind=kind, max_steps=2)
    trainer.add_callback(RLWatchCallback(project="math", name="seed3"))
    trainer.train()
    ((arguments, run),) = made

    assert arguments["source"] == f"trl/{kind}"
    assert arguments["output_dir"] == str(tmp_path / "out")
    assert (arguments["project"], arguments["name"]) == ("math", "seed3")
    assert (arguments["rank"], arguments["world_size"]) == (0, 1)
    assert arguments["config"]["num_generations"] == 4
    assert arguments["config"]["vocab_size"] == 15
    assert arguments["config"]["model_type"] == "qwen2"
    assert run.ends == [("finished", "")]


def test_every_row_is_recorded_but_the_summary(tmp_path, made):
    """At its global step; train_runtime and its company are no step's metrics."""
    trainer = make_trainer(tmp_path, max_steps=3, eval_rows=8, eval_strategy="steps", eval_steps=2)
    trainer.add_callback(RLWatchCallback())
    trainer.train()
    run = made[0][1]
    names = {name for _, metrics in run.logged for name in metrics}

    assert list(run.rows()) == [1, 2, 3]
    assert {step for step, metrics in run.logged if "eval_reward" in metrics} == {2, 3}
    assert "train_runtime" not in names
    assert {"reward", "entropy", "grad_norm", "learning_rate", "loss"} <= names
    assert run.taps() == {}


def test_a_given_run_is_left_open(tmp_path):
    """Whoever made the run ends it."""
    trainer, run = make_trainer(tmp_path, max_steps=1), FakeRun()
    trainer.add_callback(RLWatchCallback(run))
    trainer.train()

    assert run.ends == []
    assert run.active


def test_training_again_begins_another_run(tmp_path, made):
    """By another ``init`` with the same arguments, which is told that nothing was resumed."""
    trainer = make_trainer(tmp_path, max_steps=1)
    watch(trainer, project="p")
    trainer.train()
    trainer.train()

    assert [arguments["project"] for arguments, _ in made] == ["p", "p"]
    assert [list(run.taps()) for _, run in made] == [[1], [1]]
    assert [run.resumed for _, run in made] == [False, False]


def test_a_run_that_cannot_be_made_stops_training_before_it_starts(tmp_path, monkeypatch):
    """What is configured must work: set-up errors are raised."""
    monkeypatch.setenv("RLWATCH_STORE", "nosuch://store")
    trainer = make_trainer(tmp_path)
    trainer.add_callback(RLWatchCallback())
    with pytest.raises(RLWatchError, match="nosuch"):
        trainer.train()
    with pytest.raises(RLWatchError, match="nosuch"):
        watch(make_trainer(tmp_path))

    assert trainer.state.global_step == 0


def test_without_taps_the_hidden_nan_filter_is_a_warning(tmp_path, made, caplog):
    """The logged loss is all there is, and it lies."""
    for filtered in (True, False):
        trainer = make_trainer(tmp_path / str(filtered), max_steps=1, logging_nan_inf_filter=filtered)
        trainer.add_callback(RLWatchCallback())
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="rlwatch"):
            trainer.train()

        assert ("logging_nan_inf_filter" in caplog.text) is filtered


def test_rows_read_none_as_nan_and_leave_text_out():
    """TRL writes None where every value was NaN."""
    got = scalars({"entropy": None, "loss": 1, "note": "x", "lr": 1e-6})

    assert math.isnan(got.pop("entropy"))
    assert got == {"loss": 1.0, "lr": 1e-6}


def test_sources_are_named_after_trls_own_classes(tmp_path):
    """Subclasses count as what they extend; other trainers are transformers'."""

    class MyConfig(GRPOConfig):
        pass

    assert source_of(MyConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)) == "trl/grpo"
    assert source_of(TrainingArguments(output_dir=str(tmp_path), use_cpu=True)) == "transformers"


@pytest.mark.parametrize(
    ("name", "source"), [("OnlineDPOConfig", "trl/online_dpo"), ("AsyncGRPOConfig", "trl/async_grpo")]
)
def test_camel_case_becomes_words(name, source):
    """As the metric table spells them."""
    kind = type(name, (), {"__module__": "trl.experimental.x"})

    assert source_of(kind()) == source


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_extra_the_message_says_what_to_install(missing):
    """The one import error a user can meet."""
    code = f"import sys; sys.modules[{missing!r}] = None; import rlwatch.integrations.trl"
    done = run_program(code)

    assert done.returncode == 1
    assert f"MissingExtraError: the TRL integration needs the package '{missing}'" in done.stderr
    assert "pip install 'rlwatch-monitor[trl]'" in done.stderr
