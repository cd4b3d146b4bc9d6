"""What localising costs as the batch grows: one pass with verification beside bisection, in one run.

    python benchmarks/localisation_cost.py [--quick] [--sizes 1024 4096 8192 16384 65536] [--limit 6] [--ways ...]

A tiny random Qwen2 (2 layers, 32 wide) and a step of responses of 256 tokens; the ratios of 1 or 20 culprits are 400
times too large. First the step is one micro-batch; then micro-batches of 8,192 tokens, which suits a bisection: once
it knows the micro-batch, it probes that one only. Times are seconds of one CPU thread, and in brackets multiples of
``fwd+bwd``, an ordinary pass of the whole step; ``work`` is the same multiple in floating point operations (products of
matrices and attention, as torch counts them), which no load of the machine changes.

Ways, by how the sequences of a micro-batch are run alone:

- ``trainer``: the forward is known, as TRL's;
- ``loop``: that of a loop of one's own, whose arguments are cut and whose result is compared;
- ``dropout``: the same with dropout of 0.1 in the attention, given out by row;
- ``whole``: a forward that cannot be cut.

What is measured:

- ``one pass``: two forwards of the step, and the verification of those candidates that are worth it;
- ``rows``: bisection that always follows the larger half, as many times as there are culprits, and runs only the
  sequences concerned;
- ``naive``: the published depth-first search, with the threshold that the step just exceeds, which runs micro-batches.

``found`` is the share of the planted culprits among as many tokens named; ``x`` is a search's work by that of one pass.
``naive`` may take ``--limit`` seconds: where it was ended by that, ``>`` is before its figures. Each is run twice, the
second time to count its work; the searches only in the first way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "gradloc"))
from localisation_recall import hits
from tiny_step import dapo, outputs, plant, policy, rollouts

from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.bisection import BisectionResult, follow_larger, search, single_token_level
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import RandomState, RecordedPasses
from rlwatch.gradloc.report import OwnGradient, TokenAt
from rlwatch.gradloc.verification import screen, union_candidates, verify_worthwhile
from rlwatch.integrations.torch.localise import LoopCall, LossPasses
from rlwatch.tensors.tokens import TokenBatch

LENGTH, FACTOR, MICRO_BATCH = 256, 400, 8192
WAYS = ("trainer", "loop", "dropout", "whole")


@dataclass(frozen=True)
class Measured:
    """Seconds and floating point operations, and what came of it."""

    seconds: float
    work: float
    result: Any

    @classmethod
    def of(cls, work: Callable[[], Any]) -> Measured:
        begin = time.process_time()
        result = work()
        seconds = time.process_time() - begin
        with FlopCounterMode(display=False) as counter:
            work()
        return cls(seconds, counter.get_total_flops(), result)


@dataclass(frozen=True)
class OnePass:
    """What was attributed and verified."""

    forwards: int
    own: dict[TokenAt, OwnGradient]

    def named(self, k: int) -> list[TokenAt]:
        return sorted(self.own, key=lambda at: -self.own[at].norm)[:k]


def one_pass(model: Any, passes: RecordedPasses, culprits: int) -> OnePass:
    found = attribute(model, passes, Direction.of(model))
    screens = [screen(one) for one in passes.all]
    wanted = union_candidates(passes, found.contributions, screens, max(8, culprits))
    return OnePass(found.forwards, verify_worthwhile(model, passes, wanted, found.contributions))


def take_step(model: Any, batch: Any, way: str, micro_batches: int) -> RecordedPasses:
    """Forward and backward of the step, its passes kept the way a loop's are."""
    model.zero_grad(set_to_none=True)
    passes, total = RecordedPasses(), batch.mask.sum()
    kept = LossPasses(passes)

    def forward(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = outputs(model, ids, batch.prompt)
        return out.logp, out.entropy

    for rows in torch.arange(len(batch.ids)).tensor_split(micro_batches):
        part, random = batch.rows(rows), RandomState.now()
        logp, entropy = forward(part.ids)
        kept.ran(LoopCall(forward, (part.ids,), {}), (logp, entropy), random)
        tokens = TokenBatch(logp.detach(), part.mask, ids=part.response, advantages=part.advantages, old_logp=part.old)
        kept.observed({"logp": logp, "entropy": entropy}, tokens)
        dapo(SimpleNamespace(logp=logp, entropy=entropy), part, total).backward()
    for one in passes.all:
        one.divides = {"trainer": True, "whole": False}.get(way)
    return passes


HEAD = [
    "way", "tokens", "micro-batches", "culprits", "fwd+bwd", "one pass", "work", "forwards + verified", "found",
    *("rows", "work", "probes", "found", "x"), *("naive", "work", "probes", "found", "x"),
]  # fmt: skip


def measured(way: str, tokens: int, micro_batches: int, culprits: int, limit: float) -> list[str]:
    model = policy(attention="sdpa", dropout=0.1 if way == "dropout" else 0.0)
    batch = rollouts(model, batch=tokens // LENGTH, length=LENGTH, varied=False)
    batch, places = plant(batch, "ratio", culprits, FACTOR)
    torch.manual_seed(0)
    ordinary = Measured.of(lambda: take_step(model, batch, way, micro_batches))
    passes = take_step(model, batch, way, micro_batches)
    rows = tokens // LENGTH // micro_batches
    planted = frozenset(TokenAt(0, row // rows, row % rows, position) for row, position in places)
    budget = max(4, int(limit / (ordinary.seconds / micro_batches)))

    def against(named: Sequence[TokenAt]) -> str:
        return f"{len(planted & set(named)) / culprits:.2f}"

    def time_of(one: Measured, cut: str = "") -> list[str]:
        share = one.seconds / ordinary.seconds
        return [f"{cut}{one.seconds:.2f} ({share:.1f})", f"{cut}{one.work / ordinary.work:.2f}"]

    mine = Measured.of(lambda: one_pass(model, passes, culprits))
    found = mine.result
    cells = [way, f"{tokens:,}", str(micro_batches), str(culprits), f"{ordinary.seconds:.2f}", *time_of(mine)]
    cells += [f"{found.forwards} + {len(found.own)}", against(found.named(culprits))]
    single = single_token_level(0.999 * Direction.of(model).norm, tokens, tokens)
    searches: list[tuple[bool, Callable[[], BisectionResult]]] = [
        (True, lambda: follow_larger(model, passes, culprits=culprits, budget=100 * budget)),
        (False, lambda: search(model, passes, normaliser=tokens, single_token_threshold=single, budget=budget)),
    ]
    for divides, work in searches if way == "trainer" else []:
        for one in passes.all:
            one.divides = divides
        one_search = Measured.of(work)
        result: BisectionResult = one_search.result
        cut = "> " if result.exhausted else ""
        cells += [*time_of(one_search, cut), str(result.probes), against(hits(result, culprits))]
        cells += [f"{cut}{one_search.work / mine.work:.1f} x"]
    return cells + [""] * (len(HEAD) - len(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 4,096 tokens")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 65536], help="tokens")
    parser.add_argument("--limit", type=float, default=6.0, help="seconds that the naive search may take")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["trainer", "loop", "dropout"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [size for size in options.sizes if size <= 4096 or not options.quick]
    measured("trainer", 1024, 1, 1, options.limit)  # what is loaded and compiled at first use
    one = [(size, 1) for size in sizes]
    several = [(size, size // MICRO_BATCH) for size in sizes if size > MICRO_BATCH]
    for steps in filter(None, (one, several)):
        print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
        for way, k, step in product(options.ways, (1, 20), steps):
            print("| " + " | ".join(measured(way, *step, k, options.limit)) + " |", flush=True)
        print()


if __name__ == "__main__":
    main()
