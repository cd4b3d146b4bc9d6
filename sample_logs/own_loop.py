"""A plain GRPO loop of our own that reports what verl reports, under verl's names, computed as verl computes it.

No verl code runs here. It exists because real verl needs a GPU, and because a loop of one's own is the other kind of
trainer rlwatch is for: two minibatches an update pass, so ratios, clipping and ``actor/ppo_kl`` carry information.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import set_seed

from rlwatch.demo import training
from rlwatch.demo.training import character_tokenizer, random_policy, warm_start

Score = Callable[[str, str], float]
CLIP = 0.2
GROUPS, GENERATIONS, MINIBATCHES = 16, 8, 2


@dataclass(frozen=True)
class Settings:
    """What differs between the runs of this loop."""

    seed: int
    steps: int
    learning_rate: float
    warm_start_steps: int = 60
    entropy_coefficient: float = 0.0
    deviation_floor: float = 1e-6
    """Added to a group's standard deviation before dividing by it."""
    score: Score = training.score


def train(settings: Settings) -> Iterator[dict[str, float]]:
    """One dict of verl metrics a step."""
    set_seed(settings.seed)
    rng = random.Random(settings.seed)
    tokenizer = character_tokenizer()
    policy = random_policy(tokenizer)
    warm_start(policy, tokenizer, settings.warm_start_steps, rng)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    for step in range(1, settings.steps + 1):
        begun = time.monotonic()
        batch = _rollouts(policy, tokenizer, settings, rng)
        metrics = _about(batch) | _update(policy, optimizer, batch, settings)
        metrics |= {"training/global_step": step, "timing_s/step": time.monotonic() - begun}
        yield {
            name: round(value, 6) if abs(value) >= 1e-3 else float(f"{value:.4g}") for name, value in metrics.items()
        }


@dataclass
class Batch:
    """Sequences (N, T) with prompt; masks and log-probs (N, R) of the responses; scores and advantages (N,)."""

    ids: torch.Tensor
    mask: torch.Tensor
    old_logp: torch.Tensor
    entropy: torch.Tensor
    scores: torch.Tensor
    advantages: torch.Tensor


@torch.no_grad()
def _rollouts(policy, tokenizer, settings: Settings, rng: random.Random) -> Batch:
    prompts = [text for text in training.prompts(GROUPS, rng) for _ in range(GENERATIONS)]
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in prompts])
    start = ids.shape[1]
    alive = torch.ones(len(ids), dtype=torch.bool)
    columns = []
    for _ in range(training.LONGEST):
        token = torch.multinomial(policy(input_ids=ids).logits[:, -1].softmax(-1), 1)
        columns.append(alive.clone())
        ids = torch.cat([ids, torch.where(alive[:, None], token, tokenizer.pad_token_id)], 1)
        alive = alive & (token[:, 0] != tokenizer.eos_token_id)
    texts = [tokenizer.decode(row[start:], skip_special_tokens=True) for row in ids]
    scores = torch.tensor(
        [settings.score(text, training.answer(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    )
    groups = scores.view(GROUPS, GENERATIONS)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + settings.deviation_floor)
    logp, entropy = _logp_and_entropy(policy, ids, start)
    return Batch(ids, torch.stack(columns, 1), logp, entropy, scores, advantages.flatten())


def _logp_and_entropy(policy, ids: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    logp = policy(input_ids=ids).logits[:, start - 1 : -1].log_softmax(-1)
    return logp.gather(-1, ids[:, start:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def _update(policy, optimizer, batch: Batch, settings: Settings) -> dict[str, float]:
    """One pass in two minibatches; means over both, as verl reduces them."""
    start = batch.ids.shape[1] - batch.mask.shape[1]
    reports = []
    for rows in torch.randperm(len(batch.ids)).chunk(MINIBATCHES):
        mask, advantage = batch.mask[rows], batch.advantages[rows, None]
        logp, entropy = _logp_and_entropy(policy, batch.ids[rows], start)
        change = (logp - batch.old_logp[rows]).clamp(-20, 20)
        ratio = change.exp()
        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = torch.maximum(plain, clipped)[mask].mean()
        total = loss - settings.entropy_coefficient * entropy[mask].mean()
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        if norm.isfinite():  # as verl does: a broken gradient is skipped, and its norm is logged
            optimizer.step()
        clip_fraction = (clipped > plain)[mask].float().mean()
        reports.append([float(x.detach()) for x in (loss, clip_fraction, -change[mask].mean(), norm)])
    names = ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm")
    means = {name: sum(column) / len(reports) for name, column in zip(names, zip(*reports, strict=True), strict=True)}
    return means | {"actor/lr": settings.learning_rate}


def _about(batch: Batch) -> dict[str, float]:
    lengths = batch.mask.sum(1).float()
    cut = (lengths == batch.mask.shape[1]).float().mean()
    return {
        "actor/entropy": float(batch.entropy[batch.mask].mean()),
        **_spread("critic/score", batch.scores),
        **_spread("critic/advantages", batch.advantages),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": float(cut),
        "perf/total_num_tokens": float(lengths.sum()) + batch.ids.shape[0] * (batch.ids.shape[1] - batch.mask.shape[1]),
    }


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
