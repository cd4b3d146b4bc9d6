"""The whole way: a real trainer, a real run, a real store, a command from outside and its answer."""

import json

import pytest
from tiny_trl import make_trainer
from transformers import TrainerCallback

import rlwatch
from rlwatch.control.commands import request
from rlwatch.integrations.trl import watch
from rlwatch.records import CommandStatus, RunState

pytestmark = pytest.mark.torch


def test_watched_training_leaves_a_finished_run_that_can_be_read(tmp_path):
    """Metrics under canonical names, per step, and the trainer's rows beside them."""
    url = str(tmp_path / "store")
    trainer = make_trainer(tmp_path, beta=0.1, num_iterations=2, max_steps=4)
    run = watch(trainer, store=url, project="tiny", name="one")
    trainer.train()
    store = rlwatch.open_store(url)
    info = store.run(run.info.run_id)
    series = store.series(info.run_id, ["policy/entropy", "entropy", "ratio/max", "reward"])

    assert (info.source, info.state, info.last_step) == ("trl/grpo", RunState.FINISHED, 4)
    assert json.loads((tmp_path / "out" / "rlwatch.json").read_text()) == {"run_id": info.run_id}
    assert info.config["num_iterations"] == 2
    assert {name: list(s.steps) for name, s in series.items()} == {
        "policy/entropy": [1, 2, 3, 4],
        "entropy": [1, 2, 3, 4],
        "ratio/max": [1, 2, 3, 4],
        "reward": [1, 3],
    }
    assert run.counters.snapshot() == {}


def test_a_person_resets_the_reference_of_a_live_run(tmp_path):
    """Submitted to the store, claimed, carried out at a boundary, acknowledged with its step."""
    store = rlwatch.open_store("memory://trl-live")
    trainer = make_trainer(tmp_path, beta=0.1, max_steps=400, learning_rate=3e-3)
    run = watch(trainer, store=store)
    command = request(store, run.info.run_id, "reset-reference", why="KL saturated", by="ann")

    class UntilAnswered(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if store.commands(run.info.run_id)[0].status is CommandStatus.DONE:
                control.should_training_stop = True

    trainer.add_callback(UntilAnswered())
    trainer.train()
    (answered,) = store.commands(run.info.run_id)
    event = next(e for e in store.events(run.info.run_id) if e.kind == "reference_reset")

    assert answered.command_id == command.command_id
    assert answered.status is CommandStatus.DONE
    assert event.step == answered.finished_step
    assert (event.body["by"], event.body["why"]) == ("ann", "KL saturated")


def test_a_crash_ends_the_stored_run_with_its_reason(tmp_path):
    """What a person sees the morning after."""
    store = rlwatch.open_store("memory://trl-crash")
    trainer = make_trainer(tmp_path, max_steps=4)
    run = watch(trainer, store=store)

    def broken(completions, **kwargs):
        raise ValueError("no reward today")

    trainer.reward_funcs = [broken]
    with pytest.raises(ValueError, match="no reward today"):
        trainer.train()
    info = store.run(run.info.run_id)

    assert (info.state, info.state_reason) == (RunState.CRASHED, "ValueError: no reward today")
    assert [e.kind for e in store.events(info.run_id)][-1] == "exception"
