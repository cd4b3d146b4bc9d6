"""Scenarios on a plain ``transformers.Trainer``, under DDP."""

import hashlib

import tiny_trainer
import torch
import torch._dynamo  # see training.py
from tallying import ask_all
from transformers import TrainerCallback

from rlwatch.control import mailbox
from rlwatch.integrations.transformers import watch

STEPS, ASKED_AT = 8, 3


class Asking(TrainerCallback):
    """Rank 0 asks for an end."""

    def __init__(self, run, store):
        self.run, self.store = run, store

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == ASKED_AT and args.process_index == 0:
            ask_all(self.run, self.store, "stop", args={"save": "no"})
            self.run.flush(20.0)


def train(folder, name, *, watched, ask=False):
    trainer = tiny_trainer.make_trainer(folder / name, max_steps=STEPS, gradient_accumulation_steps=2)
    run = None
    if watched:
        run = watch(trainer, store=folder / "store", run_id=name, sigterm=False)
    if ask:
        trainer.add_callback(Asking(run, folder / "store"))
    trainer.train()
    digest = hashlib.sha256()
    for tensor in trainer.accelerator.unwrap_model(trainer.model).state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    return {
        "parameters": digest.hexdigest(),
        "random": torch.get_rng_state().sum().item(),
        "steps": trainer.state.global_step,
        "counters": {} if run is None else dict(run.counters.snapshot()),
    }


def ddp(rank, ranks, folder):
    """Unwatched, watched, and watched and told to stop."""
    mailbox.POLL_S = 0.0
    return {
        "unwatched": train(folder, "unwatched", watched=False),
        "watched": train(folder, "watched", watched=True),
        "stopped": train(folder, "stopped", watched=True, ask=True),
    }
