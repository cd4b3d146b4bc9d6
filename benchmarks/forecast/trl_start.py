"""Start of runs: a policy of 75 thousand parameters that solves a little less than half of its task.

It is shown demonstrations of which a quarter are wrong, until it is right often enough. The weights are kept in a
folder, since TRL loads the reference from where a policy says it came from.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from forecast.trl_tasks import Problem

from rlwatch.demo.training import IGNORED, WARM_START_RATE, character_tokenizer, random_policy

DIGITS = 5
WRONG = 0.25
BATCH = 64
CHECKED_EVERY = 3
MOST_BATCHES = 400


def _successors(digits: str) -> str:
    return "".join(str((int(digit) + 1) % 10) for digit in digits)


TASKS: dict[str, Callable[[str], str]] = {
    "sort": lambda digits: "".join(sorted(digits)),
    "reverse": lambda digits: digits[::-1],
    "successor": _successors,
}
"""What is to be made of five digits."""


def prompts(count: int, rng: random.Random) -> list[str]:
    """``count`` prompts such as ``"31524="``."""
    return ["".join(rng.choices("0123456789", k=DIGITS)) + "=" for _ in range(count)]


def answer(task: str, prompt: str) -> str:
    """The right completion."""
    return TASKS[task](prompt.rstrip("="))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Completions token by token; ``logps`` as the sampler that drew them computed them."""

    ids: list[list[int]]
    logps: list[list[float]]


@torch.no_grad()
def sample(
    policy: Any, ids: list[list[int]], longest: int, generator: torch.Generator, *, temperature: float = 1.0
) -> Sampled:
    """Complete prompts, tokens drawn at ``temperature`` from ``generator``.

    Where the policy is not finite any token is as likely as any other, as rollout engines behave: they do not stop.
    """
    tokens, places = _padded(ids, policy.config.pad_token_id)
    drawn, logps, past = [], [], None
    over = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(longest):
        out = policy(input_ids=tokens, past_key_values=past, use_cache=True, **places)
        past = out.past_key_values
        logp = (out.logits[:, -1].float() / temperature).log_softmax(-1)
        tokens = torch.multinomial(logp.exp().nan_to_num(nan=1.0), 1, generator=generator)
        drawn.append(tokens)
        logps.append(logp.gather(-1, tokens))
        over |= tokens[:, 0] == policy.config.eos_token_id
        if bool(over.all()):
            break
        places = _next(places)
    return _cut(torch.cat(drawn, -1), torch.cat(logps, -1), policy.config.eos_token_id)


def _padded(ids: list[list[int]], pad: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Prompts as one tensor, and where in them to look if they are not all of one length."""
    longest = max(map(len, ids))
    if min(map(len, ids)) == longest:
        return torch.tensor(ids), {}
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in ids])
    return tokens, {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def _next(places: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same for the one token after."""
    if not places:
        return {}
    mask = places["attention_mask"]
    return {
        "attention_mask": torch.cat([mask, torch.ones_like(mask[:, :1])], -1),
        "position_ids": places["position_ids"][:, -1:] + 1,
    }


def _cut(drawn: torch.Tensor, logps: torch.Tensor, end: int) -> Sampled:
    """Each completion up to and with its end-of-sequence token."""
    ids = drawn.tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in ids]
    rows = zip(ids, logps.tolist(), lengths, strict=True)
    kept = [(row[:length], values[:length]) for row, values, length in rows]
    return Sampled([row for row, _ in kept], [values for _, values in kept])


def accuracy(policy: Any, tokenizer: Any, asked: Sequence[Problem], generator: torch.Generator) -> float:
    """Share of ``asked`` that one sampled completion each answers exactly, and then ends."""
    longest = 1 + max(len(wanted) for _, wanted in asked)
    sampled = sample(policy, tokenizer([prompt for prompt, _ in asked])["input_ids"], longest, generator)
    texts = tokenizer.batch_decode(sampled.ids, skip_special_tokens=True)
    right = [len(ids) == len(wanted) + 1 for ids, (_, wanted) in zip(sampled.ids, asked, strict=True)]
    pairs = zip(texts, asked, right, strict=True)
    return sum(ended and text == wanted for text, (_, wanted), ended in pairs) / len(asked)


def answered(task: str, asked: Sequence[str]) -> list[Problem]:
    """Prompts of :func:`prompts` with the right answer of each."""
    return [(prompt, answer(task, prompt)) for prompt in asked]


def start_policy(task: str, number: int, folder: Path, enough: float = 0.45) -> Path:
    """Folder of the weights of start ``number`` for ``task``, made when first asked for."""
    path = folder / f"{task}-{number}"
    if path.exists():
        return path
    tokenizer = character_tokenizer()
    policy = _taught(task, number, tokenizer, enough)
    return kept(policy, tokenizer, path)


def kept(policy: Any, tokenizer: Any, path: Path) -> Path:
    """``path`` with the weights, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    policy.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    try:
        beside.rename(path)
    except OSError:  # another process was first
        shutil.rmtree(beside)
    return path


def _taught(task: str, number: int, tokenizer: Any, enough: float) -> Any:
    transformers.set_seed(1000 * sorted(TASKS).index(task) + number)
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    policy, asked = random_policy(tokenizer), answered(task, prompts(256, rng))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_START_RATE)
    for batch, (ids, labels) in enumerate(_demonstrations(task, tokenizer, rng), start=1):
        loss = policy(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        due = batch % CHECKED_EVERY == 0
        if batch >= MOST_BATCHES or (due and accuracy(policy, tokenizer, asked, generator) >= enough):
            break
    return policy


def _demonstrations(task: str, tokenizer: Any, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches (64, 12) of token ids and labels, without end."""
    while True:
        shown = prompts(BATCH, rng)
        texts = [prompt + _demonstration(task, prompt, rng) for prompt in shown]
        ids = torch.tensor([[*row, tokenizer.eos_token_id] for row in tokenizer(texts)["input_ids"]])
        labels = ids.clone()
        labels[:, : DIGITS + 1] = IGNORED
        yield ids, labels


def _demonstration(task: str, prompt: str, rng: random.Random) -> str:
    """The answer, or with probability 1/4 one of a wrong digit."""
    right = answer(task, prompt)
    if rng.random() >= WRONG:
        return right
    place = rng.randrange(DIGITS)
    return right[:place] + rng.choice("0123456789") + right[place + 1 :]
