"""Snapshots and a roll-back of a real GRPO trainer of TRL under DDP."""

import hashlib

import tiny_trl
import torch
import torch._dynamo  # see training.py
from transformers import Qwen2ForCausalLM, TrainerCallback
from trl_orders import Person
from trl_training import marks, random_state

from rlwatch.control import mailbox
from rlwatch.integrations.snapshots import Snapshots
from rlwatch.integrations.trl import watch

CONFIG = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
ASKED = {2: [("rollback", {"to": 0})], 4: [("undo", {})]}


class States(TrainerCallback):
    """Bytes of weights and moments on this rank, before the boundary of each step and after it."""

    def __init__(self, trainer):
        self.trainer, self.found = trainer, {}

    def on_step_end(self, args, state, control, **kwargs):
        optimizer = self.trainer.optimizer
        digest = hashlib.sha256(marks(self.trainer.accelerator.unwrap_model(self.trainer.model)).encode())
        for _, entries in sorted(optimizer.state_dict()["state"].items()):
            for name, value in sorted(entries.items()):
                digest.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
        self.found[state.global_step] = digest.hexdigest()


def train(rank, folder, name, *, watched=True, snapshots=None, asked=None):
    policy = Qwen2ForCausalLM.from_pretrained(folder / f"policy{rank}")
    trainer = tiny_trl.make_trainer(folder / f"{name}{rank}", model=policy, **CONFIG)
    begins, before, after = marks(trainer.model), States(trainer), States(trainer)
    trainer.add_callback(before)
    run = None
    if watched:
        run = watch(trainer, store=folder / "store", run_id=name, sigterm=False, snapshots=snapshots or False)
    trainer.add_callback(after)
    if asked:
        trainer.add_callback(Person(run, folder / "store", asked))
    trainer.train()
    return {
        "begins": hashlib.sha256(begins.encode()).hexdigest(),
        "before": before.found,
        "after": after.found,
        "random": random_state(),
        "counters": {} if run is None else dict(run.counters.snapshot()),
    }


def grpo(rank, ranks, folder):
    """Unwatched, with snapshots alone, and a roll-back that is undone."""
    mailbox.POLL_S = 0.0
    tiny_trl.model_on_disk(folder / f"policy{rank}")
    every = Snapshots(every=1, keep=30, share=1.0)
    return {
        "plain": train(rank, folder, "plain", watched=False),
        "snapped": train(rank, folder, "snapped", snapshots=every),
        "saved": train(rank, folder, "saved", snapshots=every, asked=ASKED),
    }
