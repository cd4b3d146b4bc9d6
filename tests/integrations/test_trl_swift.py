"""ms-swift's GRPO trainer: a stand-in with the signatures of ms-swift 4.6 over TRL's own loss, so that the measurements
have TRL's as their oracle. ``tests/nightly/test_swift.py`` runs ms-swift itself.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from tiny_trl import FakeRun, make_trainer
from trl import GRPOTrainer

from rlwatch.errors import ConfigError
from rlwatch.integrations.trl import watch
from rlwatch.integrations.trl.swift import register
from rlwatch.integrations.trl.swift_taps import SwiftTaps, flat

pytestmark = pytest.mark.torch
FIELDS = ("advantages", "old_per_token_logps", "ref_per_token_logps")


class SwiftLike(GRPOTrainer):
    """ms-swift's methods, as far as rlwatch wraps them, with its arguments; TRL computes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = SimpleNamespace(**{name: inputs.get(name) for name in FIELDS}, rollout_per_token_logps=None, trl=inputs)
        return self._compute_loss(model, {"input_ids": inputs["completion_ids"]}, batch)

    def _compute_loss(self, model, model_inputs, grpo_batch, origin_data=None):
        return self._compute_loss_and_metrics(model, model_inputs, grpo_batch)[0]

    def _compute_loss_and_metrics(self, model, model_inputs, grpo_batch):
        loss = super()._compute_loss(model, grpo_batch.trl)
        return loss, {"completion_mask": grpo_batch.trl["completion_mask"].bool()}

    def _get_per_token_logps_and_entropies(self, *args, grpo_batch=None, **kwargs):
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, ids):
        rows = zip(inputs, prompts, completions, ids, strict=True)
        self.given = inputs, prompts, completions, ids
        return self._compute_rewards_per_func(
            [
                SimpleNamespace(
                    extra=row,
                    messages=[{"content": prompt}, {"content": completion}],
                    response_token_ids=[list(one[:2]), list(one[2:])],
                )
                for row, prompt, completion, one in rows
            ]
        )

    def _compute_rewards_per_func(self, samples):
        return super()._calculate_rewards(*self.given)


def trained(tmp_path, cls, **watching):
    trainer, run = make_trainer(tmp_path, cls=cls, beta=0.04, num_iterations=2, max_steps=4), FakeRun()
    watch(trainer, run=run, localise=False, **watching)
    trainer.train()
    assert run.counters.snapshot() == {}
    return trainer, run


def test_what_is_measured_of_ms_swift_is_what_is_measured_of_trl(tmp_path):
    """Tokens, responses, gradients and settings, bit for bit; training too."""
    theirs, expected = trained(tmp_path / "trl", GRPOTrainer)
    ours, run = trained(tmp_path / "swift", SwiftLike)
    weights = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)

    assert all(a.equal(b) for a, b in weights)
    assert list(run.taps()) == list(expected.taps()) == [1, 2, 3, 4]
    for step, measured in run.taps().items():
        known = {name: value for name, value in expected.taps()[step].items() if "/seconds" not in name}
        assert {name: measured.get(name) for name in known} == pytest.approx(known, rel=1e-6, nan_ok=True), step


def test_a_command_is_executed_where_new_rollouts_are_sampled(tmp_path):
    """``num_iterations`` is 2, so after every second step."""
    trainer, run = make_trainer(tmp_path, cls=SwiftLike, beta=0.04, num_iterations=2, max_steps=4), FakeRun()
    watch(trainer, run=run)
    run.send("reset-reference")
    trainer.train()

    assert [(str(one.status), one.step) for one in run.answers] == [("done", 2)]


@pytest.fixture
def fake_swift(monkeypatch):
    """The part of ms-swift's package that is used: its registry of callbacks."""
    module = ModuleType("swift")
    module.callbacks_map = {}
    monkeypatch.setitem(sys.modules, "swift", module)
    return module


def test_the_callback_watches_the_trainer_when_it_begins_to_train(tmp_path, fake_swift):
    """ms-swift makes its callbacks before the trainer is complete."""
    run = FakeRun()
    register(run=run, level="tokens")

    class Making(SwiftLike):
        def __init__(self, **kwargs):
            fake_swift.callbacks_map["rlwatch"](kwargs["args"], self)
            super().__init__(**kwargs)

    trainer = make_trainer(tmp_path, cls=Making, max_steps=2)
    assert run.logged == []
    trainer.train()

    assert list(run.taps()) == [1, 2]
    assert "ratio/mean" in run.taps()[1] or "policy/logp_mean" in run.taps()[1]


def test_without_ms_swift_or_its_callbacks_there_is_one_error(fake_swift, monkeypatch):
    """It names what is missing, and the way that remains."""
    fake_swift.callbacks_map = None
    with pytest.raises(ConfigError, match="--report_to rlwatch"):
        register()
    monkeypatch.setitem(sys.modules, "swift", None)
    with pytest.raises(ConfigError, match="pip install ms-swift"):
        register()


def test_ids_of_several_turns_are_one_response():
    """ms-swift keeps them by turn."""
    assert flat([[1, 2], [3]]) == flat([1, 2, 3]) == [1, 2, 3]
    assert SwiftTaps.rewards == "_compute_rewards_per_func"


class UnslothLike(GRPOTrainer):
    """Unsloth replaces ``compute_loss`` by one that does not call ``_compute_loss``."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["completion_ids"]
        logits = model(input_ids=ids).logits.log_softmax(-1)
        return -(logits.gather(2, ids.unsqueeze(2)).squeeze(2) * inputs["advantages"].unsqueeze(1)).mean()


class Calling(GRPOTrainer):
    """A user's subclass passes the call on."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def test_a_loss_that_bypasses_what_is_wrapped_is_said_and_the_rest_recorded(tmp_path, caplog):
    """In place of rows that lack their tokens without a word."""
    trainer, run = make_trainer(tmp_path, cls=UnslothLike, max_steps=2), FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert "UnslothLike.compute_loss does not call _compute_loss" in caplog.text
    assert list(run.taps()) == [1, 2]
    assert "loss/raw" in run.taps()[1]
    assert "optim/grad_norm" in run.taps()[1]


def test_a_subclass_that_passes_the_call_on_is_measured(tmp_path, caplog):
    """Its tokens are there."""
    trainer, run = make_trainer(tmp_path, cls=Calling, max_steps=1), FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert "nothing per token" not in caplog.text
    assert "policy/logp_mean" in run.taps()[1]
