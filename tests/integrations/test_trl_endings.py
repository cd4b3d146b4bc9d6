"""Every way a watched training run ends, as its stored record tells it; and what a resume makes of it."""

import math
from contextlib import suppress

import pytest
import torch
from tiny_trl import digits, make_trainer
from transformers import TrainerCallback

import rlwatch
from rlwatch.control.commands import request
from rlwatch.integrations.trl import watch
from rlwatch.records import CommandStatus

pytestmark = pytest.mark.torch


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.act(model)


def raising(error):
    def act(*args, **kwargs):
        raise error

    return act


def a_reward_raises(trainer, error):
    def reward(completions, **kwargs):
        if trainer.state.global_step == 2:
            raise error
        return digits(completions)

    trainer.reward_funcs = [reward]


def a_callback_raises(trainer, error):
    trainer.add_callback(At(2, raising(error)))


def the_backward_pass_raises(trainer, error):
    backward = trainer.accelerator.backward

    def refuse(loss, **kwargs):
        if trainer.state.global_step == 2:
            raise error
        backward(loss, **kwargs)

    trainer.accelerator.backward = refuse


def weights_become_nan(trainer, error):
    def poison(model):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.view(-1)[7] = math.nan

    trainer.add_callback(At(2, poison))


WAYS = {
    "reward": (a_reward_raises, ZeroDivisionError("no such reward")),
    "reward exits": (a_reward_raises, SystemExit(3)),
    "interrupt": (a_callback_raises, KeyboardInterrupt()),
    "out of memory": (the_backward_pass_raises, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
    "device": (the_backward_pass_raises, RuntimeError("CUDA error: an illegal memory access was encountered")),
    "generation from NaN": (weights_become_nan, RuntimeError("probability tensor contains either `inf`, `nan`")),
    "stop iteration": (a_reward_raises, StopIteration("odd")),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_ended_training_is_the_end_of_the_run_and_is_raised_on_unchanged(tmp_path, way):
    """Crashed, with the cause; the steps before it are all there; the caller sees the very exception."""
    break_it, error = WAYS[way]
    store = str(tmp_path / "runs")
    trainer = make_trainer(tmp_path, max_steps=5)
    run = watch(trainer, store=store)
    break_it(trainer, error)
    with pytest.raises(type(error)) as caught:
        trainer.train()
    stored = rlwatch.open_store(store)
    info = stored.run(run.info.run_id)
    (event,) = [event for event in stored.events(info.run_id) if event.kind == "exception"]

    assert way == "generation from NaN" or caught.value is error
    assert info.state == "crashed"
    assert info.state_reason.startswith(f"{type(error).__name__}")
    assert str(error)[:40] in info.state_reason
    assert (event.step, event.body["type"]) == (2, type(error).__name__)
    assert str(error)[:40] in event.body["traceback"]
    steps = list(stored.series(info.run_id, ["policy/entropy"])["policy/entropy"].steps)
    assert steps[:2] == [1, 2]
    assert run.counters.snapshot() == {}


def test_stopping_early_is_no_crash(tmp_path):
    """A callback that ends training by the trainer's own means."""
    store = str(tmp_path / "runs")
    trainer = make_trainer(tmp_path, max_steps=9)

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainer.add_callback(Enough())
    run = watch(trainer, store=store)
    trainer.train()
    info = rlwatch.open_store(store).run(run.info.run_id)

    assert (info.state, info.state_reason, info.last_step) == ("finished", "", 2)


SAVED = {"beta": 0.1, "learning_rate": 3e-3, "save_strategy": "steps", "save_steps": 2}


def attempt(tmp_path, *, store, until, before=None, resume=None):
    """One process's training, on to step ``until``."""
    trainer = make_trainer(tmp_path, **SAVED, max_steps=until)
    run = watch(trainer, store=store)
    if before is not None:
        before(trainer, run)
    with suppress(ZeroDivisionError):
        trainer.train(resume_from_checkpoint=resume)
    return run


NAMES = ["policy/kl_ref_k3", "policy/entropy", "loss/raw", "optim/grad_norm", "reward/mean", "kl", "loss", "reward"]


def told(store, run):
    """Metric -> step -> value, of the stored run."""
    series = rlwatch.open_store(store).series(run.info.run_id, NAMES)
    return {name: dict(zip(map(int, s.steps), map(float, s.values), strict=True)) for name, s in series.items()}


def dies_at(step):
    return lambda trainer, run: trainer.add_callback(At(step, raising(ZeroDivisionError("killed"))))


def test_a_resumed_process_continues_the_run_as_if_nothing_had_happened(tmp_path):
    """The same run, attempt 2; every step once; and each number is that of the run that was never interrupted."""
    store, whole = str(tmp_path / "runs"), str(tmp_path / "whole")
    first = attempt(tmp_path, store=store, until=8, before=dies_at(5))
    crashed = rlwatch.open_store(store).run(first.info.run_id)
    second = attempt(tmp_path, store=store, until=8, resume=True)
    straight = attempt(tmp_path / "straight", store=whole, until=8)
    (info,) = rlwatch.open_store(store).runs()
    kept, expected = told(store, second), told(whole, straight)

    assert (crashed.state, crashed.attempt, crashed.last_step) == ("crashed", 1, 5)
    assert second.info.run_id == first.info.run_id
    assert (info.attempt, info.state, info.last_step) == (2, "finished", 8)
    for name in NAMES:
        assert list(kept[name]) == [1, 2, 3, 4, 5, 6, 7, 8], name
        assert kept[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name


class Resets(TrainerCallback):
    """A person resets the reference from outside at step 2; the process dies once a checkpoint holds that."""

    def __init__(self, store, run):
        self.store, self.run_id = store, run.info.run_id

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            request(self.store, self.run_id, "reset-reference", why="KL saturated", by="ann")
        done = [command.finished_step for command in self.store.commands(self.run_id, CommandStatus.DONE)]
        if done and state.global_step >= done[0] + 3:
            raise ZeroDivisionError("killed")


def test_a_reset_before_the_checkpoint_is_in_the_resumed_run_too(tmp_path):
    """KL goes on low where it was low, no step is there twice, and no detector speaks of a lost or silent reset."""
    url = str(tmp_path / "runs")
    store = rlwatch.open_store(url)
    attempt(tmp_path, store=url, until=400, before=lambda t, run: t.add_callback(Resets(store, run)))
    died = store.runs()[0].last_step
    run = attempt(tmp_path, store=url, until=died + 3, resume=True)
    events = {event.kind: event.step for event in store.events(run.info.run_id)}
    kl, reset = told(url, run)["policy/kl_ref_k3"], events["reference_reset"]

    assert sorted(kl) == list(range(1, died + 4))
    assert kl[reset] > 1e-4
    assert kl[reset + 1] < 1e-9
    assert events["reference_restored"] >= reset
    assert {"silent_reference_reset", "lost_reference_reset"}.isdisjoint(
        finding.kind for finding in store.findings(run.info.run_id)
    )


def test_a_checkpoint_further_back_rewinds_the_run(tmp_path):
    """Steps that were trained anew replace those that were undone."""
    store = str(tmp_path / "runs")
    attempt(tmp_path, store=store, until=6)
    second = attempt(tmp_path, store=store, until=6, resume=str(tmp_path / "out" / "checkpoint-2"))
    info = rlwatch.open_store(store).run(second.info.run_id)

    assert (info.attempt, info.last_step) == (2, 6)
    for name, values in told(store, second).items():
        assert list(values) == [1, 2, 3, 4, 5, 6], name


def test_the_same_script_started_again_is_a_new_run(tmp_path, capfd):
    """In its old output directory, with checkpoints there and another rate, not resumed: the old curves stay."""
    store = str(tmp_path / "runs")
    first = attempt(tmp_path, store=store, until=2)
    place = rlwatch.open_store(store)
    before = place.run(first.info.run_id), told(store, first)
    second = attempt(tmp_path, store=store, until=2)

    assert second.info.run_id != first.info.run_id
    assert (place.run(first.info.run_id), told(store, first)) == before
    assert (place.run(second.info.run_id).attempt, place.run(second.info.run_id).last_step) == (1, 2)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rlwatch: run ")]
    assert [line.split()[2].rstrip(",") for line in lines] == [first.info.run_id, second.info.run_id]
    third = attempt(tmp_path, store=store, until=3, resume=True)
    assert (third.info.run_id, third.info.attempt) == (second.info.run_id, 2)


def test_a_directory_of_its_own_is_another_run(tmp_path):
    """What is not resumed begins anew."""
    store = str(tmp_path / "runs")
    for where in ("a", "b"):
        attempt(tmp_path / where, store=store, until=1)

    assert [info.attempt for info in rlwatch.open_store(store).runs()] == [1, 1]
