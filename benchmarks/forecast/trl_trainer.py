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
from forecast.trl_setting import Setting
from forecast.trl_start import answer, prompts, start_policy
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rlwatch.demo.training import character_tokenizer

PROMPTS = 4096
KINDS: dict[str, tuple[Any, Any]] = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}


def make_trainer(setting: Setting, seed: int, starts: Path, directory: Path) -> tuple[Any, Truth]:
    """A trainer with its faults in place, not yet watched, and where the hidden truth will be."""
    config, kind = KINDS[setting.trainer]
    policy = Qwen2ForCausalLM.from_pretrained(start_policy(setting.task, setting.start, starts))
    optimizer, truth = Optimizer(policy.parameters(), skips=setting.skips), Truth()
    transformers.set_seed(seed)
    trainer = kind(
        model=policy,
        reward_funcs=Reward(setting, truth, seed),
        args=config(**_arguments(setting, seed, directory)),
        train_dataset=_problems(setting, seed),
        processing_class=character_tokenizer(),
        optimizers=(optimizer, LambdaLR(optimizer, lambda done: setting.lr_at(done + 1))),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.inner_optimizer = optimizer
    _put_faults(trainer, setting, truth, seed)
    return trainer, truth


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
        "loss_type": "dapo",
        "entropy_coef": setting.entropy_coef,
        "vllm_importance_sampling_correction": setting.correction,
    }
    return {
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
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    } | (own if setting.trainer == "grpo" else {})


def _problems(setting: Setting, seed: int) -> Dataset:
    asked = prompts(PROMPTS, random.Random(seed))
    return Dataset.from_list([{"prompt": text, "target": answer(setting.task, text)} for text in asked])


def quiet() -> None:
    """One thread (the matrices are too small to share), and no bars or warnings of the libraries."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
