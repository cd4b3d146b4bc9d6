"""Snapshots of training: taking them changes nothing, and what is kept is what is good to return to."""

import json
import logging
import os
import time

import pytest
import torch
from test_torch_harmless import differing, left_behind
from tiny_loop import CLIP, FakeRun, fresh_policy, train
from tiny_trl import make_trainer

import rlwatch
from rlwatch.control.policy import RunHealth
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.snapshot_state import (
    Holdings,
    SideCopier,
    check_fits,
    put_back,
    read_snapshot,
    write_snapshot,
)
from rlwatch.integrations.snapshots import Snapshot, SnapshotKeeper, Snapshots, checked, to_drop
from rlwatch.integrations.trl import watch
from rlwatch.monitor.step_judge import Soundness
from rlwatch.records import ClosedStep, JudgedRow

pytestmark = pytest.mark.torch
ALWAYS = Snapshots(every=1, share=1.0)


class Judged(FakeRun):
    """A run whose rows are judged at once: sound, but for those named."""

    def __init__(self, unsound=(), up_to=10**6):
        super().__init__()
        self.unsound, self.up_to = unsound, up_to

    rows = None

    def health(self):
        if self.rows is not None:
            return RunHealth(rows=tuple(self.rows))
        rows = [JudgedRow(step, "bad" if step in self.unsound else "") for step in range(min(self.up_to, 200) + 1)]
        return RunHealth(rows=tuple(rows))


def trained(steps=3, optimizer=torch.optim.AdamW, seed=0):
    """A policy with an optimizer and a schedule that have moved."""
    policy = fresh_policy(seed)
    made = optimizer(policy.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, 50)
    for _ in range(steps):
        advance(policy, made, schedule)
    return Holdings(policy, [made], [schedule])


def advance(policy, optimizer, schedule):
    optimizer.zero_grad()
    policy(torch.randint(0, 9, (4, 5))).square().mean().backward()
    optimizer.step()
    schedule.step()


def state_of(held):
    """Everything, as bytes can be compared."""
    moments = held.optimizers[0].state_dict()
    tensors = dict(held.model.state_dict())
    tensors |= {f"{i}.{key}": value for i, entry in moments["state"].items() for key, value in entry.items()}
    return {name: torch.as_tensor(value).clone() for name, value in tensors.items()} | {
        "groups": torch.tensor([group["lr"] for group in moments["param_groups"]]),
        "schedule": torch.tensor([held.schedulers[0].last_epoch, *held.schedulers[0].get_last_lr()]),
    }


def keeper(run, held=None, **settings):
    held = held or trained()
    return SnapshotKeeper(Snapshots(**{"every": 1, "share": 1.0, **settings}), lambda: held, ErrorBoundary(run))


# Harmless.


@pytest.mark.parametrize("loop", [{}, {"epochs": 2, "accumulate": 2, "steps": 4}], ids=["plain", "reusing"])
def test_training_with_snapshots_is_bit_identical_to_training_without(loop):
    """Parameters, optimizer, random state and rollouts, with a snapshot at every step."""

    def make(policy, optimizer, reference):
        return rlwatch.Watcher(policy, optimizer, ref_model=reference, clip=CLIP, run=Judged(), snapshots=ALWAYS)

    plain, seen = train(None, **loop), train(make, **loop)

    assert differing(left_behind(plain), left_behind(seen)) == []


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_a_trl_trainer_trains_the_same_with_snapshots(tmp_path, peft):
    """Weights and moments, bit for bit, and the snapshots were really taken."""
    states = []
    for name, kwargs in (("a", {}), ("b", {"snapshots": ALWAYS})):
        trainer, run = make_trainer(tmp_path / name, peft_config=lora() if peft else None), FakeRun()
        watch(trainer, run=run, **kwargs)
        trainer.train()
        states.append((trainer.model.state_dict(), trainer.optimizer.state_dict()["state"], run))
    (plain, moments, _), (seen, seen_moments, run) = states

    assert all(torch.equal(plain[name], seen[name]) for name in plain)
    assert all(
        torch.equal(torch.as_tensor(moments[i][k]), torch.as_tensor(seen_moments[i][k]))
        for i in moments
        for k in moments[i]
    )
    assert [event.step for event in run.events if event.kind == "snapshots"] == [0]


def lora():
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def test_only_trained_weights_are_copied_of_an_adapter(tmp_path):
    """The base model stays where it is: a snapshot of LoRA is small."""
    trainer = make_trainer(tmp_path, peft_config=lora())
    kept, _ = SideCopier().copy(Holdings(trainer.model))

    assert all("lora_" in name for name in kept.tensors if name.startswith("model/"))
    assert 0 < kept.nbytes < sum(parameter.nbytes for parameter in trainer.model.parameters()) / 4


# A copy and its way back.


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)]
)
@pytest.mark.parametrize("steps", [0, 3])
def test_what_is_put_back_is_what_was_copied_bit_for_bit(optimizer, steps):
    """Also the state before the first step, where the optimizer knows of no parameter."""
    held = trained(steps, optimizer)
    before, copier = state_of(held), SideCopier()
    kept, _ = copier.copy(held)
    generator = torch.get_rng_state()
    for _ in range(4):
        advance(held.model, held.optimizers[0], held.schedulers[0])
    moved, _ = copier.copy(held)
    put_back(held, kept, moved, generators=True)
    after = state_of(held)

    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_failure_in_the_middle_leaves_what_was_there():
    """The scheduler refuses its state after the weights were written: all of it is as before."""
    held = trained()
    kept, _ = SideCopier().copy(held)
    advance(held.model, held.optimizers[0], held.schedulers[0])
    before = state_of(held)
    now, _ = SideCopier().copy(held)
    load, calls = held.schedulers[0].load_state_dict, []

    def refuses_once(state):
        calls.append(state)
        if len(calls) == 1:
            raise ValueError("no")
        load(state)

    held.schedulers[0].load_state_dict = refuses_once
    with pytest.raises(ValueError, match="no"):
        put_back(held, kept, now, generators=False)

    assert all(torch.equal(before[name], value) for name, value in state_of(held).items())


def test_a_snapshot_of_another_model_does_not_fit():
    """Another name, another shape, another optimizer: each refused with what differs, and nothing written."""
    kept, _ = SideCopier().copy(trained())
    narrow = Holdings(torch.nn.Linear(2, 2))
    other = trained()
    other.model.head = torch.nn.Linear(12, 10)
    fewer = Holdings(other.model, [], [])

    with pytest.raises(RLWatchError, match=r"does not fit: .* is in"):
        check_fits(narrow, kept)
    with pytest.raises(
        RLWatchError, match=r"'head.weight' is \(10, 12\) torch.float32 now, \(9, 12\) torch.float32 then"
    ):
        check_fits(other, kept)
    with pytest.raises(RLWatchError, match="does not fit"):
        check_fits(fewer, kept)


def test_what_cannot_be_copied_is_refused_at_the_start_and_the_checkpoint_is_named():
    """DeepSpeed ZeRO holds parts of a parameter elsewhere; an optimizer that is not torch's keeps its state hidden."""
    parted = fresh_policy()
    parted.head.weight.ds_id = 3

    class Odd:
        param_groups = ()

    with pytest.raises(ConfigError, match=r"DeepSpeed ZeRO.*own checkpoints"):
        rlwatch.Watcher(parted, run=FakeRun(), snapshots=True)
    with pytest.raises(ConfigError, match=r"Odd.*own checkpoints"):
        rlwatch.Watcher(fresh_policy(), Odd(), run=FakeRun(), snapshots=True)
    with pytest.raises(ConfigError, match="without model="):
        rlwatch.Watcher(run=FakeRun(), snapshots=True)
    with pytest.raises(ConfigError, match=r"Megatron.*own checkpoints"):
        checked(Snapshots(), lambda: Holdings(fresh_policy(), [megatrons()]))


def megatrons():
    """An optimizer of Megatron's, as far as it can be told without Megatron: by where its class was made."""
    return type("DistributedOptimizer", (), {"__module__": "megatron.core.optimizer.distrib_optimizer"})()


@pytest.mark.parametrize(("engine", "version"), [("DEEPSPEED", None), ("FSDP", 1), ("MEGATRON_LM", None)])
def test_a_trainer_whose_engine_holds_the_weights_is_refused_and_its_checkpoints_are_named(tmp_path, engine, version):
    """DeepSpeed ZeRO, FSDP1, Megatron: the reason, and what to use instead; nothing of the trainer was changed."""
    trainer = make_trainer(tmp_path)
    plugin = type("Plugin", (), {"fsdp_version": version})
    trainer.accelerator = type(
        "Accelerator", (), {"distributed_type": engine, "state": type("S", (), {"fsdp_plugin": plugin})}
    )
    callbacks = list(trainer.callback_handler.callbacks)

    with pytest.raises(ConfigError, match=rf"sharded by {engine}; use the trainer's own checkpoints.*save_steps"):
        watch(trainer, run=FakeRun(), snapshots=True)
    assert trainer.callback_handler.callbacks == callbacks


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"every": 0}, "every"),
        ({"keep": 2}, "keep"),
        ({"memory_gb": 0}, "memory_gb"),
        ({"share": 2.0}, "share"),
        ({"where": 3}, "where"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, why):
    """Each by its name."""
    with pytest.raises(ConfigError, match=why):
        Snapshots(**wrong)


# Which are kept, and which are good.


def test_a_snapshot_is_good_only_once_the_rows_up_to_it_are_judged_and_sound():
    """Not before: a row shows the weights before its update, and a fall hides in the median of some rows."""
    run = Judged(up_to=8)
    kept = keeper(run)
    for step in range(4):
        kept.look(step)
    early = kept.described()
    run.up_to = 10
    kept.look(3)
    later = kept.described()
    run.unsound = (11,)
    run.up_to = 12
    kept.look(3)

    assert early == "0 (good), 1 (not judged), 2 (not judged), 3 (not judged)"
    assert later == "0 (good), 1 (good), 2 (good), 3 (not judged)"
    assert kept.described() == "0 (good), 1 (good), 2 (good), 3 (not good)"
    assert kept.find("last-good").step == 2


def test_no_broken_snapshot_counts_as_good():
    """The reward is .5 until row 20 and .02 from 21 on: the weights after step 20 are broken, those after 19 are not."""
    sound = Soundness()
    run = Judged()
    run.health = lambda: RunHealth(rows=tuple(sound.rows))
    kept = keeper(run, keep=40)
    for step in range(1, 41):
        sound.update(ClosedStep(step, {"reward/mean": 0.5 if step <= 20 else 0.02}, {}, 0.0, 1, step), ())
        kept.look(step)

    assert not [one.step for one in kept.taken if one.step >= 20 and one.good]
    assert kept.last_good.step in range(8, 20)


def test_the_first_the_newest_and_good_ones_apart_from_each_other_are_kept():
    """Over a long run, the bad go first."""
    run = Judged(unsound=range(60, 200))
    kept = keeper(run, every=9)
    for step in range(100):
        run.up_to = step
        kept.look(step)
    steps = [one.step for one in kept.taken]

    assert (steps[0], steps[-1], len(steps)) == (0, 99, 6)
    assert kept.last_good.step == 45
    assert len([one for one in kept.taken if one.good]) >= 4


def test_where_few_rows_judge_the_oldest_that_waits_is_kept_until_it_is_judged():
    """A row in ten steps, a snapshot in ten: were the waiting ones dropped one after the other, none would be good."""
    run = Judged()
    kept = keeper(run, every=10)
    for step in range(400):
        run.rows = [JudgedRow(row, "") for row in range(0, step + 1, 10)]
        kept.look(step)

    assert len([one for one in kept.taken if one.good]) >= 3
    assert kept.last_good.step >= 200


def test_what_is_dropped_leaves_a_spread():
    """Of good ones, the one between close neighbours that is old."""
    snapshots = [Snapshot(step, None, good=True) for step in (0, 10, 20, 80, 90, 100)]

    assert to_drop(snapshots).step in (10, 20)
    assert to_drop([Snapshot(0, None), Snapshot(5, None)]) is None


def test_the_memory_budget_is_kept_and_said_once(caplog):
    """Room for two: the first and one more; nothing is taken beyond that."""
    held = trained()
    size, _ = SideCopier().copy(held)
    kept = keeper(Judged(up_to=0), held, memory_gb=2.5 * size.nbytes / 2**30)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            kept.look(step)

    assert sum(one.nbytes for one in kept.taken) <= 2.5 * size.nbytes
    assert len([r for r in caplog.records if "no snapshot is taken" in r.getMessage()]) == 1


def test_snapshots_become_rarer_where_they_cost_more_than_their_share(caplog):
    """By a clock on which each takes one second and a step ten, 1 % allows one in 10 steps."""
    now = [0.0]

    held = trained()

    def find():
        now[0] += 1.0  # one look at the models while a snapshot is taken
        return held

    kept = SnapshotKeeper(Snapshots(every=1, share=0.01), find, ErrorBoundary(Judged()), seconds=lambda: now[0])
    taken = []
    with caplog.at_level(logging.WARNING):
        for step in range(40):
            kept.look(step)
            taken.append(kept.taken[-1].step)
            now[0] += 10.0

    assert sorted(set(taken)) == [0, 10, 20, 30]
    assert len([r for r in caplog.records if "become rarer" in r.getMessage()]) == 1


# On disk.


def test_a_file_gives_back_what_was_written_and_a_changed_byte_is_noticed(tmp_path):
    """By its digest, before anything of it is read."""
    kept, _ = SideCopier().copy(trained())
    file = write_snapshot(tmp_path / "s.pt", kept, 7)
    again = read_snapshot(file)
    told = json.loads((tmp_path / "s.json").read_text())
    data = bytearray(file.path.read_bytes())
    data[len(data) // 2] ^= 1
    file.path.write_bytes(bytes(data))

    assert all(torch.equal(again.tensors[name], kept.tensors[name]) for name in kept.tensors)
    assert again.plain["random"]["numpy"] == kept.plain["random"]["numpy"]
    assert (told["step"], told["sha256"]) == (7, file.sha256)
    with pytest.raises(RLWatchError, match="snapshot of step 7 is damaged"):
        read_snapshot(file)
    file.path.unlink()
    with pytest.raises(RLWatchError, match="cannot be read"):
        read_snapshot(file)


def test_a_disk_that_is_full_leaves_no_file(tmp_path):
    """/dev/full takes no byte."""
    kept, _ = SideCopier().copy(trained())
    target = tmp_path / "s.pt"
    part = tmp_path / f".{target.name}.{os.getpid()}.part"
    part.symlink_to("/dev/full")

    with pytest.raises(OSError, match=r"space|write"):
        write_snapshot(target, kept, 7)
    assert not target.exists()
    assert not target.with_suffix(".json").exists()


def test_good_ones_are_written_and_leave_the_memory_first(tmp_path):
    """With room for three in memory, more than that are kept; each is what it was."""
    held = trained()
    size, _ = SideCopier().copy(held)
    kept = keeper(Judged(), held, where=tmp_path, memory_gb=3.5 * size.nbytes / 2**30)
    expected = {}
    for step in range(6):
        expected[step] = {name: tensor.clone() for name, tensor in held.model.state_dict().items()}
        kept.look(step)
        kept.look(step)
        wait_for(lambda: not any(one.writing for one in kept.taken))
        advance(held.model, held.optimizers[0], held.schedulers[0])
    in_memory = [one for one in kept.taken if one.kept is not None]
    states = {one.step: one.state().tensors for one in kept.taken}

    assert len(kept.taken) == 6
    assert len(in_memory) <= 3
    assert all(torch.equal(states[s][f"model/{n}"], t) for s in states for n, t in expected[s].items())


def wait_for(condition, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
