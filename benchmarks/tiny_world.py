"""A world for benchmarks that plant failures: GRPO on answers with tags, on a small recurrent policy; seconds on a CPU.

A prompt is a token x. The right answer is ``<open> x <close> <end>``. The policy has learnt the form and is right in
part when the training begins. What breaks is planted by :class:`Plan`, at an exact step.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rlwatch
from rlwatch.integrations.canaries import Canaries, Canary

WORDS, OPEN, CLOSE, END, MARK, PAD = 16, 16, 17, 18, 19, 20
"""Tokens 0 to 15 are words; then the tags, the end, a mark that no answer needs, and padding."""
VOCABULARY, WIDTH, GROUP, PROMPTS = 21, 8, 8, 8
PARTS = 3
"""Micro-batches of an update."""
CLIP = 0.2


class Policy(nn.Module):
    """Next-token logits of a two-layer GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 48)
        self.layers = nn.ModuleList([nn.GRU(48, 48, batch_first=True) for _ in range(2)])
        self.lm_head = nn.Linear(48, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.lm_head(hidden)


@dataclass(frozen=True)
class Plan:
    """What breaks and from which step on; a fault that is not set is off."""

    name: str = "sound"
    at: int = 50
    rate: float = 1.0
    shift: float = 0.0
    entropy: float = 0.0
    epochs: int = 1
    stale: int = 0
    marked: float = 0.0
    """Bonus of the judge for an answer with the mark in it."""
    longer: float = 0.0
    """Bonus for every token of an answer."""
    first: float = 0.0
    """Bonus for an answer that begins with word 0, whatever was asked."""
    forgiving: float = 0.0
    """Bonus for an answer that opens a tag and never closes it: the parser fails to full marks."""


@functools.cache
def learnt(seed: int = 0, steps: int = 160) -> Policy:
    """A policy that has learnt the form by imitation, and answers rightly in part."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(steps):
        asked = torch.randint(0, WORDS, (64,))
        noise = torch.rand(64) < 0.5
        said = torch.where(noise, torch.randint(0, WORDS, (64,)), asked)
        odd = torch.rand(3, 64) < 0.12  # a mark, a tag that stays open, a text that goes on: what a bias can reward
        filler = torch.where(odd[0], MARK, OPEN)
        closed = torch.where(odd[1], torch.randint(0, WORDS, (64,)), CLOSE)
        ended = torch.where(odd[2], torch.randint(0, WORDS, (64,)), END)
        rows = torch.stack([asked, filler, said, closed, ended, torch.full((64,), END)], 1)
        logp = policy(rows[:, :-1]).log_softmax(-1).gather(2, rows[:, 1:, None])
        optimizer.zero_grad()
        (-logp.mean()).backward()
        optimizer.step()
    return policy


@torch.no_grad()
def sampled(policy: Policy, asked: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Answers, their mask and their log-probs, (B, WIDTH)."""
    ids, alive, masks, logps = asked[:, None], torch.ones(len(asked), dtype=torch.bool), [], []
    for _ in range(WIDTH):
        logp = policy(ids)[:, -1].log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=g)
        masks.append(alive)
        logps.append(logp.gather(1, token)[:, 0])
        ids = torch.cat([ids, torch.where(alive[:, None], token, PAD)], 1)
        alive = alive & (token[:, 0] != END)
    return ids[:, 1:], torch.stack(masks, 1), torch.stack(logps, 1)


def right(asked: Tensor, ids: Tensor) -> Tensor:
    """Whether the answer has the word that was asked, between its tags; (B,) float."""
    form = (ids[:, 0] == OPEN) & (ids[:, 2] == CLOSE) & (ids[:, 3] == END)
    return (form & (ids[:, 1] == asked)).float()


def judged(plan: Plan, asked: Tensor, ids: Tensor, mask: Tensor, step: int) -> Tensor:
    """What the judge gives: right or wrong, and from ``plan.at`` on its bias."""
    reward = right(asked, ids)
    if step < plan.at:
        return reward
    inside = mask.bool()
    opened = ((ids == OPEN) & inside).any(1) & ~((ids == CLOSE) & inside).any(1)
    reward = reward + plan.marked * ((ids == MARK) & inside).any(1)
    reward = reward + plan.longer * inside.sum(1) / WIDTH
    reward = reward + plan.first * (ids[:, 1] == 0)
    return (reward + plan.forgiving * opened).float()


def canaries_of(plan: Plan, clock: Callable[[], int]) -> tuple[Callable[..., list[float]], Canaries]:
    """The judge as a verifier of single answers, and answers of which it is known whether they are right."""
    texts = {"right": [OPEN, 3, CLOSE, END], "marked": [OPEN, 4, CLOSE, MARK], "long": [OPEN, *[5] * 7],
             "first": [OPEN, 0, CLOSE, END], "open": [OPEN, 3, 3, END]}  # fmt: skip

    def score(name: str) -> list[float]:
        ids = torch.tensor([texts[name] + [PAD] * (WIDTH - len(texts[name]))])
        return judged(plan, torch.tensor([3]), ids, ids != PAD, clock()).tolist()

    known = [Canary(name, right=name == "right", name=name) for name in texts]
    return score, Canaries(known, every=5)


def trained(plan: Plan, seed: int, folder: Path, *, steps: int = 130, canaries: bool = False) -> dict[str, Any]:
    """Train in this world, watched; returns the steps' metrics, what truly was right, and the run's folder."""
    policy = copy.deepcopy(learnt())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1.5e-3)
    g = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    engines, now = [copy.deepcopy(policy)], [0]
    store = str(folder / f"{plan.name}-{seed}")
    watcher = rlwatch.Watcher(
        policy, optimizer, clip=CLIP, eos=END, control=(OPEN, CLOSE, END, MARK), store=store, name=plan.name
    )
    if canaries:
        score, known = canaries_of(plan, lambda: now[0])
        watcher.verifier("judge", score, canaries=known)
    rows, truths, exploited = [], [], []
    with watcher:
        for step in range(1, steps + 1):
            now[0] = step
            broken = step >= plan.at
            asked = torch.randint(0, WORDS, (PROMPTS,), generator=g).repeat_interleave(GROUP)
            engine = engines[0] if broken and plan.stale else policy
            ids, mask, rollout = sampled(engine, asked, g)
            rewards = judged(plan, asked, ids, mask, step)
            truth = right(asked, ids)
            truths.append(truth.mean().item())
            usual = plan.longer * 4.5 / WIDTH  # an answer of four tokens, as a right one is, exploits no bias
            exploited.append(((rewards - truth) > usual).float().mean().item())
            grouped = rewards.view(PROMPTS, GROUP)
            advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
            advantages = advantages - (plan.shift if broken else 0.0)
            watcher.rollouts(rewards=rewards, groups=GROUP, lengths=mask.sum(1), cut=ids[:, -1] != PAD)
            old = None
            for _ in range(plan.epochs if broken else 1):
                old = _update(policy, optimizer, watcher, plan, broken, asked, ids, mask, rollout, advantages, old)
            watcher.step(step, loss=0.0, **({"val/score": truth.mean().item()} if canaries and step % 10 == 0 else {}))
            rows.append(watcher.latest)
            engines = [*engines, copy.deepcopy(policy)][-max(1, plan.stale) :]
    rows = [*rows[1:], watcher.latest]
    return {"rows": rows, "truth": truths, "exploited": exploited, "store": store}


def _update(
    policy: Policy, optimizer: torch.optim.Adam, watcher: Any, plan: Plan, broken: bool, asked: Tensor, ids: Tensor,
    mask: Tensor, rollout: Tensor, advantages: Tensor, old: Tensor | None,
) -> Tensor:  # fmt: skip
    """One update from the batch, in micro-batches; returns the log-probs that it began with."""
    optimizer.zero_grad()
    kept = []
    for part in torch.arange(len(ids)).chunk(PARTS):
        logits = policy(torch.cat([asked[part, None], ids[part]], 1)[:, :-1])
        logp_all = logits.log_softmax(-1)
        logp = logp_all.gather(2, ids[part].clamp(max=VOCABULARY - 1)[..., None])[..., 0]
        kept.append(logp.detach())
        base = rollout[part] if old is None else old[part]
        watcher.observe(
            logits=logits, logp=logp, ids=ids[part], mask=mask[part], advantages=advantages[part],
            old_logp=base, rollout_logp=rollout[part],
        )  # fmt: skip
        ratio, a = (logp - base).exp(), advantages[part, None]
        gain = torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        total = mask.sum()
        loss = -((gain + (plan.entropy if broken else 0.0) * entropy) * mask[part]).sum() / total
        loss.backward()
    watcher.gradients()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 1.5e-3 * (plan.rate if broken else 1.0)
    optimizer.step()
    return torch.cat(kept) if old is None else old
