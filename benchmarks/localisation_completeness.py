"""How far the contributions of all tokens miss the gradient norm: |sum c - G| / G, for the losses of the field.

    python benchmarks/localisation_completeness.py [--seeds 8] [--loss gspo]

Each seed is another random Qwen2 (2 to 4 layers, flat or sharp predictions), another batch of 8 responses, in 1 or 4
micro-batches, with a culprit in every other one: a token that is off-policy by e^4. Every loss is taken alone, with the
k3 estimate of the KL to a reference (beta 0.1), and with an entropy bonus (0.05). Contributions are computed by
forward-mode differentiation (jvp), by a central difference (fd), by two, extrapolated (Richardson), and as localisation
chooses (auto: fd, and the others in turn where its gap is beyond the limit), where training computes in float32, with
bfloat16 weights, and under bfloat16 autocast. In the last two the gradient itself is rounded, which differences, taken
in float32, show as a gap. Printed are the median and the largest of all seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "tests" / "gradloc"))  # the steps that the tests are made of
from tiny_step import LOSSES, Rollouts, per_token, plant, policy, rollouts, take_step

from rlwatch.gradloc import attribution
from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import Outputs
from rlwatch.gradloc.report import Method

Loss = Callable[[Outputs, Rollouts, Tensor], Tensor]
NAMES = ("grpo", "dapo", "gspo", "cispo", "rloo")
METHODS = {"jvp": [Method.JVP], "fd": [Method.FD], "richardson": [Method.RICHARDSON], "auto": attribution.METHODS}
PRECISIONS = ("float32", "bf16 weights", "bf16 autocast")
Column = tuple[str, str]


def with_kl(loss: Loss) -> Loss:
    def total(out: Outputs, batch: Rollouts, count: Tensor) -> Tensor:
        gap = batch.ref - out.logp
        return loss(out, batch, count) + 0.1 * per_token(gap.exp() - gap - 1, batch.mask, count)

    return total


def with_entropy(loss: Loss) -> Loss:
    def total(out: Outputs, batch: Rollouts, count: Tensor) -> Tensor:
        return loss(out, batch, count) - 0.05 * per_token(out.entropy, batch.mask, count)

    return total


def losses(only: str | None) -> dict[str, Loss]:
    named = {name: LOSSES[name] for name in NAMES if only in (None, name)}
    return {
        label: loss
        for name, plain in named.items()
        for label, loss in (
            (name, plain),
            (f"{name} + KL", with_kl(plain)),
            (f"{name} + entropy", with_entropy(plain)),
        )
    }


def limit(column: Column) -> float:
    precision, method = column
    return 1e-2 if precision != "float32" else 1e-6 if method == "jvp" else 1e-3


def gaps(loss: Loss, precision: str, seed: int) -> dict[str, float]:
    """|gap| of each way on one step."""
    model = policy(layers=2 + seed % 3, std=0.06 if seed % 2 else 0.15, seed=seed)
    batch = rollouts(model, seed=seed + 100)
    if seed % 4 < 2:
        batch, _ = plant(batch, "ratio", 1, math.exp(4), seed=seed)
    if precision == "bf16 weights":
        model = model.bfloat16()
    autocast = True if precision == "bf16 autocast" else None
    passes = take_step(model, batch, loss, micro_batches=1 + 3 * (seed % 2), autocast=autocast)
    direction = Direction.of(model)
    return {name: abs(attribute(model, passes, direction, methods=way).gap) for name, way in METHODS.items()}


def cells(values: dict[Column, list[float]]) -> str:
    def cell(column: Column, gaps: list[float]) -> str:
        return f"{statistics.median(gaps):.0e} {max(gaps):.1e}{'!' if max(gaps) > limit(column) else ''}"

    return "".join(f"{cell(column, gaps):<16}" for column, gaps in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--loss", choices=NAMES, help="this one only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    columns = [(precision, method) for precision in PRECISIONS for method in METHODS]
    print(f"|sum c - G| / G over {options.seeds} seeds: median and largest; ! = beyond the limit")
    print(" " * 16 + "".join(f"{precision:<{16 * len(METHODS)}}" for precision in PRECISIONS))
    print(f"{'loss':<16}" + "".join(f"{method:<16}" for _, method in columns))
    every: dict[Column, list[float]] = {column: [] for column in columns}
    for label, loss in losses(options.loss).items():
        row: dict[Column, list[float]] = {column: [] for column in columns}
        for precision, seed in product(PRECISIONS, range(options.seeds)):
            for method, gap in gaps(loss, precision, seed).items():
                row[precision, method].append(gap)
        print(f"{label:<16}{cells(row)}", flush=True)
        for column, found in row.items():
            every[column] += found
    print(f"{'all':<16}{cells(every)}")
    print(f"limits: float32 jvp 1e-6, others 1e-3; bf16 1e-2. {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
