"""On a GPU: every kind of training comes out to the bit as it would unwatched, and is measured.

Adapters with dropout, gradient checkpointing, float16 with its loss scale, a compiled model, RLOO, evaluation, rollouts
used several times, completions and text kept. Without a CUDA device these are skipped, and pytest's summary says so.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import math

import pytest
import torch
from peft import LoraConfig
from planted import Planted, off_policy
from tiny_trl import FakeRun, make_trainer

from rlwatch.integrations.localising import Localise
from rlwatch.integrations.trl import watch
from rlwatch.metrics import LAYER_PREFIX
from rlwatch.records import CULPRITS

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: kinds of training on a GPU are not tested here"
    ),
]
ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
KINDS = {
    "grpo, accumulated": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "rloo": {"kind": "rloo", "num_iterations": 2},
    "adapter with dropout": {"peft_config": ADAPTER},
    "rloo, adapter": {"kind": "rloo", "peft_config": ADAPTER},
    "activation checkpointing": {"activation_checkpointing": True},
    "adapter, checkpointing": {"peft_config": ADAPTER, "activation_checkpointing": True},
    "float16": {"fp16": True},
    "bfloat16": {"bf16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager", "tf32": False},
    "evaluated": {"eval_rows": 8, "eval_strategy": "steps", "eval_steps": 2},
    "many rollouts": {"steps_per_generation": 4},
}


def train(where, config, *, watching=None):
    """The trainer after training, and the run that watched it."""
    trainer, run = make_trainer(where, **{"use_cpu": False, "max_steps": 4, "beta": 0.1, **config}), FakeRun()
    if watching is not None:
        watch(trainer, run=run, **watching)
    trainer.train()
    return trainer, run


def left(trainer):
    """Weights, moments and random states."""
    moments = [
        torch.as_tensor(value).cpu()
        for entry in trainer.optimizer.state_dict()["state"].values()
        for value in entry.values()
    ]
    weights = [p.detach().cpu() for p in trainer.model.parameters()]
    return [*weights, *moments, torch.get_rng_state(), torch.cuda.get_rng_state()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_identical_to_training_unwatched(tmp_path, kind):
    """At the closest level, with completions and text; nothing is refused, and nothing failed."""
    plain, again = (left(train(tmp_path / name, KINDS[kind])[0]) for name in "ab")
    trainer, run = train(tmp_path / "c", KINDS[kind], watching={"completions": True, "text": True})

    assert run.counters.snapshot() == {}
    assert len(run.taps()) == 4
    assert len(run.completions) > 0
    if not same(plain, again):
        pytest.skip("this device does not repeat the training itself to the bit")
    assert same(plain, left(trainer))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "adapter with dropout", "activation checkpointing"])
def test_norms_are_those_of_the_trainer_and_of_its_layers(tmp_path, kind):
    """Without the loss scale; a step that the scaler skips has none."""
    _, run = train(tmp_path, KINDS[kind], watching={})
    measured = {step: tap for step, tap in run.taps().items() if "optim/grad_norm" in tap}

    assert measured
    for step, tap in measured.items():
        layers = [value for name, value in tap.items() if name.startswith(LAYER_PREFIX)]
        assert math.hypot(*layers) == pytest.approx(tap["optim/grad_norm"], rel=1e-3)
        assert tap["optim/grad_norm"] == pytest.approx(run.rows()[step]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("kind", ["float16", "adapter with dropout", "activation checkpointing", "compiled"])
def test_the_planted_token_is_named(tmp_path, kind):
    """Whatever its model is wrapped in, whatever it draws or recomputes."""
    config = {"use_cpu": False, "num_iterations": 2, "max_steps": 4, "max_completion_length": 12, **KINDS[kind]}
    trainer, run = make_trainer(tmp_path, **config), FakeRun()
    if kind == "float16":  # at the scale it begins with the spike would be an overflow, and its step none
        trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    watch(trainer, run=run, localise=Localise(threshold=1e-12, share=0.99))
    planted = Planted(trainer, off_policy())
    trainer.train()
    named = next(batch.columns for batch in run.spikes if batch.reason == CULPRITS and batch.step == 4)

    assert run.counters.snapshot() == {}
    assert (named["sequence"][0], named["position"][0]) in planted.places
