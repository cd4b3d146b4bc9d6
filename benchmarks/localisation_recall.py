"""Which of the true culprits localisation names: one pass with verification beside the published bisection, in one run.

    python benchmarks/localisation_recall.py [--quick | --full] [--seeds 3] [--length 32]

A tiny random Qwen2 (2 layers, 32 wide) and a step of 8 responses, about 200 tokens. Culprits are planted by multiplying
the advantage, the ratio, or the probability under the reference of k tokens. Truth is the own gradient of every token
by brute force, in float32; the true top k need not be the planted ones: ``planted`` is the share of them that are.
Recall is the share of the true top k among the k tokens named, mean over the seeds:

- ``one pass``: the k largest own gradients among the candidates that are verified: the first 2n by contribution and
  the first 2n by the screen, with n = k, but no less than the 8 culprits that ``locate`` names by default;
- ``c``, ``screen``: the top k of either list alone, not verified;
- ``larger half``: bisection that always follows the larger half, k times;
- ``triggered``: the published depth-first search, with the threshold that the step just exceeds, budget 128;
- ``usual x 2``: the same, with twice the level that the step has without culprits.

The searches are run of float32 only, unless ``--full`` asks for bfloat16 as well: it hardly changes what they find.

``probes`` are forwards and backwards of the whole batch. One pass takes 2 forwards of it (and 4 or more again where the
gap asks for it) and a forward and backward of one sequence for each candidate, or less.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "gradloc"))
from tiny_step import dapo, dapo_kl, outputs, plant, policy, rollouts, take_step

from rlwatch.gradloc.attribution import Attribution, attribute
from rlwatch.gradloc.bisection import BisectionResult, follow_larger, search, single_token_level
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.locate import LocateOptions
from rlwatch.gradloc.passes import RecordedPasses
from rlwatch.gradloc.report import OwnGradient, TokenAt
from rlwatch.gradloc.verification import screen, top_tokens, union_candidates, verify

SIZES = {"advantage": (20, 1000), "ratio": (20, 400), "kl": (50, 1000)}
"""Factors, moderate and extreme."""
TARGET = 0.95
BUDGET = 128
SEARCHES = ("larger half", "triggered", "usual x 2")


@dataclass(frozen=True)
class Step:
    """A step with culprits; its gradient is in the model, ``usual`` was its norm before they were planted."""

    model: Any
    batch: Any
    passes: RecordedPasses
    planted: Sequence[TokenAt]
    usual: float

    @property
    def tokens(self) -> int:
        return int(self.batch.mask.sum())


@dataclass(frozen=True)
class OnePass:
    """What one pass and the verification of its candidates gave."""

    attribution: Attribution
    screens: Sequence[torch.Tensor]
    own: dict[TokenAt, OwnGradient]
    seconds: float

    def named(self, k: int) -> list[TokenAt]:
        return sorted(self.own, key=lambda at: -self.own[at].norm)[:k]


def one_pass(model: Any, passes: RecordedPasses, k: int) -> OnePass:
    begin = time.process_time()
    found = attribute(model, passes, Direction.of(model))
    screens = [screen(one) for one in passes.all]
    wanted = union_candidates(passes, found.contributions, screens, max(k, LocateOptions().candidates))
    own = verify(model, passes, wanted)
    return OnePass(found, screens, own, time.process_time() - begin)


def a_step(kind: str, k: int, size: float, dtype: torch.dtype, seed: int, length: int) -> Step:
    model = policy(seed=seed).to(dtype)
    loss = dapo_kl if kind == "kl" else dapo
    batch = rollouts(model, length=length, seed=seed + 1)
    take_step(model, batch, loss)
    usual = Direction.of(model).norm
    batch, planted = plant(batch, kind, k, size, seed=seed + 2)
    passes = take_step(model, batch, loss)
    return Step(model, batch, passes, [TokenAt(0, 0, *at) for at in planted], usual)


def true_norms(step: Step) -> dict[TokenAt, float]:
    """Brute force: the gradient of every token, in float32, all tokens of a sequence at once."""
    exact, one, found = copy.deepcopy(step.model).float(), step.passes.all[0], {}
    for row, mask in enumerate(step.batch.mask):
        logp = outputs(exact, step.batch.ids[[row]], step.batch.prompt).logp[0]
        at = mask.nonzero()[:, 0]
        each = torch.nn.functional.one_hot(at, len(mask)).to(logp.dtype)
        grads = torch.autograd.grad(logp, list(exact.parameters()), each, is_grads_batched=True)
        norms = torch.cat([g.flatten(1) for g in grads], 1).norm(dim=1) * one.coefficient()[row, at].abs()
        found.update({TokenAt(0, 0, row, t): norm for t, norm in zip(at.tolist(), norms.tolist(), strict=True)})
    return found


def searched(step: Step, k: int) -> dict[str, BisectionResult]:
    norm = Direction.of(step.model).norm
    n = step.tokens
    levels = {"triggered": 0.999 * norm, "usual x 2": 2 * step.usual}
    found = {"larger half": follow_larger(step.model, step.passes, culprits=k, budget=100_000)}
    for name, level in levels.items():
        single = single_token_level(level, n, n)
        found[name] = search(step.model, step.passes, normaliser=n, single_token_threshold=single, budget=BUDGET)
    return found


def hits(result: BisectionResult, k: int) -> list[TokenAt]:
    return [hit.at for hit in sorted(result.hits, key=lambda hit: -hit.norm)[:k]]


def trial(step: Step, k: int, *, searches: bool) -> dict[str, float]:
    """Recalls by method, and what else the table has, of one step."""
    norms = true_norms(step)
    truth = set(sorted(norms, key=lambda at: -norms[at])[:k])

    def recall(named: Iterable[TokenAt]) -> float:
        return len(truth & set(named)) / k

    found = one_pass(step.model, step.passes, k)
    row = {
        "planted": recall(step.planted),
        "one pass": recall(found.named(k)),
        "c": recall(top_tokens(step.passes, found.attribution.contributions, k)),
        "screen": recall(top_tokens(step.passes, found.screens, k)),
        "gap": abs(found.attribution.gap),
        "forwards": found.attribution.forwards,
        "verified": len(found.own),
    }
    for name, result in searched(step, k).items() if searches else ():
        row |= {name: recall(hits(result, k)), f"{name} probes": result.probes}
    return row


def line(what: Sequence[str], trials: Sequence[dict[str, float]]) -> list[str]:
    """Means of the trials, as the table has them."""
    means = {name: mean(row[name] for row in trials) for name in trials[0]}
    bisection = [f"{means[name]:.2f} ({means[f'{name} probes']:.0f})" if name in means else "" for name in SEARCHES]
    recalls = [f"{means[name]:.2f}" for name in ("planted", "one pass", "c", "screen")]
    worst = max(row["gap"] for row in trials)
    return [*what, *recalls, *bisection, f"{means['forwards']:.0f} + {means['verified']:.0f}", f"{worst:.0e}"]


HEAD = [
    "culprits", "factor", "type", "k", "planted", "one pass", "c", "screen", *(f"{name} (probes)" for name in SEARCHES),
    "forwards + verified", "worst gap",
]  # fmt: skip


def table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def summary(every: Sequence[tuple[list[str], list[dict[str, float]]]]) -> None:
    print(f"\nRecall of the true top k: mean over the rows, lowest row, rows below {TARGET}")
    for name in ("one pass", "c", "screen", *SEARCHES):
        means = [mean(row[name] for row in trials) for _, trials in every if name in trials[0]]
        print(f"  {name:12} {mean(means):.3f}  {min(means):.2f}  {sum(m < TARGET for m in means)} of {len(means)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 1 and 5 culprits")
    parser.add_argument("--full", action="store_true", help="search in bfloat16 too")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=32, help="tokens of a response at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, every = time.perf_counter(), []
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for (kind, sizes), strength, k, (name, dtype) in itertools.product(
        SIZES.items(), (0, 1), (1, 5) if options.quick else (1, 5, 20), dtypes.items()
    ):
        seeds = range(1 if options.quick else options.seeds)
        steps = (a_step(kind, k, sizes[strength], dtype, seed, options.length) for seed in seeds)
        trials = [trial(step, k, searches=options.full or name == "fp32") for step in steps]
        every.append(([kind, f"x {sizes[strength]}", name, str(k)], trials))
    table([HEAD, *(line(what, trials) for what, trials in every)])
    summary(every)
    print(f"\n{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
