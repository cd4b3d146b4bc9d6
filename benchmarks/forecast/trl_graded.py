"""Starts of small-batch runs: a policy taught the problems of one task until it is right as often as it is to be.

One in ten demonstrations is wrong: a policy that was taught none of those is sure of all it says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from forecast.trl_start import BATCH, accuracy, kept
from forecast.trl_tasks import HELD_OUT_DEGREES, SIGNS, TASKS, Problem, held_out

from rlwatch.demo.training import IGNORED, VOCABULARY, WARM_START_RATE, character_tokenizer, random_policy

CHARACTERS = (*VOCABULARY, *SIGNS)
"""What the tokenizer of these runs knows: a character a token."""

SLIPS = 0.1
"""Share of the demonstrations that are wrong: a policy taught none is sure of what it says."""
MOST_BATCHES = 800


def graded_start(task: str, number: int, enough: float, folder: Path) -> Path:
    """Folder of the weights of a start for ``task`` that is right in ``enough`` of the cases, or came no nearer."""
    path = folder / f"{task}-{number}-{enough:g}"
    if path.exists():
        return path
    tokenizer = character_tokenizer(CHARACTERS)
    policy = _graded(task, number, tokenizer, enough)
    return kept(policy, tokenizer, path)


def _graded(task: str, number: int, tokenizer: Any, enough: float) -> Any:
    transformers.set_seed(1000 * sorted(TASKS).index(task) + number)
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    policy, asked = random_policy(tokenizer), held_out(task, 192, rng)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_START_RATE)
    for batch in range(1, MOST_BATCHES + 1):
        shown = [TASKS[task](rng.choice(HELD_OUT_DEGREES), rng) for _ in range(BATCH)]
        ids, labels, mask = _shown([(prompt, _slip(wanted, rng)) for prompt, wanted in shown], tokenizer)
        loss = policy(input_ids=ids, labels=labels, attention_mask=mask).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        due = batch % (2 if batch < 60 else 15) == 0
        if due and accuracy(policy, tokenizer, asked, generator) >= enough:
            break
    return policy


def _slip(wanted: str, rng: random.Random) -> str:
    """The answer, or now and then one with a wrong character."""
    if rng.random() >= SLIPS:
        return wanted
    place = rng.randrange(len(wanted))
    return wanted[:place] + rng.choice("0123456789;)]}") + wanted[place + 1 :]


def _shown(pairs: Sequence[Problem], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, labels and attention mask of a batch, padded on the right; labels of prompts are left out."""
    rows = [(tokenizer(prompt)["input_ids"], tokenizer(wanted)["input_ids"]) for prompt, wanted in pairs]
    longest = max(len(asked) + len(told) for asked, told in rows) + 1
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for i, (asked, told) in enumerate(rows):
        whole = [*asked, *told, tokenizer.eos_token_id]
        ids[i, : len(whole)] = torch.tensor(whole)
        labels[i, len(asked) : len(whole)] = torch.tensor(whole[len(asked) :])
        mask[i, : len(whole)] = 1
    return ids, labels, mask
