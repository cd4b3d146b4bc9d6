"""What localising costs as the batch grows: one pass with verification beside the published bisection, in one run.

    python benchmarks/localisation_cost.py [--quick] [--sizes 1024 4096 8192 16384 65536] [--limit 6]

A tiny random Qwen2 (2 layers, 32 wide) and a step of responses of 256 tokens; the ratios of 1 or 20 culprits are 400
times too large. First the step is one micro-batch; then micro-batches of 8,192 tokens, which suits a bisection: once
it knows the micro-batch, it probes that one only. Times are seconds of one CPU thread, that is wall time where nothing
else runs, and in brackets multiples of ``fwd+bwd``, an ordinary pass of the whole step.

- ``one pass``: two forwards of the step, and the verification of its candidates: the first 16 by contribution and the
  first 16 by the screen for 1 culprit, 40 and 40 for 20;
- ``triggered``: the published depth-first search, with the threshold that the step just exceeds;
- ``larger half``: bisection that always follows the larger half, as many times as there are culprits.

``found`` is the share of the planted culprits among as many tokens named; ``x`` is a search's time by that of one pass.
A search may take ``--limit`` seconds: where it was ended by that, ``>`` is before its figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "gradloc"))
from localisation_recall import OnePass, hits, one_pass, table
from tiny_step import dapo, plant, policy, rollouts, take_step

from rlwatch.gradloc.bisection import BisectionResult, follow_larger, search, single_token_level
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import Passes
from rlwatch.gradloc.report import TokenAt

LENGTH, FACTOR, MICRO_BATCH = 256, 400, 8192


@dataclass(frozen=True)
class Row:
    """One step, and what each way of localising took and found."""

    tokens: int
    micro_batches: int
    culprits: int
    planted: frozenset[TokenAt]
    ordinary: float
    one_pass: OnePass
    searches: Sequence[tuple[BisectionResult, float]]

    def found(self, named: Sequence[TokenAt]) -> str:
        return f"{len(self.planted & set(named)) / self.culprits:.2f}"

    def cells(self) -> list[str]:
        mine, one = self.one_pass.seconds, self.one_pass
        cells = [
            f"{self.tokens:,}", str(self.micro_batches), str(self.culprits), f"{self.ordinary:.2f}",
            self.time(mine), f"{one.attribution.forwards} + {len(one.own)}", self.found(one.named(self.culprits)),
        ]  # fmt: skip
        for result, seconds in self.searches:
            cut = "> " if result.exhausted else ""
            cells += [
                cut + self.time(seconds), str(result.probes), self.found(hits(result, self.culprits)),
                f"{cut}{seconds / mine:.0f} x",
            ]  # fmt: skip
        return cells

    def time(self, seconds: float) -> str:
        return f"{seconds:.2f} ({seconds / self.ordinary:.1f})"


HEAD = [
    "tokens", "micro-batches", "culprits", "fwd+bwd", "one pass", "forwards + verified", "found",
    *("triggered", "probes", "found", "by one pass"), *("larger half", "probes", "found", "by one pass"),
]  # fmt: skip


def measured(tokens: int, micro_batches: int, culprits: int, limit: float) -> Row:
    model = policy(attention="sdpa")
    batch = rollouts(model, batch=tokens // LENGTH, length=LENGTH, varied=False)
    batch, places = plant(batch, "ratio", culprits, FACTOR)
    begin = time.process_time()
    passes = take_step(model, batch, dapo, micro_batches=micro_batches)
    ordinary = time.process_time() - begin
    rows = tokens // LENGTH // micro_batches
    planted = frozenset(TokenAt(0, row // rows, row % rows, position) for row, position in places)
    budget = max(4, int(limit / (ordinary / micro_batches)))
    found = one_pass(model, passes, culprits)
    searches = searched(model, passes, tokens, culprits, budget)
    return Row(tokens, micro_batches, culprits, planted, ordinary, found, searches)


def searched(
    model: Any, passes: Passes, tokens: int, culprits: int, budget: int
) -> list[tuple[BisectionResult, float]]:
    single = single_token_level(0.999 * Direction.of(model).norm, tokens, tokens)
    begin = time.process_time()
    published = search(model, passes, normaliser=tokens, single_token_threshold=single, budget=budget)
    between = time.process_time()
    larger = follow_larger(model, passes, culprits=culprits, budget=budget)
    return [(published, between - begin), (larger, time.process_time() - between)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 4,096 tokens")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 65536], help="tokens")
    parser.add_argument("--limit", type=float, default=6.0, help="seconds that a search may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [size for size in options.sizes if size <= 4096 or not options.quick]
    measured(1024, 1, 1, options.limit)  # what is loaded and compiled at first use
    one = [(size, 1) for size in sizes]
    several = [(size, size // MICRO_BATCH) for size in sizes if size > MICRO_BATCH]
    for steps in filter(None, (one, several)):
        rows = [measured(*step, culprits, options.limit) for culprits in (1, 20) for step in steps]
        table([HEAD, *(row.cells() for row in rows)])
        print()


if __name__ == "__main__":
    main()
