"""Causes of a mismatch, planted in the sampler of a small real model while it trains: how many are named rightly?

    python benchmarks/mismatch_causes.py first      the plants with which the thresholds were chosen
    python benchmarks/mismatch_causes.py held-out   those that were run once, after that

A second argument is a folder in which the model and the rows are kept, and found again.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

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
MODEL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def text() -> Tensor:
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return torch.tensor(list("\n\n".join(page.read_text() for page in pages).encode()))


def pretrained(data: Tensor, steps: int = 220) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
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
    model: LlamaForCausalLM, prompts: Tensor, longest: int, engine: Engine, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids and the engine's log-probs, (B, ``longest``)."""
    cache, now, ids, logps = DynamicCache(), prompts, [], []
    for _ in range(longest):
        logits = model(now, past_key_values=cache, use_cache=True).logits[:, -1].float()
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
    return torch.cat(ids, 1), torch.cat(logps, 1)


def scored(model: LlamaForCausalLM, prompts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The trainer's log-probs and entropy, of the shape of ``ids``."""
    logits = model(torch.cat([prompts, ids], 1), logits_to_keep=ids.shape[1] + 1).logits[:, :-1].float()
    logp = logits.log_softmax(-1)
    return logp.gather(2, ids.unsqueeze(2)).squeeze(2), -(logp.exp() * logp).sum(-1).detach()


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
    """A fault, its name, when it begins, and what is logged beside the log-probs."""

    name: str
    truth: MismatchCause
    engine: Engine
    start: int = FAULT
    entropy: bool = True
    age: bool = False
    seed: int = 0
    size: tuple[int, int] = SHORT


def run_of(plant: Plant, model: LlamaForCausalLM, data: Tensor) -> list[dict[str, float]]:
    policy = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
    g = torch.Generator().manual_seed(plant.seed)
    (prompt, longest), policies, rows = plant.size, [], []
    for step in range(STEPS):
        engine = plant.engine if step >= plant.start else Engine()
        policies.append({name: x.detach().clone() for name, x in policy.state_dict().items()})
        starts = torch.randint(0, len(data) - prompt, (RESPONSES,), generator=g)
        prompts = torch.stack([data[i : i + prompt] for i in starts])
        ages = torch.arange(RESPONSES) * (engine.ages + 1) // RESPONSES
        ages = ages + engine.lag
        groups = [(age, prompts[ages == age]) for age in sorted(set(ages.tolist()))]
        parts = [_engine_batch(policies, engine, step, age, own, longest, g) for age, own in groups]
        ids, rollout = (torch.cat(each) for each in zip(*parts, strict=True))
        logp, entropy = scored(policy, prompts, ids)
        lengths = torch.randint(longest // 3, longest + 1, (RESPONSES, 1), generator=g)
        mask = torch.arange(longest) < lengths
        behind = step % engine.every if engine.every <= STEPS else step - FAULT
        batch = TokenBatch(
            logp=logp.detach(), mask=mask, entropy=entropy if plant.entropy else None, rollout_logp=rollout,
            staleness=(ages + behind) if plant.age else None,
        )  # fmt: skip
        rewards = ((ids == ord("e")) & mask).sum(1) / mask.sum(1)
        settled = {name: stat.settle() for name, stat in observe(batch).items()}
        row = {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}
        rows.append({"step": step, "reward": rewards.mean().item(), **row})
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        loss = -(logp * advantages[:, None] * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return rows


def _engine_batch(
    policies: list[dict[str, Tensor]],
    engine: Engine,
    step: int,
    age: int,
    prompts: Tensor,
    longest: int,
    g: torch.Generator,
) -> tuple[Tensor, Tensor]:
    config = MODEL | {"rope_theta": 10_000.0 * engine.theta}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(engine_weights(policies, engine, step, age))
    if engine.weights:
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.data = rounded(weight.data, engine.weights)
    return sampled(model.to(torch.bfloat16).float().eval(), prompts, longest, engine, g)


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


SETS = {"first": FIRST, "held-out": HELD_OUT, "first-long": FIRST_LONG, "held-out-long": HELD_OUT_LONG}


def main(which: str, folder: Path) -> None:
    data, kept = text(), folder / "model.pt"
    if kept.exists():
        model = LlamaForCausalLM(LlamaConfig(**MODEL))
        model.load_state_dict(torch.load(kept))
    else:
        model = pretrained(data)
        torch.save(model.state_dict(), kept)
    counts: dict[str, Counter[str]] = {"named by the diagnosis": Counter(), "by the rows alone": Counter()}
    for plant in SETS[which]:
        log = folder / f"{plant.name}.jsonl"
        if not log.exists():
            log.write_text("".join(json.dumps(row) + "\n" for row in run_of(plant, model, data)))
        told = [cause for cause in rlwatch.scan(log).diagnosis.causes if cause.mismatch]
        tracker = GapTracker()
        for line in log.read_text().splitlines():
            row = json.loads(line)
            tracker.update(row["step"], row)
        turn = cause_of(tracker.turns, plant.start, 5)
        both = told[0].mismatch if told else NOTHING, C.UNCLEAR.value if turn is None else turn.name
        verdicts = [verdict(said, plant) for said in both]
        for count, given in zip(counts.values(), verdicts, strict=True):
            count[given] += 1
        print(f"{plant.name:34} {verdicts[0]:10} {both[0]:40} | {verdicts[1]:10} {both[1]}", flush=True)
        if turn is not None:
            print(f"    {turn.text}", flush=True)
    print({name: dict(count) for name, count in counts.items()})


def verdict(said: str, plant: Plant) -> str:
    return "right" if said == plant.truth else "not named" if said in (C.UNCLEAR, NOTHING) else "wrong"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else "first", Path(sys.argv[2] if len(sys.argv) > 2 else temporary))
