"""The trainer of the demo, in a process of its own: ``python -m rlwatch.demo.training STORE CONFIG DIRECTORY RECIPE``.

It does not know of the simulated user, the webhook or the checks: it looks like a user's training script, with one line
for rlwatch. Run id, webhook address and secret come from the environment.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlwatch.demo import SMOLLM2, Recipe, smollm2

DIGITS = 5
LONGEST = DIGITS + 4
"""Largest number of tokens of a completion: enough for a completion that is too long."""

RIGHT_PLACE, ALL_RIGHT, WRONG_LENGTH = 2 / 16, 6 / 16, 1 / 16
"""Multiples of 1/16 are exact in float32: the standard deviation of equal rewards is then exactly zero, and
TRL's ``frac_reward_zero_std``, which compares it with zero, counts every silent group."""


def prompts(count: int, rng: random.Random) -> list[str]:
    """Return ``count`` random prompts such as ``"31524="``."""
    return ["".join(rng.choices("0123456789", k=DIGITS)) + "=" for _ in range(count)]


def answer(prompt: str) -> str:
    """Return the right answer to ``prompt``: its digits in ascending order."""
    return "".join(sorted(prompt.rstrip("=")))


def score(completion: str, target: str) -> float:
    """Return the reward of a completion, in [-0.25, 1]: digits in place, a bonus for all, a penalty
    for a wrong length.
    """
    placed = sum(ours == theirs for ours, theirs in zip(completion, target, strict=False))
    missing = abs(len(completion) - len(target))
    return RIGHT_PLACE * placed + ALL_RIGHT * (completion == target) - WRONG_LENGTH * missing


def sorting(completions: list[str], target: list[str], **_: object) -> list[float]:
    """Return the reward of each completion (see :func:`score`). A reward function for TRL."""
    return [score(text, wanted) for text, wanted in zip(completions, target, strict=True)]


# The policy: a Qwen2 of some 75 thousand parameters over fifteen characters, made here, downloaded from nowhere.

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY = (PAD, BOS, EOS, UNK, *"0123456789", "=")
WARM_START_RATE = 3e-3
WARM_START_BATCH = 64
IGNORED = -100
"""Label of tokens that the loss leaves out."""


def character_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> Any:
    """Return a tokenizer with one token for each character of ``vocabulary``, which pads on the left."""
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(vocabulary)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="left"
    )


def random_policy(tokenizer: Any) -> Any:
    """Return a Qwen2 model with two layers, hidden size 64, and random weights from torch's global generator."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def warm_start(policy: Any, tokenizer: Any, steps: int, rng: random.Random) -> float:
    """Train the policy on right answers for ``steps`` batches of 64; return the last loss in nats per token.

    Reinforcement learning needs some right answers to begin with: this replaces supervised fine-tuning.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_START_RATE)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        ids = torch.tensor([_solved(tokenizer, prompt) for prompt in prompts(WARM_START_BATCH, rng)])
        labels = ids.clone()
        labels[:, : DIGITS + 1] = IGNORED
        loss = policy(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def saved_and_loaded(policy: Any, tokenizer: Any, directory: Path) -> Any:
    """Save the policy to ``directory`` and load it from there, since TRL loads the reference from the policy's path."""
    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Qwen2ForCausalLM.from_pretrained(directory)


def _solved(tokenizer: Any, prompt: str) -> list[int]:
    return [*tokenizer(prompt)["input_ids"], *tokenizer(answer(prompt))["input_ids"], tokenizer.eos_token_id]


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


PROMPTS = 4096
SUM_LONGEST = 12
"""Largest number of tokens of an answer of SmolLM2."""


def build_trainer(recipe: Recipe, directory: Path, **changes: Any) -> GRPOTrainer:
    """Return a GRPO trainer of TRL for the recipe, warm-started and ready to train.

    ``directory``: for the model and the output. ``changes``: override settings of the ``GRPOConfig``.
    """
    transformers.set_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    if recipe.model == SMOLLM2:
        policy, tokenizer = smollm2.load()
        changes = {"max_completion_length": SUM_LONGEST, **changes}
    else:
        tokenizer = character_tokenizer()
        policy = random_policy(tokenizer)
        warm_start(policy, tokenizer, recipe.warm_start_steps, rng)
        policy = saved_and_loaded(policy, tokenizer, directory / "policy")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1.0, betas=(0.9, 0.99), weight_decay=0.0)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=smollm2.adding if recipe.model == SMOLLM2 else sorting,
        args=GRPOConfig(**(_config(recipe, directory) | changes)),
        train_dataset=_problems(rng, recipe.model),
        processing_class=tokenizer,
        optimizers=(optimizer, LambdaLR(optimizer, _schedule(recipe))),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _config(recipe: Recipe, directory: Path) -> dict[str, Any]:
    return {
        "output_dir": str(directory / "output"),
        "seed": recipe.seed,
        "max_steps": recipe.steps,
        "learning_rate": recipe.learning_rate,
        "per_device_train_batch_size": recipe.batch,
        "num_generations": recipe.generations,
        "max_completion_length": LONGEST,
        "beta": recipe.beta,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }


def _schedule(recipe: Recipe) -> Callable[[int], float]:
    return recipe.learning_rate_at


def _problems(rng: random.Random, model: str) -> Dataset:
    if model == SMOLLM2:
        return Dataset.from_list(smollm2.problems(PROMPTS, rng))
    return Dataset.from_list([{"prompt": text, "target": answer(text)} for text in prompts(PROMPTS, rng)])


def train(store: str, config_file: Path, directory: Path, recipe: Recipe) -> None:
    """Build the demo's trainer, watch it with rlwatch, and train.

    ``store``: URL of the store. ``config_file``: rlwatch's configuration. ``directory``: for the model and the output.
    ``recipe``: hyperparameters.
    """
    from rlwatch.integrations.trl import watch

    trainer = build_trainer(recipe, directory)
    task = f"{SMOLLM2}-sums" if recipe.model == SMOLLM2 else f"sort{DIGITS}"
    name = f"{task}-seed{recipe.seed}"
    watch(
        trainer, project="demo", name=name, store=store, config_file=config_file, completions=True, text=True
    )  # fmt: skip
    trainer.train()


def main() -> None:
    """Read the command line and train in one thread: the matrices are too small for several."""
    store, config_file, directory, recipe = sys.argv[1:]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    train(store, Path(config_file), Path(directory), Recipe(**json.loads(recipe)))


if __name__ == "__main__":
    main()
