"""CPU time of the signals of docs/leading-signals.md in a step of a real architecture, and their share of it.

    python benchmarks/leading_cost.py                        SmolLM2's 135 million parameters, 8 x 128 tokens (minutes)
    python benchmarks/leading_cost.py --rows 16 --tokens 256

The step is forward, backward and AdamW in four micro-batches, on one thread. It samples nothing, which would take the
largest part of a real one, so the share is that of the least favourable step. Weights are random: they change no time.
Each signal is measured alone, best of several, in CPU time of the thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from rlwatch.tensors.control_tokens import observe_control
from rlwatch.tensors.energy import observe_energy
from rlwatch.tensors.entropy import token_logp_entropy, token_logp_entropy_collision
from rlwatch.tensors.gap_shape import observe_gap_shape
from rlwatch.tensors.grad_agreement import GradientTrail
from rlwatch.tensors.importance import ratio_stats
from rlwatch.tensors.mergeable import Stats
from rlwatch.tensors.mismatch import observe_divergence, router_shift_stats
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.weight_gap import UpdateSample

SMOL = LlamaConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True,
)  # fmt: skip
MICRO_BATCHES, REPETITIONS = 4, 7
LAYERS, EXPERTS = 24, 8
"""Routed layers, and experts of a token: of a mixture of experts, whose step is not the one that is measured."""


def seconds(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Best CPU time of this thread."""
    best = float("inf")
    for _ in range(repetitions):
        begun = time.thread_time()
        work()
        best = min(best, time.thread_time() - begun)
    return best


class Operations(TorchDispatchMode):
    """Counts the operations of torch that compute, and so are a launch on a GPU; views are not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], object]) -> int:
    with Operations() as counted:
        work()
    return counted.count


def step_of(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    for part in ids.chunk(MICRO_BATCHES):
        logits = model(part).logits[:, :-1]
        logp = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="none")
        (-logp.mean() / MICRO_BATCHES).backward()
    optimizer.step()


def batch_of(ids: Tensor) -> TokenBatch:
    g = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(ids.shape, generator=g)
    experts = torch.randint(0, 64, (*ids.shape, LAYERS, EXPERTS), generator=g)
    return TokenBatch(
        logp=logp, mask=torch.rand(ids.shape, generator=g) > 0.1, entropy=torch.rand(ids.shape, generator=g), ids=ids,
        advantages=torch.randn(len(ids), 1, generator=g), old_logp=logp - 0.01 * torch.rand(ids.shape, generator=g),
        rollout_logp=logp + 0.01 * torch.randn(ids.shape, generator=g), collision=torch.rand(ids.shape, generator=g),
        control=(1, 2, 3, 4), tags=((3, 4),), experts=experts, old_experts=experts.roll(1, 0),
    )  # fmt: skip


def known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMOL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(0, SMOL.vocab_size, (args.rows, args.tokens))
    step_of(model, optimizer, ids)
    step = seconds(lambda: step_of(model, optimizer, ids), 2)
    batch, named = batch_of(ids), list(model.named_parameters())
    logits = torch.randn(args.tokens, SMOL.vocab_size).bfloat16()
    sample = UpdateSample.of(named)
    assert sample is not None

    def followed() -> Stats:
        trail = GradientTrail()
        for _ in range(MICRO_BATCHES + 1):
            trail.look(model.parameters())
        return trail.stats()

    experts, old_experts, old_logp = known(batch.experts), known(batch.old_experts), known(batch.old_logp)
    plain, squared = (
        args.rows * seconds(lambda of=of: of(logits, ids[0]))
        for of in (token_logp_entropy, token_logp_entropy_collision)
    )
    signals: dict[str, Callable[[], object]] = {
        "size of the update, by layer": lambda: (UpdateSample.of(named), sample.stats()),
        "agreement of micro-batches": followed,
        "control tokens": lambda: observe_control(batch),
        "energy": lambda: observe_energy(batch),
        "total variation, with all other ratios": lambda: ratio_stats(batch.logp, old_logp, batch.mask),
        "largest divergence of a response": lambda: observe_divergence(batch),
        "shape of the gap (template, routing, temperature, place)": lambda: observe_gap_shape(batch),
        f"shift of the router, {LAYERS} layers": lambda: router_shift_stats(experts, old_experts, batch.mask),
    }
    with torch.no_grad():
        times = {name: (seconds(work), operations(work)) for name, work in signals.items()}
    times["sum of squared probabilities, in the pass over the logits"] = max(0.0, squared - plain), 0
    print(f"{args.rows} x {args.tokens} tokens, {len(named)} tensors: a step takes {step:.1f} s of one CPU thread\n")
    print("| signal | ms a step | share of the step | launches |\n|---|---|---|---|")
    for name, (each, count) in times.items():
        print(f"| {name} | {1e3 * each:.2f} | {each / step:.3%} | {count or '-'} |")
    total, counted = (sum(column) for column in zip(*times.values(), strict=True))
    print(f"| together | {1e3 * total:.2f} | {total / step:.3%} | {counted} |")


if __name__ == "__main__":
    main()
