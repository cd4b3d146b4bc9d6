"""Causes of a mismatch, planted in the sampler of a small real model while it trains: how many are named rightly?

    python benchmarks/mismatch_causes.py first      the plants with which the thresholds were chosen
    python benchmarks/mismatch_causes.py held-out   those that were run once, after that
    python benchmarks/mismatch_causes.py first-pairs,held-out-pairs   two causes at once

A second argument is a folder in which the models and the batches are kept, and found again: rows are made of them.

A Llama of half a million parameters learns the bytes of docs/ and is trained on by GRPO. An engine of its own, with a
key-value cache samples from a copy of its weights in bfloat16; the fault is in the engine. The rows hold what
rlwatch measures of each batch, and are scanned and diagnosed like any log.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import rlwatch
from rlwatch.diagnosis.mismatch_causes import GapTracker, MismatchCause, cause_of
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

STEPS, FAULT = 44, 20
"""Steps of a run, and the step at which a fault begins that is not there from the start."""
RESPONSES = 24
SHORT, LONG = (24, 48), (8, 120)
"""Tokens of a prompt and of the longest response; the model was trained on 128 in all."""
RATE = 4e-5
BEGIN, CLOSE, OPEN, OTHER = 1, 2, 3, 4
"""Control tokens of the templated text: begin of a text, end and begin of a line, and one that no text has."""
EXPERTS, USED = 4, 2
"""Experts of a layer of the mixture, and how many a token is sent to."""
MODEL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


Model = LlamaForCausalLM | MixtralForCausalLM


def text() -> Tensor:
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return torch.tensor(list("\n\n".join(page.read_text() for page in pages).encode()))


def templated(data: Tensor) -> Tensor:
    """The text with each end of a line as the end of a turn and the begin of the next, two control tokens."""
    ends = (data == ord("\n")).nonzero()[:, 0].tolist()
    lines, turn = [], torch.tensor([CLOSE, OPEN])
    for first, last in zip([0, *(end + 1 for end in ends)], [*ends, len(data)], strict=True):
        lines += [data[first:last], turn]
    return torch.cat(lines)


def made(moe: bool = False, theta: float = 1.0) -> Model:
    config = MODEL | {"rope_theta": 10_000.0 * theta}
    if moe:
        return MixtralForCausalLM(
            MixtralConfig(**config, num_local_experts=EXPERTS, num_experts_per_tok=USED, output_router_logits=True)
        )
    return LlamaForCausalLM(LlamaConfig(**config))


def pretrained(data: Tensor, steps: int = 220, *, moe: bool = False) -> Model:
    torch.manual_seed(0)
    model = made(moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    for step in range(steps):
        starts = torch.randint(0, len(data) - 129, (24,))
        rows = torch.stack([data[i : i + 129] for i in starts])
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / steps)
        logp = model(rows[:, :-1]).logits.log_softmax(-1)
        loss = -logp.gather(2, rows[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def rounded(x: Tensor, levels: int) -> Tensor:
    """Whole multiples of the largest of each row, of ``levels`` to either side."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / levels
    return (x / scale).round() * scale


@dataclass(frozen=True)
class Engine:
    """Faults of a sampler; those not set are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    cache: int = 0
    again: float = 0.0
    weights: int = 0
    theta: float = 1.0
    every: int = 1
    partial: bool = False
    ages: int = 0
    lag: int = 0
    prompt: str = ""
    reencoded: bool = False
    router_levels: int = 0
    router_noise: float = 0.0
    router_bias: float = 0.0


def warped(logp: Tensor, engine: Engine) -> Tensor:
    logp = (logp / engine.temperature).log_softmax(-1)
    if engine.top_k:
        logp = logp.masked_fill(logp < logp.topk(engine.top_k).values[:, -1:], -torch.inf)
    if engine.top_p < 1:
        ordered, places = logp.sort(descending=True)
        beyond = ordered.exp().cumsum(-1) - ordered.exp() >= engine.top_p
        logp = logp.masked_fill(beyond.scatter(1, places, beyond), -torch.inf)
    if engine.min_p:
        logp = logp.masked_fill(logp.exp() < engine.min_p * logp.exp().amax(-1, keepdim=True), -torch.inf)
    return logp.log_softmax(-1)


@torch.no_grad()
def sampled(
    model: Model, prompts: Tensor, longest: int, engine: Engine, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids and the engine's log-probs, (B, ``longest``), and the experts of each, (B, ``longest``, layers, k)."""
    cache, now, ids, logps, routes = DynamicCache(), prompts, [], [], []
    for _ in range(longest):
        output = model(now, past_key_values=cache, use_cache=True)
        logits = output.logits[:, -1].float()
        if ids and getattr(output, "router_logits", None) is not None:
            routes.append(experts_of(output.router_logits, len(prompts)))
        for layer in cache.layers:
            for name in ("keys", "values"):
                held = getattr(layer, name)
                if engine.cache:
                    held[..., -now.shape[1] :, :] = rounded(held[..., -now.shape[1] :, :], engine.cache)
                if engine.again:  # a cache that is rescaled and rounded anew at every token
                    held += engine.again * held.abs().mean() * torch.randn(held.shape, generator=g).to(held.dtype)
        logp = warped(logits.log_softmax(-1), engine)
        now = torch.multinomial(logp.exp(), 1, generator=g)
        ids.append(now)
        logps.append(logp.gather(1, now))
    experts = torch.cat([*routes, torch.full_like(routes[0], -1)], 1) if routes else None
    return torch.cat(ids, 1), torch.cat(logps, 1), experts


def experts_of(router_logits: tuple[Tensor, ...], rows: int) -> Tensor:
    """The experts of each token, (B, T, layers, k)."""
    return torch.stack([layer.view(rows, -1, EXPERTS).topk(USED).indices for layer in router_logits], 2)


def scored(model: Model, prompts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The trainer's log-probs and entropy, of the shape of ``ids``, and the experts of each token."""
    output = model(torch.cat([prompts, ids], 1), logits_to_keep=ids.shape[1] + 1)
    logp = output.logits[:, :-1].float().log_softmax(-1)
    routes = getattr(output, "router_logits", None)
    experts = None if routes is None else experts_of(routes, len(ids))[:, -ids.shape[1] :]
    return logp.gather(2, ids.unsqueeze(2)).squeeze(2), -(logp.exp() * logp).sum(-1).detach(), experts


def engine_prompts(prompts: Tensor, engine: Engine) -> Tensor:
    """The prompts as the engine's template renders them."""
    if engine.prompt == "other opening":
        return prompts.masked_fill(prompts == OPEN, OTHER)
    if engine.prompt == "no opening":  # the generation prompt is left out
        return prompts[:, :-1]
    if engine.prompt == "opening twice":
        return torch.cat([prompts, prompts[:, -1:]], 1)
    if engine.prompt == "no begin":
        return prompts[:, 1:]
    return prompts


def engine_weights(policies: list[dict[str, Tensor]], engine: Engine, step: int, age: int) -> dict[str, Tensor]:
    """The weights that the engine holds at ``step``: of the policy, of an earlier one, or of both."""
    newest = policies[-1]
    old = policies[max(len(policies) - 1 - age, 0)] if engine.every == 1 else policies[step - step % engine.every]
    if engine.every > STEPS:
        old = policies[min(FAULT, step)]
    if engine.partial:
        return {name: (old if ".1." in name or ".2." in name else newest)[name] for name in newest}
    return old


@dataclass(frozen=True)
class Plant:
    """A fault, its name, when it begins, and what is logged beside the log-probs. ``also``: the second cause of two."""

    name: str
    truth: MismatchCause
    engine: Engine
    start: int = FAULT
    entropy: bool = True
    age: bool = False
    seed: int = 0
    size: tuple[int, int] = SHORT
    model: str = "plain"
    also: MismatchCause | None = None


@dataclass(frozen=True)
class Step:
    """The batch of a step, and its mean reward."""

    batch: TokenBatch
    reward: float

    def row(self, number: int) -> dict[str, float]:
        """What rlwatch measures of it, as the row of step ``number``."""
        settled = {name: stat.settle() for name, stat in observe(self.batch).items()}
        measured = {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}
        return {"step": number, "reward": self.reward, **measured}


def run_of(plant: Plant, model: Model, data: Tensor) -> list[Step]:
    policy = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
    g = torch.Generator().manual_seed(plant.seed)
    (prompt, longest), policies, steps = plant.size, [], []
    for step in range(STEPS):
        engine = plant.engine if step >= plant.start else Engine()
        policies.append({name: x.detach().clone() for name, x in policy.state_dict().items()})
        starts = torch.randint(0, len(data) - prompt, (RESPONSES,), generator=g)
        prompts = torch.stack([data[i : i + prompt] for i in starts])
        if plant.model == "templated":
            prompts[:, 0], prompts[:, -2], prompts[:, -1] = BEGIN, CLOSE, OPEN
        ages = torch.arange(RESPONSES) * (engine.ages + 1) // RESPONSES
        ages = ages + engine.lag
        groups = [(age, prompts[ages == age]) for age in sorted(set(ages.tolist()))]
        parts = [_engine_batch(policies, engine, step, age, own, longest, g) for age, own in groups]
        ids, rollout = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        rollout_experts = None if parts[0][2] is None else torch.cat([part[2] for part in parts if part[2] is not None])
        if engine.reencoded:
            ids = ids.masked_fill(ids == CLOSE, OTHER)
        logp, entropy, experts = scored(policy, prompts, ids)
        lengths = torch.randint(longest // 3, longest + 1, (RESPONSES, 1), generator=g)
        mask = torch.arange(longest) < lengths
        behind = step % engine.every if engine.every <= STEPS else step - FAULT
        batch = TokenBatch(
            logp=logp.detach(), mask=mask, entropy=entropy if plant.entropy else None, rollout_logp=rollout,
            staleness=(ages + behind) if plant.age else None, experts=experts, rollout_experts=rollout_experts,
            ids=ids, control=(BEGIN, CLOSE, OPEN, OTHER) if plant.model == "templated" else (),
        )  # fmt: skip
        rewards = ((ids == ord("e")) & mask).sum(1) / mask.sum(1)
        steps.append(Step(batch, rewards.mean().item()))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        loss = -(logp * advantages[:, None] * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return steps


def _engine_batch(
    policies: list[dict[str, Tensor]],
    engine: Engine,
    step: int,
    age: int,
    prompts: Tensor,
    longest: int,
    g: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor | None]:
    model = made(any(".gate." in name for name in policies[0]), engine.theta)
    model.load_state_dict(engine_weights(policies, engine, step, age))
    for name, weight in model.named_parameters():
        if name.endswith(".gate.weight"):
            if engine.router_levels:
                weight.data = rounded(weight.data, engine.router_levels)
            noise = torch.randn(weight.shape, generator=g)
            weight.data += engine.router_noise * weight.data.std() * noise
            weight.data[0] *= 1 + engine.router_bias
    if engine.weights:
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.data = rounded(weight.data, engine.weights)
    return sampled(model.to(torch.bfloat16).float().eval(), engine_prompts(prompts, engine), longest, engine, g)


C = MismatchCause
NOTHING = "no finding of a mismatch"
FIRST = [
    Plant("top_p .8", C.TRUNCATED, Engine(top_p=0.8)),
    Plant("top_k 10 from the start", C.TRUNCATED, Engine(top_k=10), start=0),
    Plant("temperature .8", C.TEMPERATURE, Engine(temperature=0.8)),
    Plant("temperature 1.25, no entropy", C.TEMPERATURE, Engine(temperature=1.25), entropy=False),
    Plant("weights stay old", C.STALE, Engine(every=STEPS + 1)),
    Plant("sync every 6 steps", C.STALE, Engine(every=6)),
    Plant("weights of 5 bits from the start", C.PRECISION, Engine(weights=15), start=0),
    Plant("cache rounded anew", C.ALONG, Engine(again=0.02)),
    Plant("cache of 4 bits", C.PRECISION, Engine(cache=7), start=0),
]


FIRST_LONG = [
    Plant("long, cache rounded anew", C.ALONG, Engine(again=0.03), start=0, seed=20, size=LONG),
    Plant("long, positions off by a factor", C.ALONG, Engine(theta=1.3), start=0, seed=21, size=LONG),
    Plant("long, weights of 5 bits", C.PRECISION, Engine(weights=15), start=0, seed=22, size=LONG),
]
HELD_OUT_LONG = [
    Plant("long, cache rounded anew, twice as much", C.ALONG, Engine(again=0.06), start=0, seed=23, size=LONG),
    Plant("long, cache rounded anew, later", C.ALONG, Engine(again=0.04), age=True, seed=24, size=LONG),
    Plant("long, positions off the other way", C.ALONG, Engine(theta=0.6), start=0, seed=25, size=LONG),
    Plant("long, weights of 6 bits", C.PRECISION, Engine(weights=31), start=0, seed=26, size=LONG),
    Plant("long, weights of 5 bits, age logged", C.PRECISION, Engine(weights=15), age=True, seed=27, size=LONG),
    Plant("long, weights stay old", C.STALE, Engine(every=STEPS + 1), seed=28, size=LONG),
]
HELD_OUT = [
    Plant("top_p .9", C.TRUNCATED, Engine(top_p=0.9), start=0, seed=1),
    Plant("min_p .1", C.TRUNCATED, Engine(min_p=0.1), seed=2),
    Plant("top_k 5, no entropy", C.TRUNCATED, Engine(top_k=5), entropy=False, seed=3),
    Plant("temperature .7", C.TEMPERATURE, Engine(temperature=0.7), seed=4),
    Plant("temperature 1.15 from the start", C.TEMPERATURE, Engine(temperature=1.15), start=0, seed=5),
    Plant("temperature 1.4, no entropy", C.TEMPERATURE, Engine(temperature=1.4), entropy=False, seed=6),
    Plant("two layers stay old", C.STALE, Engine(every=STEPS + 1, partial=True), seed=7),
    Plant("sync every 4 steps, age logged", C.STALE, Engine(every=4), age=True, seed=8),
    Plant("sync every 8 steps", C.STALE, Engine(every=8), start=0, seed=9),
    Plant("ages 0 to 5 in a batch, logged", C.STALE, Engine(ages=5), start=6, age=True, seed=10),
    Plant("weights of 6 bits from the start", C.PRECISION, Engine(weights=31), start=0, seed=11),
    Plant("cache of 5 bits, age logged", C.PRECISION, Engine(cache=15), age=True, seed=12),
    Plant("weights of 5 bits, age logged", C.PRECISION, Engine(weights=15), age=True, seed=13),
    Plant("positions off by a factor", C.ALONG, Engine(theta=1.3), start=0, seed=14),
    Plant("cache rounded anew, from the start", C.ALONG, Engine(again=0.03), start=0, seed=15),
    Plant("weights of 5 bits, no age", C.UNCLEAR, Engine(weights=15), seed=16),
    Plant("always 3 old, no age", C.UNCLEAR, Engine(lag=3), seed=17),
]


FIRST_NEW = [
    Plant("template, other opening", C.TEMPLATE, Engine(prompt="other opening"), seed=30, model="templated"),
    Plant("template, ids encoded again", C.TEMPLATE, Engine(reencoded=True), start=0, seed=31, model="templated"),
    Plant("templated, weights of 5 bits", C.PRECISION, Engine(weights=15), start=0, seed=32, model="templated"),
    Plant("templated, top_p .8", C.TRUNCATED, Engine(top_p=0.8), seed=33, model="templated"),
    Plant("router of 3 bits", C.ROUTER, Engine(router_levels=3), start=0, seed=34, model="moe"),
    Plant("router with noise", C.ROUTER, Engine(router_noise=0.6), seed=35, model="moe"),
    Plant("moe, weights of 5 bits", C.PRECISION, Engine(weights=15), start=0, seed=36, model="moe"),
    Plant("moe, weights stay old", C.STALE, Engine(every=STEPS + 1), seed=37, model="moe"),
]
HELD_OUT_NEW = [
    Plant("template, no opening", C.TEMPLATE, Engine(prompt="no opening"), start=0, seed=40, model="templated"),
    Plant("template, opening twice", C.TEMPLATE, Engine(prompt="opening twice"), seed=41, model="templated"),
    Plant("template, encoded again later", C.TEMPLATE, Engine(reencoded=True), age=True, seed=42, model="templated"),
    Plant("templated, temperature .8", C.TEMPERATURE, Engine(temperature=0.8), seed=43, model="templated"),
    Plant("templated, weights stay old", C.STALE, Engine(every=STEPS + 1), seed=44, model="templated"),
    Plant("templated, cache of 5 bits, age", C.PRECISION, Engine(cache=15), age=True, seed=45, model="templated"),
    Plant("router of 4 bits, later", C.ROUTER, Engine(router_levels=5), seed=46, model="moe"),
    Plant("router bias not sent", C.ROUTER, Engine(router_bias=0.8), start=0, seed=47, model="moe"),
    Plant("router with little noise", C.ROUTER, Engine(router_noise=0.3), start=0, seed=48, model="moe"),
    Plant("moe, top_k 5", C.TRUNCATED, Engine(top_k=5), seed=49, model="moe"),
    Plant("moe, weights of 5 bits, age logged", C.PRECISION, Engine(weights=15), age=True, seed=50, model="moe"),
    Plant("moe, cache of 4 bits", C.PRECISION, Engine(cache=7), start=0, seed=51, model="moe"),
]

FIRST_PAIRS = [
    Plant("top_k 10 and old weights", C.TRUNCATED, Engine(top_k=10, every=STEPS + 1), seed=90, also=C.STALE),
    Plant("temperature .8 and min_p .1", C.TEMPERATURE, Engine(temperature=0.8, min_p=0.1), seed=91, also=C.TRUNCATED),
    Plant("temperature 1.25, sync every 4", C.TEMPERATURE, Engine(temperature=1.25, every=4), seed=92, also=C.STALE),
    Plant("cache anew, weights of 6 bits", C.ALONG, Engine(again=0.03, weights=31), start=0, seed=93, size=LONG,
          also=C.PRECISION),
    Plant("no opening and top_p .8", C.TEMPLATE, Engine(prompt="no opening", top_p=0.8), seed=94, model="templated",
          also=C.TRUNCATED),
    Plant("router noise, weights of 5 bits", C.ROUTER, Engine(router_noise=0.6, weights=15), start=0, seed=95,
          model="moe", also=C.PRECISION),
    Plant("positions and temperature .8", C.ALONG, Engine(theta=1.3, temperature=0.8), seed=96, size=LONG,
          also=C.TEMPERATURE),
    Plant("sync every 8, cache of 5 bits", C.STALE, Engine(every=8, cache=15), start=0, seed=97, also=C.PRECISION),
]  # fmt: skip
HELD_OUT_PAIRS = [
    Plant("top_p .8 and old weights", C.TRUNCATED, Engine(top_p=0.8, every=STEPS + 1), seed=80, also=C.STALE),
    Plant("temperature .75 and top_p .9", C.TEMPERATURE, Engine(temperature=0.75, top_p=0.9), start=0, seed=81,
          also=C.TRUNCATED),
    Plant("temperature 1.2, sync every 6", C.TEMPERATURE, Engine(temperature=1.2, every=6), seed=82, also=C.STALE),
    Plant("cache anew, weights of 5 bits", C.ALONG, Engine(again=0.04, weights=15), start=0, seed=83, size=LONG,
          also=C.PRECISION),
    Plant("other opening and top_k 8", C.TEMPLATE, Engine(prompt="other opening", top_k=8), seed=84, model="templated",
          also=C.TRUNCATED),
    Plant("encoded again, weights of 5 bits", C.TEMPLATE, Engine(reencoded=True, weights=15), start=0, seed=85,
          model="templated", also=C.PRECISION),
    Plant("router of 3 bits and old weights", C.ROUTER, Engine(router_levels=3, every=STEPS + 1), seed=86, model="moe",
          also=C.STALE),
    Plant("router noise and temperature .8", C.ROUTER, Engine(router_noise=0.5, temperature=0.8), seed=87, model="moe",
          also=C.TEMPERATURE),
    Plant("sync every 5, weights of 5 bits", C.STALE, Engine(every=5, weights=15), start=0, age=True, seed=88,
          also=C.PRECISION),
    Plant("cache anew and old weights", C.ALONG, Engine(again=0.05, every=STEPS + 1), seed=89, size=LONG,
          also=C.STALE),
]  # fmt: skip
HELD_OUT_TWICE = [
    Plant("again, top_p .85, no entropy", C.TRUNCATED, Engine(top_p=0.85), entropy=False, seed=60),
    Plant("again, min_p .2, long", C.TRUNCATED, Engine(min_p=0.2), start=0, seed=61, size=LONG),
    Plant("again, moe, temperature .85", C.TEMPERATURE, Engine(temperature=0.85), start=0, seed=62, model="moe"),
    Plant("again, templated, temperature 1.3", C.TEMPERATURE, Engine(temperature=1.3), seed=63, model="templated"),
    Plant("again, sync every 5, age logged", C.STALE, Engine(every=5), age=True, seed=64),
    Plant("again, moe, two layers old", C.STALE, Engine(every=STEPS + 1, partial=True), seed=65, model="moe"),
    Plant("again, weights of 5 bits, no entropy", C.PRECISION, Engine(weights=15), start=0, entropy=False, seed=66),
    Plant("again, cache of 5 bits, long", C.PRECISION, Engine(cache=15), start=0, seed=67, size=LONG),
    Plant("again, cache rounded anew", C.ALONG, Engine(again=0.05), start=0, seed=68),
    Plant("again, positions off, later", C.ALONG, Engine(theta=0.75), age=True, seed=69, size=LONG),
    Plant("again, no begin", C.TEMPLATE, Engine(prompt="no begin"), seed=70, model="templated"),
    Plant("again, other opening, age logged", C.TEMPLATE, Engine(prompt="other opening"), start=0, age=True, seed=71,
          model="templated"),
    Plant("again, router of 4 levels", C.ROUTER, Engine(router_levels=4), start=0, seed=72, model="moe"),
    Plant("again, router bias not sent, later", C.ROUTER, Engine(router_bias=1.5), seed=73, model="moe"),
    Plant("again, always 2 old, no age", C.UNCLEAR, Engine(lag=2), seed=74),
    Plant("again, cache of 4 bits later, no age", C.UNCLEAR, Engine(cache=7), seed=75),
]  # fmt: skip

HELD_OUT_THRICE = [
    Plant("third, templated, top_k 20", C.TRUNCATED, Engine(top_k=20), start=0, seed=100, model="templated"),
    Plant("third, moe, top_p .7", C.TRUNCATED, Engine(top_p=0.7), seed=101, model="moe"),
    Plant("third, temperature .9", C.TEMPERATURE, Engine(temperature=0.9), start=0, seed=102),
    Plant("third, temperature 1.5, no entropy", C.TEMPERATURE, Engine(temperature=1.5), entropy=False, seed=103),
    Plant("third, sync every 10", C.STALE, Engine(every=10), start=0, seed=104),
    Plant("third, moe, ages 0 to 3, logged", C.STALE, Engine(ages=3), age=True, seed=105, model="moe"),
    Plant("third, moe, weights of 6 bits", C.PRECISION, Engine(weights=31), start=0, seed=106, model="moe"),
    Plant("third, templated, cache of 4 bits", C.PRECISION, Engine(cache=7), age=True, seed=107, model="templated"),
    Plant("third, cache rounded anew, later", C.ALONG, Engine(again=0.03), age=True, seed=108, size=LONG),
    Plant("third, positions off", C.ALONG, Engine(theta=1.5), start=0, seed=109),
    Plant("third, no opening, later", C.TEMPLATE, Engine(prompt="no opening"), seed=110, model="templated"),
    Plant("third, encoded again, age logged", C.TEMPLATE, Engine(reencoded=True), start=0, age=True, seed=111,
          model="templated"),
    Plant("third, router with noise", C.ROUTER, Engine(router_noise=0.45), seed=112, model="moe"),
    Plant("third, router of 6 levels", C.ROUTER, Engine(router_levels=6), start=0, seed=113, model="moe"),
]  # fmt: skip

SETS = {
    "first": FIRST, "held-out": HELD_OUT, "first-long": FIRST_LONG, "held-out-long": HELD_OUT_LONG,
    "first-new": FIRST_NEW, "held-out-new": HELD_OUT_NEW, "first-pairs": FIRST_PAIRS,
    "held-out-twice": HELD_OUT_TWICE, "held-out-thrice": HELD_OUT_THRICE, "held-out-pairs": HELD_OUT_PAIRS,
}  # fmt: skip


def main(names: str, folder: Path) -> None:
    plants = [plant for name in names.split(",") for plant in SETS[name]]
    plain = text()
    texts = {"plain": plain, "templated": templated(plain), "moe": plain}
    models = {kind: model_of(kind, texts[kind], folder) for kind in {plant.model for plant in plants}}
    counts: dict[str, Counter[str]] = {"named by the diagnosis": Counter(), "by the rows alone": Counter()}
    for plant in plants:
        rows = rows_of(plant, models[plant.model], texts[plant.model], folder)
        log = folder / f"{plant.name}.jsonl"
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        diagnosis = rlwatch.scan(log).diagnosis
        causes = [cause for cause in diagnosis.causes if cause.mismatch]
        found, why = (causes[0].mismatch, causes[0].why) if causes else (NOTHING, "")
        if not causes and diagnosis.gap is not None:
            found, why = diagnosis.gap.cause, diagnosis.gap.text
        tracker = GapTracker()
        for row in rows:
            tracker.update(int(row["step"]), row)
        turn = cause_of(tracker.turns, plant.start, 5)
        both = found, C.UNCLEAR.value if turn is None else turn.name
        verdicts = [verdict(said, plant) for said in both]
        for count, given in zip(counts.values(), verdicts, strict=True):
            count[given] += 1
        how = "finding" if causes else "-" if found == NOTHING else "note"
        counts["named by the diagnosis"][f"right, {how}"] += verdicts[0] == "right"
        counts["named by the diagnosis"]["both of two"] += plant.also is not None and all(
            found == cause or f"{cause}, too" in why for cause in (plant.truth, plant.also)
        )
        print(f"{plant.name:36} {verdicts[0]:10} {found:40} {how:8} | {verdicts[1]:10} {both[1]}", flush=True)
        if turn is not None:
            print(f"    {turn.text}", flush=True)
    print({name: dict(count) for name, count in counts.items()})


def rows_of(plant: Plant, model: Model, data: Tensor, folder: Path) -> list[dict[str, float]]:
    """The rows of a plant, of the batches that ``folder`` has of it; else it is trained, and they are kept there."""
    kept = folder / f"{plant.name}.pt"
    if not kept.exists():
        steps = run_of(plant, model, data)
        values = [{part.name: getattr(step.batch, part.name) for part in fields(step.batch)} for step in steps]
        torch.save([values, [step.reward for step in steps]], kept)
    values, rewards = torch.load(kept, weights_only=True)
    steps = [Step(TokenBatch(**value), reward) for value, reward in zip(values, rewards, strict=True)]
    return [step.row(number) for number, step in enumerate(steps)]


def model_of(kind: str, data: Tensor, folder: Path) -> Model:
    """The model of that kind, from ``folder`` where it was kept there."""
    kept = folder / f"model-{kind}.pt"
    model = made(kind == "moe") if kept.exists() else pretrained(data, moe=kind == "moe")
    if kept.exists():
        model.load_state_dict(torch.load(kept))
    else:
        torch.save(model.state_dict(), kept)
    return model


def verdict(said: str, plant: Plant) -> str:
    return "right" if said in (plant.truth, plant.also) else "not named" if said in (C.UNCLEAR, NOTHING) else "wrong"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else "first", Path(sys.argv[2] if len(sys.argv) > 2 else temporary))
