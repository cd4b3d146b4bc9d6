"""A tiny policy, prompts and a reward, made in a directory."""

import json
import random
from pathlib import Path

CHARS = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "="]

REWARD = '''
import torch


def reward_func(queries, prompts, labels):
    """How many of the sampled characters are odd digits."""
    text = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    rewards = torch.tensor([sum(c in "13579" for c in t) / 8 for t in text])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
'''


def make(where):
    """Everything the command line names, beneath ``where``."""
    where = Path(where)
    where.mkdir(parents=True, exist_ok=True)
    _policy(where / "policy")
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789", k=3)) + "="] * 64
    (where / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "label": ""}) + "\n" for p in prompts))
    (where / "reward.py").write_text(REWARD)
    return where


def _policy(where):
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tk = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARS)}, unk_token="<unk>"))  # noqa: S106  (no password)
    tk.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tk.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tk, padding_side="left", **special).save_pretrained(where)
    config = Qwen2Config(
        vocab_size=len(CHARS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(where)


def arguments(where, *, steps=2, **more):
    """The command line of ``openrlhf.cli.train_ppo_ray`` for it; ``more`` are options with dots as ``__``."""
    options = {
        "actor.model_name_or_path": where / "policy",
        "data.prompt_dataset": where / "prompts.jsonl",
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.max_len": 16,
        "data.max_samples": 4 * steps,
        "reward.remote_url": where / "reward.py",
        "ckpt.path": where / "checkpoints",
        "ckpt.output_dir": where / "final",
        "ckpt.disable_ds": None,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "reward.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "train.colocate_all": None,
        "rollout.batch_size": 4,
        "rollout.micro_batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_new_tokens": 8,
        "train.batch_size": 16,
        "train.micro_batch_size": 4,
        "actor.adam.lr": 1e-3,
        "actor.entropy_coef": 0.0,
        "algo.advantage.estimator": "group_norm",
        "algo.advantage.is_correction_level": "token",
        "algo.kl.init_coef": 0.01,
        "algo.kl.use_loss": None,
        "algo.kl.estimator": "k3",
        "ds.zero_stage": 2,
        "ds.attn_implementation": "eager",
        "ds.param_dtype": "bf16",
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    words = []
    for name, value in options.items():
        if value is not False:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words
