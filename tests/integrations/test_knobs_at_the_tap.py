"""Knobs are read where they act: the optimizer's rate, not the scheduler's log, and settings as the trainer holds them."""

import pytest
import torch
from tiny_trainer import make_trainer as make_plain
from tiny_trl import FakeRun, make_trainer
from torch.optim import SGD
from transformers import TrainerCallback

from rlwatch.diagnosis import KnobTracker, diagnose
from rlwatch.integrations.torch import Watcher
from rlwatch.integrations.trainer_settings import MOST_CHANGES, TrainerSettings, attributes, rates
from rlwatch.integrations.transformers import RLWatchCallback
from rlwatch.integrations.transformers import watch as watch_plain
from rlwatch.integrations.trl import watch
from rlwatch.metrics import canonicalise
from rlwatch.records import Finding, Severity

pytestmark = pytest.mark.torch


class Fault(TrainerCallback):
    """From a step on, a rate that the scheduler knows nothing of, and what else is done to the trainer."""

    def __init__(self, at, rate, group=None, act=lambda: None):
        self.at, self.rate, self.group, self.act = at, rate, group, act

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step >= self.at:
            groups = optimizer.param_groups if self.group is None else [optimizer.param_groups[self.group]]
            for group in groups:
                group["lr"] = self.rate
            self.act()


def canonical(run, source="trl/grpo"):
    """Step -> everything logged of it, by canonical names."""
    rows = {}
    for step, metrics in run.logged:
        rows.setdefault(step, {}).update(metrics)
    return {step: canonicalise(row, source)[0] for step, row in rows.items()}


def test_a_rate_that_only_the_optimizer_holds_is_recorded_and_blamed(tmp_path):
    """TRL logs what the scheduler says; what it is turned by counts, and so do settings that it logs nothing of."""
    trainer, run = make_trainer(tmp_path, max_steps=8, logging_steps=1, beta=0.1), FakeRun()

    def turn():
        trainer.entropy_coef, trainer.temperature, trainer.loss_type = 0.05, 1.5, "dr_grpo"

    trainer.add_callback(Fault(5, 60e-3, act=turn))
    watch(trainer, run=run, level="tokens")
    trainer.train()
    rows = canonical(run)

    assert {row["learning_rate"] for row in run.rows().values()} == {1e-3}
    assert [rows[step]["optim/lr"] for step in (1, 5, 6, 8)] == pytest.approx([1e-3, 1e-3, 60e-3, 60e-3])
    assert [rows[step]["policy/entropy_coef"] for step in (5, 6)] == [0.0, 0.05]
    assert [rows[step]["rollout/temperature"] for step in (5, 6)] == [1.0, 1.5]
    assert {rows[step]["policy/clip_range"] for step in rows} == {0.2}
    (event,) = [event for event in run.events if event.kind == "setting"]
    assert (event.step, event.body) == (6, {"option": "loss_type", "before": "dapo", "after": "dr_grpo"})

    tracker = KnobTracker()
    for step, row in rows.items():
        tracker.update(step, row)
    fall = Finding("d", "reward_drop", Severity.CRITICAL, 8, 7, "")
    told = diagnose([fall], events=run.events, turns=tracker.turns)
    assert told.causes[0].title == "Learning rate x 60 since step 6 (0.001 to 0.06)"
    assert {cause.knob for cause in told.causes} >= {"learning_rate", "entropy_bonus", "rollout_engine", "advantages"}


@pytest.mark.parametrize("way", ["watch", "callback"])
def test_any_trainer_tells_the_rate_of_each_step(tmp_path, way):
    """By the tap and by the callback alone; a group of its own shows as the largest."""
    trainer, run = make_plain(tmp_path, max_steps=6), FakeRun()
    trainer.add_callback(Fault(3, 0.5, group=1))
    if way == "watch":
        watch_plain(trainer, run=run, level="scalars")
    else:
        trainer.add_callback(RLWatchCallback(run))
    trainer.train()
    rows = canonical(run, "transformers")

    assert [rows[step]["optim/lr"] for step in range(1, 7)] == pytest.approx([1e-2] * 6)
    assert [rows[step]["optim/lr_max"] for step in range(1, 7)] == pytest.approx([1e-2] * 3 + [0.5] * 3)


def test_a_loop_of_ones_own_tells_the_rate_it_steps_with():
    """Also where the rate is set between the forward pass and the step."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)
    run = FakeRun()
    watcher = Watcher(model, optimizer=optimizer, run=run, localise=False)
    for step in range(1, 4):
        logp = -model(torch.ones(1, 2)).square()
        watcher.observe(logp=logp, mask=torch.ones_like(logp))
        logp.sum().backward()
        if step == 3:
            optimizer.param_groups[0]["lr"] = 6.0
        watcher.gradients()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        watcher.step(step)
    watcher.finish()
    rows = canonical(run, "")

    assert [rows[step]["optim/lr"] for step in (1, 2, 3)] == pytest.approx([0.1, 0.1, 6.0])
    assert [rows[step]["optim/lr_max"] for step in (1, 2, 3)] == pytest.approx([0.2, 0.2, 6.0])


def test_rates_of_what_is_no_optimizer_are_none():
    """Wrapped ones are looked into."""
    inner = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)

    assert rates(None) == {}
    assert rates(type("Wrapped", (), {"optimizer": inner})()) == {"optim/lr": 0.3}
    inner.param_groups[0]["lr"] = torch.tensor(0.25)
    assert rates(inner) == {"optim/lr": 0.25}


def test_settings_are_told_when_they_change_and_no_oftener_than_is_of_use():
    """Text, numbers and tensors; the first look tells nothing."""
    trainer = type("Trainer", (), {"loss_type": "grpo", "weights": torch.ones(2), "beta": None})()
    options = attributes(trainer, {"loss_type": "loss_type", "reward_weights": "weights", "missing": "missing"})
    settings = TrainerSettings(attributes(trainer, {"policy/kl_coef": "beta"}), options)

    assert settings.changes() == []
    trainer.weights = torch.tensor([1.0, 0.5])
    assert settings.changes() == [{"option": "reward_weights", "before": "[1.0, 1.0]", "after": "[1.0, 0.5]"}]
    assert settings.values() == {}
    trainer.beta = 0.1
    assert settings.values() == {"policy/kl_coef": 0.1}
    told = 0
    for step in range(3 * MOST_CHANGES):
        trainer.loss_type = f"loss {step}"
        told += len(settings.changes())
    assert told == MOST_CHANGES
