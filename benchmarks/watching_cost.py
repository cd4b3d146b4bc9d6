"""What watching a real training run costs: TRL GRPO on a tiny model, watched and not.

    python benchmarks/watching_cost.py

Fresh process for each run. CPU time is `thread_time`: of the writer thread, and of everything rlwatch does
on the training thread (all of it goes through one seam, which is timed here). Wall time of a step is given
for scale; on a shared machine its difference is noise. Memory is the peak resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROWS = ("wall_ms", "hooks_ms", "writer_ms", "peak_mb")


def time_the_seam() -> list[float]:
    """Make the seam add up its own thread time, nested calls counted once."""
    from rlwatch.integrations.seam import Seam

    spent, depth, inner = [0.0], [0], Seam.attempt

    def timed(self, tap, work, *args, **kwargs):  # type: ignore[no-untyped-def]
        depth[0] += 1
        begin = time.thread_time()
        try:
            return inner(self, tap, work, *args, **kwargs)
        finally:
            depth[0] -= 1
            if not depth[0]:
                spent[0] += time.thread_time() - begin

    Seam.attempt = timed  # type: ignore[method-assign]
    return spent


def train(mode: str, steps: int) -> dict[str, float]:
    from rlwatch.demo.recipe import Recipe
    from rlwatch.demo.training import build_trainer

    spent, run = time_the_seam(), None
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(Recipe(steps=steps), Path(directory))
        if mode != "unwatched":
            from rlwatch.integrations.trl import RLWatchCallback, watch

            store = Path(directory) / "runs"
            if mode == "watched":
                run = watch(trainer, store=store)
            else:
                trainer.add_callback(RLWatchCallback(store=store))  # its writer does less than the watched one's
        begin = time.perf_counter()
        trainer.train()
        wall = time.perf_counter() - begin
        writer = run._engine.writer.cpu_seconds if run is not None else 0.0
    return {
        "wall_ms": wall / steps * 1e3,
        "hooks_ms": spent[0] / steps * 1e3,
        "writer_ms": writer / steps * 1e3,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def import_ms(statement: str) -> float:
    """Best of 10 fresh interpreters."""

    def once(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begin

    bare = min(once("pass") for _ in range(10))
    return (min(once(statement) for _ in range(10)) - bare) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--only", choices=("unwatched", "scalars", "watched"))
    args = parser.parse_args()
    if args.only:
        print("RESULT " + json.dumps(train(args.only, args.steps)))
        return
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.reps):
        for mode in ("unwatched", "scalars", "watched"):
            command = [sys.executable, __file__, "--only", mode, "--steps", str(args.steps)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            line = next(line for line in out.splitlines() if line.startswith("RESULT "))
            results.setdefault(mode, []).append(json.loads(line.removeprefix("RESULT ")))
    print(f"TRL GRPO, tiny model, {args.steps} steps, {args.reps} repetitions, median [min-max] per step")
    print("| | " + " | ".join(ROWS) + " |\n|---|" + "---|" * len(ROWS))
    for mode, rows in results.items():
        cells = []
        for name in ROWS:
            values = [row[name] for row in rows]
            cells.append(f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]")
        print(f"| {mode} | " + " | ".join(cells) + " |")
    whole, ready = import_ms("import rlwatch"), import_ms("from rlwatch import init")
    print(f"import rlwatch: {whole:.0f} ms; with what rlwatch.init needs: {ready:.0f} ms")


if __name__ == "__main__":
    main()
