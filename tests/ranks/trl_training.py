"""Scenarios on a real GRPO trainer of TRL, under DDP."""

import hashlib
import os
import random
import time

import numpy as np
import tiny_trl
import torch
import torch._dynamo  # see training.py
from tallying import ask_all
from transformers import Qwen2ForCausalLM, TrainerCallback

import rlwatch
from rlwatch.control import mailbox
from rlwatch.integrations.trl import watch
from rlwatch.records import STALLED

CONFIG = {
    "beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "per_device_train_batch_size": 4,
}  # fmt: skip
ASKED_AT = 2


def marks(model):
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def random_state():
    return [torch.get_rng_state().sum().item(), random.random(), float(np.random.rand())]


class Asking(TrainerCallback):
    """Rank 0 asks for a reset in the middle of a generation's updates."""

    def __init__(self, run, store):
        self.run, self.store = run, store

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == ASKED_AT and args.process_index == 0:
            ask_all(self.run, self.store, "reset-reference", args={"optimizer": "keep"})
            self.run.flush(20.0)


class Looking(TrainerCallback):
    """After which steps the reference is the policy."""

    def __init__(self, trainer):
        self.trainer, self.equal = trainer, []

    def on_step_end(self, args, state, control, **kwargs):
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if marks(policy) == marks(self.trainer.accelerator.unwrap_model(self.trainer.ref_model)):
            self.equal.append(state.global_step)


class Counting:
    """Entropy and number of the tokens of each step on this rank, read where TRL computes them."""

    def __init__(self, trainer):
        self.trainer, self.entropy, self.tokens = trainer, {}, {}
        self._loss, self._forward = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
        trainer._compute_loss, trainer._get_per_token_logps_and_entropies = self.loss, self.forward

    def forward(self, *args, compute_entropy=False, **kwargs):
        result = self._forward(*args, compute_entropy=compute_entropy, **kwargs)
        if compute_entropy:
            self.last = result[1].detach().double()
        return result

    def loss(self, model, inputs):
        result, step = self._loss(model, inputs), self.trainer.state.global_step + 1
        mask = inputs["completion_mask"].bool()
        self.entropy[step] = self.entropy.get(step, 0.0) + self.last[mask].sum().item()
        self.tokens[step] = self.tokens.get(step, 0) + mask.sum().item()
        return result


def train(rank, ranks, folder, name, *, watched, ask=False):
    policy = Qwen2ForCausalLM.from_pretrained(folder / f"policy{rank}")
    trainer = tiny_trl.make_trainer(folder / f"{name}{rank}", model=policy, **CONFIG)
    run, counting = None, Counting(trainer)
    if watched:
        run = watch(trainer, store=folder / "store", run_id=name, sigterm=False)
    looking = Looking(trainer)
    trainer.add_callback(looking)
    if ask:
        trainer.add_callback(Asking(run, folder / "store"))
    trainer.train()
    return {
        "parameters": marks(trainer.accelerator.unwrap_model(trainer.model)),
        "random": random_state(),
        "equal": looking.equal,
        "entropy": counting.entropy,
        "tokens": counting.tokens,
        "counters": {} if run is None else dict(run.counters.snapshot()),
    }


def grpo(rank, ranks, folder):
    """Unwatched, watched, and watched with a reset."""
    mailbox.POLL_S = 0.0
    tiny_trl.model_on_disk(folder / f"policy{rank}")  # before there is a process group, in which only rank 0 writes
    return {
        "unwatched": train(rank, ranks, folder, "unwatched", watched=False),
        "watched": train(rank, ranks, folder, "watched", watched=True),
        "reset": train(rank, ranks, folder, "reset", watched=True, ask=True),
    }


def hangs(rank, ranks, folder):
    """Rank 1's reward function does not return before both ranks are known to hang."""
    tiny_trl.model_on_disk(folder / f"policy{rank}")
    os.environ["RLWATCH_STALL_S"] = "1"
    calls = []

    def judge_that_waits(completions, **kwargs):
        calls.append(len(completions))
        end = time.monotonic() + 120.0
        while rank == 1 and len(calls) == 2 and time.monotonic() < end:
            events = rlwatch.open_store(folder / "store").events("hangs")
            if {event.body["rank"] for event in events if event.kind == STALLED} == {0, 1}:
                break
            time.sleep(0.2)
        return tiny_trl.digits(completions)

    policy = Qwen2ForCausalLM.from_pretrained(folder / f"policy{rank}")
    trainer = tiny_trl.make_trainer(folder / f"hangs{rank}", model=policy, reward=judge_that_waits, **CONFIG)
    try:
        watch(trainer, store=folder / "store", run_id="hangs", sigterm=False)
        trainer.train()
    finally:
        del os.environ["RLWATCH_STALL_S"]
    return {"steps": trainer.state.global_step}
