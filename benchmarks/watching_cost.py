"""What watching costs: CPU time per step of everything rlwatch does, at each level, beside the step it watches.

    python benchmarks/watching_cost.py                 # a plain loop and TRL GRPO, at every level
    python benchmarks/watching_cost.py --loops own     # the plain loop only
    python benchmarks/watching_cost.py --operations    # how many operations of PyTorch a step takes, whatever the load

Every row is a fresh process on one core. `hooks` is the CPU time of what rlwatch does on the training thread (all of
it goes through one error boundary, which is timed here), `threads` that of all other threads of the process less what
they take unwatched: the writer, and the one that measures text. `share` is both over the CPU time of an unwatched step.
Wall time is not compared: on a shared machine its difference is noise. The models are tiny, so the shares are not: the
cost is that of some hundred small operations a micro-batch, whatever the model.
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
import threading
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
LEVELS = ("scalars", "tokens", "gradients", "full")
MODES = ("unwatched", *LEVELS)
LOOPS = {"own": "plain loop, Watcher(level=...)", "trl": "TRL GRPO, watch(trainer, level=...)"}
COLUMNS = ("step_ms", "hooks_ms", "threads_ms", "share_percent", "peak_mb")


def time_the_seam(*, count: bool = False) -> list[float]:
    """Make the error boundary add up its own thread time, nested calls counted once; or ``count`` operations of PyTorch
    on the training thread.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from rlwatch.error_boundary import ErrorBoundary

    spent, depth, inner, training = [0.0], [0], ErrorBoundary.attempt, threading.get_ident()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            spent[0] += 1
            return func(*args, **(kwargs or {}))

    def counted(self, tap, work, *args, **kwargs):  # type: ignore[no-untyped-def]
        if depth[0] or threading.get_ident() != training:
            return inner(self, tap, work, *args, **kwargs)
        depth[0] += 1
        try:
            with Operations():
                return inner(self, tap, work, *args, **kwargs)
        finally:
            depth[0] -= 1

    def timed(self, tap, work, *args, **kwargs):  # type: ignore[no-untyped-def]
        depth[0] += 1
        begin = time.thread_time()
        try:
            return inner(self, tap, work, *args, **kwargs)
        finally:
            depth[0] -= 1
            if not depth[0]:
                spent[0] += time.thread_time() - begin

    ErrorBoundary.attempt = counted if count else timed  # type: ignore[method-assign]
    return spent


def own(mode: str, steps: int, directory: Path) -> Any:
    """The plain loop; returns its training as a function of no arguments."""
    import plain_loop

    import rlwatch

    def watcher(*args, **kwargs):  # type: ignore[no-untyped-def]
        return rlwatch.Watcher(*args, **kwargs, level=mode, store=directory / "runs")

    return lambda: plain_loop.train(None if mode == "unwatched" else watcher, steps)


def trl(mode: str, steps: int, directory: Path) -> Any:
    """The demo's trainer, watched or not."""
    from rlwatch.demo import Recipe
    from rlwatch.demo.training import build_trainer
    from rlwatch.integrations.trl import watch

    trainer = build_trainer(Recipe(steps=steps), directory)
    if mode != "unwatched":
        watch(trainer, level=mode, store=directory / "runs")
    return trainer.train


def measure(loop: str, mode: str, steps: int, *, count: bool = False) -> dict[str, float]:
    """Per step: CPU ms of the process and of the hooks on the training thread, CPU ms of all other threads; or the
    hooks' operations.
    """
    import torch

    torch.set_num_threads(1)
    spent = time_the_seam(count=count)
    with tempfile.TemporaryDirectory() as directory:
        train = {"own": own, "trl": trl}[loop](mode, steps, Path(directory))
        process, thread = time.process_time(), time.thread_time()
        train()
        process, thread = time.process_time() - process, time.thread_time() - thread
    if count:
        return {"operations": spent[0] / steps}
    per_step = 1e3 / steps
    return {
        "step_ms": process * per_step,
        "hooks_ms": spent[0] * per_step,
        "threads_ms": (process - thread) * per_step,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(loop: str, mode: str, steps: int, *options: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", loop, mode, "--steps", str(steps), *options]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in out.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{loop} {mode} failed:\n{out.stderr[-2000:]}")


def report(loop: str, steps: int, reps: int) -> None:
    """One table: median [min-max] over fresh processes, the modes taking turns."""
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(reps):
        for mode in MODES:
            rows[mode].append(in_a_process(loop, mode, steps))
    bare = {name: statistics.median(row[name] for row in rows["unwatched"]) for name in ("step_ms", "threads_ms")}
    for row in (row for mode in MODES for row in rows[mode]):
        row["threads_ms"] = max(0.0, row["threads_ms"] - bare["threads_ms"])
        row["share_percent"] = 100 * (row["hooks_ms"] + row["threads_ms"]) / bare["step_ms"]
    print(f"\n{LOOPS[loop]}: {steps} steps, {reps} repetitions, median [min-max] per step")
    print("| | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    for mode, measured in rows.items():
        print(f"| {mode} | " + " | ".join(cell([row[name] for row in measured]) for name in COLUMNS) + " |")


def report_operations(loop: str) -> None:
    """One line for each level."""
    print(f"\n{LOOPS[loop]}: operations of PyTorch per step")
    for mode in LEVELS:
        print(f"{mode:<12}{in_a_process(loop, mode, 5, '--operations')['operations']:8,.0f}", flush=True)


def cell(values: list[float]) -> str:
    digits = 0 if min(values) >= 100 else 1 if min(values) >= 10 else 2
    low, middle, high = (f"{x:.{digits}f}" for x in (min(values), statistics.median(values), max(values)))
    return f"{middle} [{low}-{high}]"


def import_ms(statement: str) -> float:
    """Best of 10 fresh interpreters."""

    def once(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begin

    bare = min(once("pass") for _ in range(10))
    return (min(once(statement) for _ in range(10)) - bare) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--operations", action="store_true", help="count operations instead of CPU time")
    parser.add_argument("--only", nargs=2, metavar=("LOOP", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print("RESULT " + json.dumps(measure(*args.only, args.steps, count=args.operations)))
        return
    for loop in args.loops:
        if args.operations:
            report_operations(loop)
        else:
            report(loop, args.steps, args.reps)
    if args.operations:
        return
    whole, ready = import_ms("import rlwatch"), import_ms("from rlwatch import init")
    print(f"\nimport rlwatch: {whole:.0f} ms; with what rlwatch.init needs: {ready:.0f} ms")


if __name__ == "__main__":
    main()
