"""Tiny trainers of TRL that are neither GRPO nor RLOO: they learn from a dataset, or from pairs they judge."""

from pathlib import Path

import transformers
from datasets import Dataset, disable_progress_bars
from tiny_trl import CHARS, dataset, digits, policy, tokenizer
from transformers import Qwen2Config, Qwen2ForSequenceClassification, set_seed
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

disable_progress_bars()

COMMON = {
    "use_cpu": True, "bf16": False, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_steps": 3,
    "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 3,
    "lr_scheduler_type": "constant",
}  # fmt: skip
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def chatting():
    """The character tokenizer, with the template these trainers ask for."""
    tk = tokenizer()
    tk.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tk


def rows(columns, n=16):
    """``n`` rows; of each column two values in turn."""
    return Dataset.from_list([{name: pair[i % 2] for name, pair in columns.items()} for i in range(n)])


def judge():
    """A reward model."""
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(CHARS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    return Qwen2ForSequenceClassification(config)


KINDS = {
    "sft": (SFTTrainer, SFTConfig, {"text": ("123=321", "456=654")}),
    "dpo": (
        DPOTrainer,
        DPOConfig,
        {"prompt": ("12=", "45="), "chosen": ("21", "54"), "rejected": ("99", "00")},
    ),
    "kto": (KTOTrainer, KTOConfig, {"prompt": ("12=", "45="), "completion": ("21", "99"), "label": (True, False)}),
    "reward": (RewardTrainer, RewardConfig, {"chosen": ("12=21", "45=54"), "rejected": ("12=99", "45=00")}),
}


def make(kind, tmp, **config):
    """A trainer ready to train; ``config`` overrides the training arguments."""
    config = {**COMMON, "output_dir": str(Path(tmp) / "out"), **config}
    if kind == "online_dpo":
        args = OnlineDPOConfig(**config, max_new_tokens=6)
        made = OnlineDPOTrainer(
            model=policy(), reward_funcs=digits, args=args, train_dataset=dataset(), processing_class=chatting()
        )
    else:
        trainer, arguments, columns = KINDS[kind]
        data, model = rows(columns), judge() if kind == "reward" else policy()
        args = arguments(**config, **EVALUATED, max_length=16)
        made = trainer(model=model, args=args, train_dataset=data, eval_dataset=data, processing_class=chatting())
    made.remove_callback(transformers.PrinterCallback)
    return made
