"""Every other trainer of TRL: what its log says, its gradients, what it can be told, and why there are no tokens."""

import logging
import math
from functools import cache

import pytest
import torch
from tiny_trl import FakeRun
from tiny_trl_kinds import make
from transformers import TrainerCallback

import rlwatch
from rlwatch.integrations.trl import watch
from rlwatch.metrics import LAYER_PREFIX, canonicalise

pytestmark = pytest.mark.torch

KINDS = ["online_dpo", "sft", "dpo", "kto", "reward"]
READ = {
    "online_dpo": {"reward/mean": "objective/scores", "policy/kl_ref": "objective/kl", "policy/kl_coef": "beta"},
    "sft": {"tokens/total": "num_tokens"},
    "dpo": {"reward/mean": "rewards/chosen", "tokens/total": "num_tokens"},
    "kto": {"reward/mean": "rewards/chosen", "policy/kl_ref": "kl", "tokens/total": "num_tokens"},
    "reward": {"tokens/total": "num_tokens"},
}
"""What is read of each log as a canonical metric, beside what every trainer logs."""
EVERY = {"loss/policy": "loss", "optim/grad_norm": "grad_norm", "optim/lr": "optim/lr", "optim/lr_max": "optim/lr_max"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What is left of a training of that kind, watched or not, once for all tests: its model, the random state, its run."""

    @cache
    def once(kind, *, watched=True):
        trainer, run = make(kind, tmp_path_factory.mktemp("trained"), max_grad_norm=1e-3), FakeRun()
        if watched:
            watch(trainer, run=run)
        trainer.train()
        return trainer.model, torch.get_rng_state(), run

    return once


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_and_the_gradients_of_any_trainer_are_recorded(trained, kind):
    """Every step: its row, the raw loss, and gradients per layer before clipping, which make up the trainer's norm."""
    _, _, run = trained(kind)

    assert list(run.rows()) == list(run.taps()) == [1, 2, 3]
    assert run.counters.snapshot() == {}
    for step, tap in run.taps().items():
        layers = [value for name, value in tap.items() if name.startswith(LAYER_PREFIX)]
        assert tap["loss/raw"] == pytest.approx(run.rows()[step]["loss"], rel=1e-3)
        assert tap["optim/grad_norm"] == pytest.approx(run.rows()[step]["grad_norm"], rel=1e-4)
        assert math.hypot(*layers) == pytest.approx(tap["optim/grad_norm"], rel=1e-4)
        assert tap["optim/grad_norm"] > 1e-3
        assert not any(name.startswith(("policy/entropy", "policy/logp", "adv/", "len/")) for name in tap)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_read_as_what_they_are_in_that_trainer(trained, kind):
    """Nothing more is made of them: entropy and perplexity of a dataset are no exploration."""
    _, _, run = trained(kind)
    _, origin = canonicalise(run.rows()[2], f"trl/{kind}")

    assert origin == EVERY | READ[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_one_line_says_why_there_are_no_tokens(tmp_path, caplog, kind):
    """What is recorded, what is not, and which trainers it is for."""
    trainer = make(kind, tmp_path)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        watch(trainer, run=FakeRun())
    (said,) = [record.getMessage() for record in caplog.records if record.name == "rlwatch"]

    assert said.startswith(
        f"rlwatch records the log, the raw loss and gradients, but nothing per token: {type(trainer).__name__} has no _"
    )
    assert said.endswith("; tokens are read of GRPO and RLOO")


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_evaluations_are_recorded_under_their_own_names(trained, kind):
    """Beside training, at the step they were made."""
    _, _, run = trained(kind)
    evaluated = {step for step, metrics in run.logged if "eval_loss" in metrics}

    assert evaluated == {2, 3}
    assert list(run.taps()) == [1, 2, 3]


def test_the_stored_run_names_its_trainer(tmp_path):
    """The source is what its aliases are looked up by."""
    store = str(tmp_path / "runs")
    for kind in KINDS:
        trainer = make(kind, tmp_path / kind, max_steps=1)
        run = watch(trainer, store=store, name=kind)
        trainer.train()
        info = rlwatch.open_store(store).run(run.info.run_id)
        assert (info.name, info.source, info.state) == (kind, f"trl/{kind}", "finished")


class At(TrainerCallback):
    """Sends a command at the end of a step."""

    def __init__(self, run, commands):
        self.run, self.commands = run, commands

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.commands:
            kind, arguments = self.commands[state.global_step]
            self.run.send(kind, **arguments)


@pytest.mark.parametrize("kind", ["online_dpo", "dpo"])
def test_a_live_trainer_saves_slows_down_pauses_and_stops_on_command(tmp_path, monkeypatch, kind):
    """At the end of the very step; what it cannot do is rejected with the reason."""
    trainer, run = make(kind, tmp_path, max_steps=9), FakeRun()
    commands = {
        1: ("save-checkpoint", {}),
        2: ("lower-lr", {"scale": 0.5}),
        3: ("pause", {"minutes": 5}),
        4: ("reset-reference", {}),
        5: ("stop", {"save": "no"}),
    }
    trainer.add_callback(At(run, commands))
    watch(trainer, run=run)
    monkeypatch.setattr("rlwatch.integrations.commands.PauseState.wait", lambda self: run.send("resume"))
    trainer.train()

    assert trainer.state.global_step == 5
    assert (tmp_path / "out" / "checkpoint-1").is_dir()
    assert [(a.status, a.step) for a in run.answers] == [
        ("done", 1), ("done", 2), ("done", 3), ("done", 3), ("rejected", 4), ("done", 5),
    ]  # fmt: skip
    assert run.answers[4].result.startswith("this trainer cannot do 'reset-reference'")
    assert run.rows()[4]["learning_rate"] == pytest.approx(0.5 * run.rows()[1]["learning_rate"])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_bit_identical_to_training_unwatched(trained, kind):
    """Also where rlwatch knows nothing of the trainer but that it is one."""
    plain, random, _ = trained(kind, watched=False)
    seen, also_random, _ = trained(kind)

    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), seen.parameters(), strict=True))
    assert torch.equal(random, also_random)
