"""GRPO of TRL under DDP, localised at every step or never."""

import tiny_trl
import torch
import torch._dynamo  # see training.py
from planted import Planted, off_policy
from transformers import Qwen2ForCausalLM
from trl_training import marks, random_state

from rlwatch.integrations.localising import Localise
from rlwatch.integrations.trl import watch

CONFIG = {
    "num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "per_device_train_batch_size": 4, "beta": 0.1,
}  # fmt: skip
EVERY_STEP = Localise(threshold=1e-12, share=0.99)
PLANTED_AT = 4


def train(rank, folder, name, localise):
    """The last micro-batch of the last rank has a culprit, in a step whose rollouts were used before."""
    policy = Qwen2ForCausalLM.from_pretrained(folder / f"policy{rank}")
    trainer = tiny_trl.make_trainer(folder / f"{name}{rank}", model=policy, **CONFIG)
    run = watch(trainer, store=folder / "store", run_id=name, sigterm=False, localise=localise)
    planted = Planted(trainer, off_policy(), step=PLANTED_AT, micro_batch=1) if rank == 1 else None
    trainer.train()
    moments = [
        torch.as_tensor(v).sum().item() for e in trainer.optimizer.state_dict()["state"].values() for v in e.values()
    ]
    return {
        "left": [marks(trainer.accelerator.unwrap_model(trainer.model)), moments, random_state()],
        "planted": None if planted is None else [planted.places, planted.ids],
        "counters": dict(run.counters.snapshot()),
    }


def grpo(rank, ranks, folder):
    tiny_trl.model_on_disk(folder / f"policy{rank}")  # before there is a process group, in which only rank 0 writes
    return {name: train(rank, folder, name, localise) for name, localise in (("never", False), ("every", EVERY_STEP))}
