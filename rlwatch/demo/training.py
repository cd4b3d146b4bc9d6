"""The trainer of the demo, a process of its own: ``python -m rlwatch.demo.training STORE CONFIG DIRECTORY RECIPE``.

Nothing here knows of the person, the webhook or the checks: it is what a user's training script looks like,
with one line for rlwatch. Run id, webhook address and secret come through the environment.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from trl import GRPOConfig, GRPOTrainer

from rlwatch.demo import task
from rlwatch.demo.policy import character_tokenizer, random_policy, saved_and_loaded, warm_start
from rlwatch.demo.recipe import Recipe

PROMPTS = 4096


def build_trainer(recipe: Recipe, directory: Path, **changes: Any) -> GRPOTrainer:
    """A GRPO trainer, warm-started and ready to train; ``changes`` override the GRPOConfig."""
    transformers.set_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    tokenizer = character_tokenizer()
    policy = random_policy(tokenizer)
    warm_start(policy, tokenizer, recipe.warm_start_steps, rng)
    policy = saved_and_loaded(policy, tokenizer, directory / "policy")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1.0, betas=(0.9, 0.99), weight_decay=0.0)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=task.sorting,
        args=GRPOConfig(**(_config(recipe, directory) | changes)),
        train_dataset=_problems(rng),
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
        "max_completion_length": task.LONGEST,
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


def _problems(rng: random.Random) -> Dataset:
    return Dataset.from_list([{"prompt": text, "target": task.answer(text)} for text in task.prompts(PROMPTS, rng)])


def train(store: str, config_file: Path, directory: Path, recipe: Recipe) -> None:
    """Build, watch, train."""
    from rlwatch.integrations.trl import watch

    trainer = build_trainer(recipe, directory)
    watch(trainer, project="demo", name=f"sort{task.DIGITS}-seed{recipe.seed}", store=store, config_file=config_file)
    trainer.train()


def main() -> None:
    """Read the command line and train, in one thread: the matrices are too small to share."""
    store, config_file, directory, recipe = sys.argv[1:]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    train(store, Path(config_file), Path(directory), Recipe(**json.loads(recipe)))


if __name__ == "__main__":
    main()
