"""What watching costs on a GPU: a GRPO update of a model of real size, at every level, beside the same unwatched.

    python benchmarks/gpu_cost.py [--steps 8] [--reps 3] [--ways unwatched full] [--quick]

A random Qwen2 of half a billion parameters (24 layers, 151,936 entries) in bfloat16, 16 responses of 1,024 tokens in
micro-batches of 4, a reference, AdamW. Every row is trained anew and takes its turn in each repetition; the first steps
are not counted. ``step`` is the time of the device from one step to the next, ``hooks`` the CPU time of rlwatch on the
training thread, ``peak`` what the allocator held at most. ``logits`` has rlwatch take log-probs and entropy from the
logits, where the others are given both. Then what a step costs whose gradient is localised, and whether weights trained
watched are those of training unwatched. ``--quick`` is a tiny model, on the CPU where there is no GPU: it shows that
this runs, and no figure.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from watching_cost import cell, time_the_seam

import rlwatch
from rlwatch.integrations.localising import Localise
from rlwatch.records import CULPRITS

HALF_A_BILLION = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {**HALF_A_BILLION, "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2}
PROMPT, SPIKE_AT = 64, 26
WARM = 12  # detectors and the forecaster are loaded meanwhile
NAMED = ("microbatch", "sequence", "position")
WAYS: dict[str, dict[str, Any] | None] = {
    "unwatched": None,
    "scalars": {"level": "scalars", "localise": False},
    "tokens": {"level": "tokens", "localise": False},
    "gradients": {"level": "gradients", "localise": False},
    "full": {"level": "full", "localise": False},
    "full, logits": {"level": "full", "localise": False},
    "full, localising": {"level": "full", "localise": Localise(allowance_s=600.0)},
}


@dataclass
class Sizes:
    model: dict[str, Any]
    device: str
    responses: int = 16
    length: int = 1024
    micro_batches: int = 4
    attention: str = "sdpa"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


@dataclass
class Trained:
    seconds: list[float] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)
    peak: int = 0
    machine: dict[str, float] = field(default_factory=dict)
    named: list[Any] = field(default_factory=list)
    planted: dict[str, int] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def outputs(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies of the responses in single precision, a micro-batch's rows at a time; and the logits."""
    logits = model(ids, use_cache=False).logits[:, PROMPT - 1 : -1]
    rows = [row.float().log_softmax(-1) for row in logits]
    entropy = torch.stack([-(row.detach().exp() * row.detach()).sum(-1) for row in rows])
    logp = torch.stack([r.gather(-1, i[PROMPT:, None]).squeeze(-1) for r, i in zip(rows, ids, strict=True)])
    return logp, entropy, logits


def both(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    return outputs(model, ids)[:2]


def train(way: str, sizes: Sizes, spent: list[float], steps: int, *, spike_at: int = 0, keep: bool = False) -> Trained:
    """``steps`` steps, of which all but the first are measured."""
    options, found = WAYS[way], Trained()
    torch.manual_seed(0)
    with torch.device(sizes.device):
        policy = Qwen2ForCausalLM(Qwen2Config(**sizes.model, attn_implementation=sizes.attention)).to(sizes.dtype)
    policy.train()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    with tempfile.TemporaryDirectory() as store:
        watcher = None
        if options is not None:
            watcher = rlwatch.Watcher(
                policy, optimizer, ref_model=reference, clip=(0.2, 0.28), store=store, run_id="gpu", **options
            )
        for step in range(1, steps + 1):
            if step == WARM + 1 and sizes.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin, before = now(sizes.device), spent[0]
            take_step(step, way, sizes, policy, reference, optimizer, watcher, found, spike=step == spike_at)
            if step > WARM:
                found.seconds.append(now(sizes.device) - begin)
                found.hooks.append(spent[0] - before)
        if watcher is not None:
            watcher.finish()
            found.counters = dict(watcher.run.counters.snapshot())
            opened = rlwatch.open_store(store)
            metrics = {name: x for record in opened.records("gpu") for name, x in record.metrics.items()}
            found.machine = {name: x for name, x in metrics.items() if name.startswith("system/gpu/")}
            found.named = [
                dict(zip(NAMED, each, strict=True))
                for batch in opened.spikes("gpu", reason=CULPRITS)
                for each in zip(*(batch.columns[name].tolist() for name in NAMED), strict=True)
            ]
    if sizes.device == "cuda":
        found.peak = torch.cuda.max_memory_allocated()
    if keep:
        found.weights = [p.detach().cpu() for p in policy.parameters()]
    del policy, reference, optimizer, watcher
    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
    return found


def take_step(
    step: int, way: str, sizes: Sizes, policy: Any, reference: Any, optimizer: Any, watcher: Any, found: Trained,
    *, spike: bool,
) -> None:  # fmt: skip
    g = torch.Generator(sizes.device).manual_seed(step)
    on = {"device": sizes.device, "generator": g}
    rows, length = sizes.responses, sizes.length
    ids = torch.randint(0, sizes.model["vocab_size"], (rows, PROMPT + length), **on)
    lengths = torch.randint(length // 2, length + 1, (rows,), **on)
    mask = torch.arange(length, device=sizes.device) < lengths[:, None]
    rewards = torch.randint(0, 2, (rows,), **on).float()
    advantages = rewards - rewards.mean()
    if watcher is not None:
        watcher.obey()
        watcher.rollouts(rewards=rewards, groups=4, lengths=lengths)
    optimizer.zero_grad()
    loss = None
    for number, part in enumerate(torch.arange(rows, device=sizes.device).chunk(sizes.micro_batches)):
        with torch.no_grad():
            ref = both(reference, ids[part])[0]
        logits = None
        if watcher is not None and way == "full, localising":
            logp, entropy = watcher.forward(both, policy, ids[part])
        else:
            logp, entropy, logits = outputs(policy, ids[part])
        old = logp.detach().clone()
        if spike and number == 1:  # the rollout's own log-prob of one token was far below: its ratio is exp(7)
            old[1, 10] -= 7.0
            found.planted = {"microbatch": 1, "sequence": int(part[1]), "position": 10}
        ratio, gap = (logp - old).exp(), ref - logp
        each = gap.exp() - gap - 1 - ratio * advantages[part, None]
        loss = (each * mask[part]).sum() / (sizes.micro_batches * mask[part].sum())
        if watcher is not None:
            given = {"logits": logits} if way == "full, logits" else {"entropy": entropy}
            watcher.observe(
                logp=logp, ids=ids[part, PROMPT:], mask=mask[part], advantages=advantages[part], old_logp=old,
                ref_logp=ref, **given,
            )  # fmt: skip
        del logits
        loss.backward()
    if watcher is not None:
        watcher.gradients()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    if watcher is not None:
        watcher.step(step, loss=loss)


def levels(sizes: Sizes, spent: list[float], steps: int, reps: int, ways: Sequence[str]) -> None:
    rows: dict[str, list[Trained]] = {way: [] for way in ways}
    for _ in range(reps):
        for way in ways:
            rows[way].append(train(way, sizes, spent, WARM + steps))
    bare = [statistics.median(one.seconds) for one in rows["unwatched"]]
    print("| | step ms | of unwatched, % | hooks ms | peak GiB | counted |\n|---|---|---|---|---|---|")
    for way, measured in rows.items():
        seconds = [statistics.median(one.seconds) for one in measured]
        shares = cell([100 * (mine / own - 1) for mine, own in zip(seconds, bare, strict=True)])
        hooks = cell([1e3 * statistics.median(one.hooks) for one in measured])
        peak = max(one.peak for one in measured) / 2**30
        step, counted = cell([1e3 * s for s in seconds]), measured[-1].counters
        print(f"| {way} | {step} | {shares} | {hooks} | {peak:.2f} | {counted} |")


def localising(sizes: Sizes, spent: list[float]) -> None:
    """One token's ratio made 1,100 times too large, once the run's own level is known."""
    found = train("full, localising", sizes, spent, SPIKE_AT, spike_at=SPIKE_AT)
    usual = statistics.median(found.seconds[:-1])
    print(
        f"a localised step: {found.seconds[-1] / usual:.2f} x a step of {1e3 * usual:.0f} ms; peak "
        f"{found.peak / 2**30:.2f} GiB; planted: {found.planted}; named: {found.named[:3]}"
    )
    print(f"of the machine: {found.machine}")


def same_bits(sizes: Sizes, spent: list[float], steps: int) -> None:
    sizes = replace(sizes, attention="eager")  # the others' backward adds up in any order
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    first, again = (train("unwatched", sizes, spent, steps, keep=True).weights for _ in range(2))
    repeats = all(map(torch.equal, first, again))
    for way in ("full, logits", "full, localising"):
        same = all(map(torch.equal, first, train(way, sizes, spent, steps, keep=True).weights))
        said = "the same bits" if same else "OTHER BITS"
        print(f"weights after {steps} steps, {way}: {said} (unwatched twice: {repeats})")
    torch.use_deterministic_algorithms(mode=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="unwatched is among them")
    parser.add_argument("--quick", action="store_true", help="a tiny model, once")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        parser.error("there is no GPU here; --quick runs a tiny model on the CPU")
    sizes = Sizes(TINY, device, 8, 64) if options.quick else Sizes(HALF_A_BILLION, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, which says nothing"
    print(f"{name}, torch {torch.__version__}, {sizes.responses} x {sizes.length} tokens\n")
    spent = time_the_seam()
    parts: list[Callable[[], None]] = [
        lambda: localising(sizes, spent),
        lambda: same_bits(sizes, spent, 6),
        lambda: levels(sizes, spent, *(1, 1) if options.quick else (options.steps, options.reps), ways=options.ways),
    ]
    for part in parts:
        part()
        print(flush=True)


if __name__ == "__main__":
    main()
