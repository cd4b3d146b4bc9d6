"""ms-swift's own GRPO, started by its own command line and watched by its callback; collected by ``make nightly`` only."""

import json
import os
import random
import sys
from pathlib import Path

os.environ.update(MODELSCOPE_OFFLINE="1", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import pytest
import swift
from safetensors.torch import load_file
from swift.pipelines import rlhf_main
from tiny_trl import FakeRun, tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from rlwatch.errors import ConfigError
from rlwatch.integrations.snapshots import Snapshots
from rlwatch.integrations.trl.swift import register
from rlwatch.store.url import open_store

STEPS = 4
GRPO = {
    "rlhf_type": "grpo", "model_type": "qwen2", "template": "dummy", "reward_funcs": "digits", "num_generations": 4,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_completion_length": 6, "max_length": 32,
    "max_steps": STEPS, "logging_steps": 1, "use_vllm": "false", "tuner_type": "full", "torch_dtype": "float32",
    "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": STEPS, "eval_strategy": "no", "split_dataset_ratio": 0,
    "beta": 0.04, "bf16": "false", "dataloader_num_workers": 0, "use_hf": "true", "add_version": "false",
    "log_entropy": "true", "report_to": "none",
}  # fmt: skip
REWARD = """
from swift.rewards import ORM, orms

class Digits(ORM):
    def __call__(self, completions, **kwargs):
        return [sum(c in "13579" for c in text) / 8 for text in completions]

orms["digits"] = Digits
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A random model of two layers, prompts and a reward function, as files."""
    where = tmp_path_factory.mktemp("swift")
    tk = tokenizer()
    tk.add_tokens("a")  # ms-swift looks for what its tokenizer adds around one
    tk.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tk.save_pretrained(where / "model")
    set_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tk),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).save_pretrained(where / "model")
    rng = random.Random(1)
    prompts = ["".join(rng.choices("0123456789", k=3)) + "=" for _ in range(64)]
    rows = [json.dumps({"messages": [{"role": "user", "content": one}]}) for one in prompts]
    (where / "data.jsonl").write_text("\n".join(rows))
    (where / "reward.py").write_text(REWARD)
    return where


def train(home, out, *, watched=True, **settings):
    """Train by ms-swift's command line; the weights it saved."""
    places = {"model": home / "model", "dataset": home / "data.jsonl", "external_plugins": home / "reward.py"}
    given = {**GRPO, **places, "output_dir": home / out, **({"callbacks": "rlwatch"} if watched else {}), **settings}
    rlhf_main([word for name, value in given.items() for word in (f"--{name}", str(value))])
    return load_file(home / out / f"checkpoint-{STEPS}" / "model.safetensors")


@pytest.fixture(scope="module")
def plain(home):
    return train(home, "plain", watched=False)


@pytest.mark.timeout(300)
def test_every_token_is_measured_and_the_weights_are_those_of_unwatched_training(home, plain):
    """Log-probs, ratios, KL to the reference, rewards, reward functions, stages and gradients, at every step."""
    register(store=str(home / "store"), name="swift")
    weights = train(home, "watched")
    store = open_store(str(home / "store"))
    (run,) = store.runs()
    rows: dict[int, dict[str, float]] = {}
    for record in store.records(run.run_id):
        rows.setdefault(record.step, {}).update(record.metrics)

    assert (run.source, str(run.state)) == ("ms-swift", "finished")
    assert list(rows) == [1, 2, 3, 4]
    wanted = {
        "policy/logp_mean", "policy/entropy", "policy/kl_ref_k3", "ratio/mean", "ratio/ess", "adv/std", "reward/mean",
        "len/mean", "reward/zero_std_frac", "verifier/seconds/Digits", "time/stage/sampling", "time/stage/update",
        "grad_layer/model.layers.0", "loss/raw", "optim/grad_norm", "text/repetition",
    }  # fmt: skip
    for step, row in rows.items():
        assert wanted <= set(row), (step, wanted - set(row))
        assert "rlwatch/errors" not in row
        assert row["reward/mean"] == pytest.approx(row["reward"], abs=1e-6)
        assert row["policy/kl_ref_k3"] == pytest.approx(row["kl"], abs=1e-6)
        assert row["len/mean"] == pytest.approx(row["completions/mean_length"])
        assert row["optim/grad_norm"] == pytest.approx(row["grad_norm"])
        assert row["policy/entropy"] == pytest.approx(row["entropy/mean"], rel=0.2)  # theirs is a mean over responses
    assert weights.keys() == plain.keys()
    assert all(weights[name].equal(plain[name]) for name in plain)


class Ordering(FakeRun):
    """Sends each of ``commands`` once its step has been logged."""

    def __init__(self, commands):
        super().__init__()
        self.commands_at = commands

    def log(self, metrics, step):
        super().log(metrics, step)
        kind, args = self.commands_at.pop(step, (None, None))
        if kind:
            self.send(kind, **args)


@pytest.mark.timeout(300)
def test_commands_are_executed_between_steps(home):
    """The reference is reset, the learning rate lowered, and the weights return to a snapshot."""
    commands = {1: ("reset-reference", {}), 2: ("lower-lr", {"scale": 0.5}), 3: ("rollback", {"to": 0})}
    run = Ordering(commands)
    register(run=run, snapshots=Snapshots(every=1, share=1.0))
    train(home, "commanded")

    assert [str(one.status) for one in run.answers] == ["done"] * 3, run.answers
    assert not run.commands_at


def test_a_swift_without_callbacks_is_refused_with_the_way_that_remains(monkeypatch):
    """One error, before training."""
    monkeypatch.delattr(swift, "callbacks_map")
    monkeypatch.setattr(swift, "callbacks_map", None, raising=False)
    with pytest.raises(ConfigError, match="report_to rlwatch"):
        register()
