"""Every command on a real GRPO trainer of TRL under DDP, and a resume of what it left."""

import tiny_trl
import torch
import torch._dynamo  # see training.py
from tallying import ask_all
from transformers import Qwen2ForCausalLM, TrainerCallback

from rlwatch.control import mailbox
from rlwatch.integrations.commands import PauseState
from rlwatch.integrations.trl import watch
from rlwatch.integrations.weights import fingerprint

CONFIG = {"beta": 0.1, "max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
ASKED = {
    1: [("reset-reference", {"optimizer": "keep"})],
    2: [("lower-lr", {"scale": 0.1, "until": 4}), ("set-kl-coef", {"value": 0.5}), ("save-checkpoint", {})],
    3: [("pause", {"minutes": 5.0})],
    5: [("stop", {"save": "no"})],
}
"""What rank 0 asks before the step after this one."""


class Person(TrainerCallback):
    """Rank 0 asks for what is due, and waits until it has arrived."""

    def __init__(self, run, store, asked):
        self.run, self.store, self.asked = run, store, asked

    def ask(self, kind, args):
        ask_all(self.run, self.store, kind, args=args)
        self.run.flush(20.0)

    def on_step_begin(self, args, state, control, **kwargs):
        if args.process_index == 0:
            for kind, given in self.asked.get(state.global_step, []):
                self.ask(kind, given)


class Looking(TrainerCallback):
    """The learning rate and the KL coefficient of every step, as this rank used them."""

    def __init__(self, trainer):
        self.trainer, self.rates, self.coefficients = trainer, [], []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.coefficients.append(self.trainer.beta)


def train(rank, folder, name, asked, resume=None):
    policy = Qwen2ForCausalLM.from_pretrained(folder / f"policy{rank}")
    trainer = tiny_trl.make_trainer(folder / "shared", model=policy, **CONFIG)
    run = watch(trainer, store=folder / "store", run_id=name, sigterm=False)
    person, looking, rounds = Person(run, folder / "store", asked), Looking(trainer), []

    def wait(hold):
        rounds.append(1)
        if rank == 0 and len(rounds) == 2:
            person.ask("resume", {})

    PauseState.wait = wait
    for callback in (person, looking):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return {
        "steps": trainer.state.global_step,
        "rates": looking.rates,
        "coefficients": looking.coefficients,
        "rounds": len(rounds),
        "reference": fingerprint(trainer.accelerator.unwrap_model(trainer.ref_model).parameters()),
        "state": len(trainer.optimizer.optimizer.state),
    }


def orders(rank, ranks, folder):
    """All commands in one run; then a second run from its checkpoint."""
    mailbox.POLL_S = 0.0
    tiny_trl.model_on_disk(folder / f"policy{rank}")
    torch.manual_seed(0)
    checkpoint = folder / "shared" / "out" / "checkpoint-3"
    return {
        "told": train(rank, folder, "told", ASKED),
        "resumed": train(rank, folder, "resumed", {}, resume=str(checkpoint)),
    }
