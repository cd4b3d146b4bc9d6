"""The policy: a Qwen2 of some 75 thousand parameters over fifteen characters, made here, downloaded from nowhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlwatch.demo import task

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY = (PAD, BOS, EOS, UNK, *"0123456789", "=")
WARM_START_RATE = 3e-3
WARM_START_BATCH = 64
IGNORED = -100
"""Label of tokens the loss leaves out."""


def character_tokenizer() -> Any:
    """One token a character; ``<pad>`` on the left."""
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(VOCABULARY)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="left"
    )


def random_policy(tokenizer: Any) -> Any:
    """Two layers, hidden size 64; weights from torch's global generator."""
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
    """Show the policy what an answer looks like, ``steps`` batches of 64; returns the last loss in nats per token.

    Reinforcement learning needs some right answers to begin with: this stands for supervised fine-tuning.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_START_RATE)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        ids = torch.tensor([_solved(tokenizer, prompt) for prompt in task.prompts(WARM_START_BATCH, rng)])
        labels = ids.clone()
        labels[:, : task.DIGITS + 1] = IGNORED
        loss = policy(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def saved_and_loaded(policy: Any, tokenizer: Any, directory: Path) -> Any:
    """The policy by way of ``directory``: TRL loads the reference from where the policy says it came from."""
    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Qwen2ForCausalLM.from_pretrained(directory)


def _solved(tokenizer: Any, prompt: str) -> list[int]:
    return [*tokenizer(prompt)["input_ids"], *tokenizer(task.answer(prompt))["input_ids"], tokenizer.eos_token_id]
