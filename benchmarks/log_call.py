"""What a call costs the training thread: ``run.log`` of 60 scalars every 10 ms, beside its peers.

    pip install wandb trackio tensorboard && python benchmarks/log_call.py

Every run is a fresh process, tools shuffled inside each repetition; a cell is the median [min-max] over
repetitions. Tools that are not installed are left out, and named. Compare ratios inside one table. rlwatch's
modules are compiled to bytecode first, as pip does when it installs a package.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

TOOLS = ("rlwatch", "wandb", "trackio", "tensorboard", "summarywriter")
"""The last is torch's ``SummaryWriter``, which writes TensorBoard's files."""
NEEDS = {"summarywriter": ("tensorboard", "torch")}
COLUMNS = (
    "p50_us",
    "p99_us",
    "max_ms",
    "import_and_init_ms",
    "rss_mb",
    "cpu_s",
    "finish_s",
    "finish_cpu_s",
    "bytes_a_point",
)


def measure(tool: str, steps: int, pace_ms: float) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).with_name("one_tool.py")), tool]
    command += ["--steps", str(steps), "--pace-ms", str(pace_ms)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in out.splitlines() if line.startswith("RESULT "))
    result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return result


def cell(values: list[float]) -> str:
    digits = 0 if statistics.median(values) >= 10 else 2
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}-{max(values):,.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pace-ms", type=float, default=10.0)
    args = parser.parse_args()
    compileall.compile_dir(Path(__file__).resolve().parents[1] / "rlwatch", quiet=1)
    tools = [tool for tool in TOOLS if all(map(importlib.util.find_spec, NEEDS.get(tool, (tool,))))]
    results: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    rng = random.Random(0)
    for _ in range(args.reps):
        for tool in rng.sample(tools, len(tools)):
            results[tool].append(measure(tool, args.steps, args.pace_ms))
    print(f"60 scalars every {args.pace_ms:g} ms, {args.steps} steps, {args.reps} repetitions")
    print("| tool | " + " | ".join(COLUMNS) + " | p50 / rlwatch |")
    print("|---|" + "---|" * (len(COLUMNS) + 1))
    own = statistics.median(row["p50_us"] for row in results["rlwatch"])
    for tool in tools:
        cells = [cell([row[column] for row in results[tool]]) for column in COLUMNS]
        ratio = statistics.median(row["p50_us"] for row in results[tool]) / own
        print(f"| {tool} | " + " | ".join(cells) + f" | {ratio:.1f} |")
    if missing := sorted(set(TOOLS) - set(tools)):
        print(f"not installed, left out: {', '.join(missing)}")


if __name__ == "__main__":
    main()
