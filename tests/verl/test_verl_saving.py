"""Snapshots, roll-back, hold and skip-step of verl: its worker on two ranks, its trainer in this process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_verl as tiny
import torch
from omegaconf import open_dict
from test_verl_trainer import Trainer, driver_of, events, send, started

from rlwatch.control.policy import RunHealth
from rlwatch.errors import ConfigError
from rlwatch.integrations.verl.settings import VerlSettings, plain
from rlwatch.records import JudgedRow

SCRIPT = Path(__file__).with_name("saving_ranks.py")
GRPO = {"algorithm": {"adv_estimator": "grpo"}}


@pytest.fixture(scope="module")
def ranks(policy):
    """What each of two ranks found."""
    command = [sys.executable, str(SCRIPT), str(policy)]
    out = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    written = [policy / f"saving{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in written), out.stderr[-3000:]
    return [json.loads(path.read_text()) for path in written]


@pytest.mark.parametrize("what", ["harmless", "distinct", "back", "another rank failed", "kept", "undone", "moves on"])
def test_it_holds_on_both_ranks(ranks, what):
    """Shards of parameters and moments, bit for bit: with snapshots and without; put back; undone for another rank's
    sake; kept; taken back by the step at which it was done; and training goes on.
    """
    assert [rank[what] for rank in ranks] == [True, True]


def test_ranks_report_their_part_and_refuse_what_they_lack(ranks):
    """Snapshots after the one that was put back are dropped."""
    assert [rank["steps"] for rank in ranks] == [[9, 0]] * 2
    assert all("no snapshot of step 2 is kept" in rank["missing"] for rank in ranks)


# The trainer.


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """No Ray here: what the group returns are the answers."""
    import ray

    monkeypatch.setattr(ray, "get", lambda pending, timeout: list(pending))
    yield
    tiny.untap()


@pytest.fixture
def training(policy, tmp_path):
    """A trainer whose workers keep snapshots, at step 4; and its weights after each step."""
    trainer = Trainer(policy, tmp_path)
    with open_dict(trainer.config):
        trainer.config.trainer.rlwatch.snapshots = {"every": 1, "share": 1.0}
    driver, states = started(trainer), {0: tiny.state_of(trainer.worker)}
    for step in range(1, 5):
        trainer.step_to(step)
        trainer.on_step_end()
        states[step] = tiny.state_of(trainer.worker)
    yield trainer, driver, states
    driver.run.finish()


def same(one, other):
    """Whether weights, optimizer and schedule are equal."""
    (weights, moments, schedule), (others, their_moments, their_schedule) = one, other
    states, their_states = moments["state"], their_moments["state"]
    return (
        all(torch.equal(weights[name], others[name]) for name in others)
        and states.keys() == their_states.keys()
        and all(equal(value, their_states[at][key]) for at, kept in states.items() for key, value in kept.items())
        and schedule == their_schedule
    )


def equal(one, other):
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else torch.as_tensor(x) for x in (one, other)]
    return torch.equal(*whole)


def test_the_trainer_goes_back_and_forth_bit_for_bit(training):
    """From the beginning of training on, at the end of a step and before the weights go to the rollout engine."""
    trainer, driver, states = training
    sent = []
    trainer.checkpoint_manager.update_weights = lambda step: sent.append(tiny.state_of(trainer.worker))

    answer = send(driver, "rollback", to=2)
    back = tiny.state_of(trainer.worker)
    undone = send(driver, "undo")

    assert (answer.status, undone.status) == ("done", "done")
    assert "after step 2" in answer.result
    assert "the rollout engine gets the weights before it samples" in answer.result
    assert same(back, states[2])
    assert same(sent[0], states[2])
    assert same(tiny.state_of(trainer.worker), states[4])
    assert [event.body["command"] for event in events(driver, "command")] == ["rollback", "undo"]


def test_the_last_good_one_is_the_drivers_to_say(training):
    """Rows are judged in the driver's process."""
    trainer, driver, states = training
    driver.run.health = lambda: RunHealth(rows=tuple(JudgedRow(step, "") for step in range(1, 11)))

    answer = send(driver, "rollback")

    assert answer.status == "done"
    assert "after step 2 (good)" in answer.result
    assert same(tiny.state_of(trainer.worker), states[2])


def test_what_is_not_there_is_refused(training):
    """A step that is not kept."""
    answer = send(training[1], "rollback", to=99)

    assert answer.status == "rejected"
    assert "no snapshot of step 99 is kept; kept: 0 (not judged), 1 (not judged)" in answer.result


def test_a_worker_that_fails_undoes_it_on_all(training):
    """It has written, and cannot say so: what was there before comes back."""
    trainer, driver, states = training
    group = trainer.actor_rollout_wg
    done = trainer.worker.rlwatch_do
    trainer.worker.rlwatch_do = lambda *args: {**done(*args), "refused": "it failed on rank 1"}
    assert group.worker is trainer.worker

    answer = send(driver, "rollback", to=2)
    del trainer.worker.rlwatch_do

    assert "it failed on rank 1" in answer.result
    assert same(tiny.state_of(trainer.worker), states[4])
    assert send(driver, "rollback", to=2).status == "done"


def test_nothing_is_updated_while_batches_are_held_or_updates_left_out(training):
    """Two batches of two optimizer steps each; then one update of the two of a step."""
    trainer, driver, states = training
    assert send(driver, "hold", batches=2).status == "done"
    for step in (5, 6):
        trainer.step_to(step)
        weights = tiny.weights_of(trainer.worker)
        assert all(torch.equal(weights[name], tensor) for name, tensor in states[4][0].items())
        trainer.on_step_end()
    trainer.step_to(7)
    moved = tiny.weights_of(trainer.worker)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in states[4][0].items())
    assert send(driver, "skip-step", steps=2).status == "done"
    trainer.step_to(8)
    still = tiny.weights_of(trainer.worker)
    assert all(torch.equal(moved[name], tensor) for name, tensor in still.items())
    trainer.on_step_end()
    trainer.step_to(9)
    again = tiny.weights_of(trainer.worker)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in again.items())
    ends = [event.body["report"]["summary"] for event in events(driver, "command") if event.body["by"] == "rlwatch"]
    assert ends[0].startswith("updates go on after 2 held batches")
    assert ends[1] == "2 of 2 updates were left out; updates go on"


def test_without_snapshots_the_answer_says_how_to_have_them(policy, tmp_path):
    """At the next start; updates that are not finite can be left out without any."""
    trainer = Trainer(policy, tmp_path)
    driver = started(trainer)
    trainer.step_to(1)

    assert "no snapshots are kept" in send(driver, "rollback").result
    assert "1 update from now on are left out" in send(driver, "skip-step", when="nonfinite").result
    driver_of(trainer).run.finish()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}, "Megatron cuts the model"),
        ({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}, "strategy=fsdp2"),
        ({"trainer": {"v1": {"trainer_mode": "separate_async"}}}, "cannot be dropped"),
        ({"algorithm": {"adv_estimator": "gae"}}, "critic"),
    ],
)
def test_a_training_that_could_not_be_rolled_back_is_refused_at_the_start(policy, changes, why):
    """With the reason, and verl's own checkpoints."""
    config = plain(tiny.config_of(policy))
    for section, values in changes.items():
        for name, value in values.items():
            config[section][name] = {**config[section][name], **value} if isinstance(value, dict) else value
    config["trainer"]["rlwatch"] = {"snapshots": True}

    with pytest.raises(ConfigError, match=rf"snapshots: .*{why}.*verl's own checkpoints") as error:
        VerlSettings.of(config)
    assert "trainer.save_freq" in str(error.value)


def test_wrong_settings_are_refused():
    """By name."""
    with pytest.raises(ConfigError, match="snapshots is true, false, or holds: every, keep"):
        VerlSettings.of({"trainer": {"rlwatch": {"snapshots": {"often": 3}}}, **GRPO})
    with pytest.raises(ConfigError, match="keep must be an integer of at least 3"):
        VerlSettings.of({"trainer": {"rlwatch": {"snapshots": {"keep": 1}}}, **GRPO})
