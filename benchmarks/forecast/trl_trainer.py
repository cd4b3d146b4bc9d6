"""A TRL trainer as a setting says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from forecast.trl_engine import install
from forecast.trl_faults import Faults, Optimizer, Reward, Truth, disturb_advantages, round_gradients
from forecast.trl_graded import CHARACTERS, graded_start
from forecast.trl_setting import Setting
from forecast.trl_start import answer, prompts, start_policy
from forecast.trl_tasks import problems
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rlwatch.demo.training import VOCABULARY, character_tokenizer

PROMPTS = 4096
KINDS: dict[str, tuple[Any, Any]] = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}


def make_trainer(
    setting: Setting, seed: int, starts: Path, directory: Path, truth: Truth | None = None
) -> tuple[Any, Truth]:
    """A trainer with its faults in place, not yet watched, and where the hidden truth will be.

    ``truth``: that of the first part of a run which is resumed.
    """
    config, kind = KINDS[setting.trainer]
    policy = _policy(setting, starts)
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer, truth = Optimizer(trained, skips=setting.skips), truth or Truth()
    transformers.set_seed(seed)
    trainer = kind(
        model=policy,
        reward_funcs=Reward(setting, truth, seed),
        args=config(**_arguments(setting, seed, directory)),
        train_dataset=_problems(setting, seed),
        processing_class=character_tokenizer(CHARACTERS if setting.data else VOCABULARY),
        optimizers=(optimizer, LambdaLR(optimizer, lambda done: setting.lr_at(done + 1))),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.inner_optimizer = optimizer
    _put_faults(trainer, setting, truth, seed)
    return trainer, truth


def _policy(setting: Setting, starts: Path) -> Any:
    """The policy a run starts from, its adapters on it where it has some."""
    data, number = setting.data, setting.start
    path = graded_start(data.task, number, data.enough, starts) if data else start_policy(setting.task, number, starts)
    policy = Qwen2ForCausalLM.from_pretrained(path)
    if not setting.lora:
        return policy
    adapters = LoraConfig(r=setting.lora, lora_alpha=2 * setting.lora, target_modules="all-linear", lora_dropout=0.0)
    return get_peft_model(policy, adapters)


def _put_faults(trainer: Any, setting: Setting, truth: Truth, seed: int) -> None:
    trainer.add_callback(Faults(trainer, setting, truth, seed))
    kinds = {fault.kind for fault in setting.faults}
    if "positive advantages" in kinds:
        disturb_advantages(trainer, setting)
    if "half gradients" in kinds:
        round_gradients(trainer, setting)
    if setting.engine:
        install(trainer, setting, seed)


def _arguments(setting: Setting, seed: int, directory: Path) -> dict[str, Any]:
    own = {
        "loss_type": setting.loss_type,
        "scale_rewards": setting.scale_rewards,
        "importance_sampling_level": setting.importance,
        "entropy_coef": setting.entropy_coef,
        "vllm_importance_sampling_correction": setting.correction,
    }
    return (
        {
            "output_dir": str(directory / "output"),
            "seed": seed,
            "max_steps": setting.steps,
            "learning_rate": setting.lr,
            "per_device_train_batch_size": setting.batch // setting.accumulation,
            "gradient_accumulation_steps": setting.accumulation,
            "num_generations": setting.generations,
            "num_iterations": setting.num_iterations,
            "epsilon": setting.epsilon,
            "beta": setting.beta,
            "max_grad_norm": setting.max_grad_norm,
            "max_completion_length": setting.longest,
            "logging_steps": setting.logging_steps,
            "logging_nan_inf_filter": False,
            "use_cpu": True,
            "bf16": False,
            "activation_checkpointing": False,
            "disable_tqdm": True,
            "report_to": "none",
            "shuffle_dataset": setting.data is None,
            "save_strategy": "no",
        }
        | _saved(setting)
        | _generated(setting)
        | (own if setting.trainer == "grpo" else {})
    )


def _saved(setting: Setting) -> dict[str, Any]:
    """A checkpoint where the run will be resumed."""
    return {"save_strategy": "steps", "save_steps": setting.resumed[1]} if setting.resumed else {}


def _generated(setting: Setting) -> dict[str, Any]:
    """How many updates a batch of responses is for, where that is not what TRL does by itself."""
    if setting.steps_per_generation == 1:
        return {}
    return {"steps_per_generation": setting.steps_per_generation * setting.accumulation}


def _problems(setting: Setting, seed: int) -> Dataset:
    if setting.data:
        per = setting.num_iterations * setting.steps_per_generation
        batches, each = 2 + setting.steps // per, setting.steps_per_generation * setting.batch // setting.generations
        asked_in_order = problems(setting.data, batches, each, setting.steps, setting.strength, seed)
        return Dataset.from_list([{"prompt": text, "target": wanted} for text, wanted in asked_in_order])
    asked = prompts(PROMPTS, random.Random(seed))
    return Dataset.from_list([{"prompt": text, "target": answer(setting.task, text)} for text in asked])


def quiet() -> None:
    """One thread (the matrices are too small to share), and no bars or warnings of the libraries."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
