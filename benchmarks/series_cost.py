"""What reading costs: one series, a chart of all metrics, what is new since the last look, the list of runs.

    python benchmarks/series_cost.py            # some 3 minutes, 1 GB of disk
    python benchmarks/series_cost.py --growth   # 1k to 1M steps, 1 to 1000 runs as well: 5 minutes more

The stores are made by the code that runs, in a temporary directory. Every measurement has a fresh process; a time is
the best of 9 calls and the median of their CPU time, the first (with its imports) left out; that of the list of runs is
of the first call, the median of 5 processes, apart from the very first, which opens every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store

POINTS = 240
"""Points of a chart: about one a bucket of the dashboard."""


def make(root: Path, run_id: str, steps: int, metrics: int) -> float:
    """A finished run of noise with drift; bytes a point."""
    names = [f"m{k:03d}" for k in range(metrics)]
    writer = open_store(root).open_run(RunInfo(run_id))
    rng = np.random.default_rng(0)
    for at in range(0, steps, 1000):
        block = rng.normal(size=(min(1000, steps - at), metrics)) + at / steps
        rows = [
            StepRecord(at + k, dict(zip(names, row, strict=True)), ts=1e9 + at + k)
            for k, row in enumerate(block.tolist())
        ]
        writer.write(rows)
    writer.finish(RunState.FINISHED, "", 1e9 + steps)
    writer.close()
    return sum(file.stat().st_size for file in (root / run_id).iterdir()) / max(1, steps * metrics)


def tasks(root: Path, run_id: str) -> dict[str, Callable[[], object]]:
    store = open_store(root)
    names = store.metric_names(run_id) if run_id else []
    last = (store.run(run_id).last_step or 0) if run_id else 0
    middle = (last // 4, last * 3 // 4)
    return {
        "one": lambda: store.series(run_id, names[:1]),
        "whole": lambda: store.series(run_id, names),
        "chart": lambda: store.series(run_id, names, points=POINTS),
        "middle": lambda: store.series(run_id, names, steps=middle, points=POINTS),
        "zoomed": lambda: store.series(run_id, names, steps=(last // 2, last // 2 + 1000), points=POINTS),
        "new": lambda: store.series(run_id, names, after_seq=last - 9),
        "last": lambda: store.last_values(run_id),
        "list": store.runs,
    }


def child(root: Path, run_id: str, task: str, calls: int) -> None:
    call = tasks(root, run_id)[task]
    before = _peak_mb()
    walls, cpus = [], []
    for _ in range(calls):
        wall, cpu = time.perf_counter(), time.process_time()
        kept = call()
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
        del kept
    later = slice(1, None) if calls > 1 else slice(None)
    print(json.dumps({"ms": min(walls[later]), "cpu": statistics.median(cpus[later]), "mb": _peak_mb() - before}))


def _peak_mb() -> float:
    """Of this program: what getrusage says is that of its parent, too."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def measured(root: Path, run_id: str, task: str, calls: int = 10) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", str(root), run_id, task, str(calls)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result


def row(name: str, result: dict[str, float]) -> None:
    print(f"| {name} | {result['ms']:,.2f} | {result['cpu']:,.2f} | {result['mb']:,.0f} |", flush=True)


def listing(root: Path, runs: int) -> dict[str, dict[str, float]]:
    place = root / f"list-{runs}"
    for k in range(runs):
        make(place, f"run-{k:04d}", 3, 60)
    time.sleep(3.0)  # what changed just now is not remembered
    first = measured(place, "", "list", 1)
    again = statistics_of([measured(place, "", "list", 1) for _ in range(5)])
    return {"cold, the first time ever": first, "cold": again, "again": measured(place, "", "list", 10)}


def statistics_of(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in results) for name in results[0]}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        root, run_id, task, calls = sys.argv[2:]
        child(Path(root), run_id, task, int(calls))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--growth", action="store_true", help="also 1k to 1M steps and 1 to 1000 runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlwatch-series-") as place:
        report(Path(place), growth=args.growth)


def report(root: Path, *, growth: bool) -> None:
    sizes = {"20k x 60": make(root, "small", 20_000, 60), "100k x 300": make(root, "large", 100_000, 300)}
    print("| bytes a point | " + " | ".join(f"{name}: {size:.2f}" for name, size in sizes.items()) + " |\n")
    print("| | ms | CPU ms | peak MB |\n|---|---|---|---|")
    row("one series of 20k steps x 60", measured(root, "small", "one"))
    row("all 60 series of 20k steps", measured(root, "small", "whole"))
    for task, name in _LARGE.items():
        row(f"{name}, 100k steps x 300", measured(root, "large", task, 4 if task == "whole" else 10))
    for name, result in listing(root, 1000).items():
        row(f"list 1,000 runs, {name}", result)
    if growth:
        for name, result in _grown(root):
            row(name, result)


_LARGE = {
    "one": "one series",
    "whole": "all series, whole",
    "chart": f"all series at {POINTS} points",
    "middle": f"the middle half of all series at {POINTS} points",
    "zoomed": "1,000 steps of all series",
    "new": "what is new since 10 steps, all series",
    "last": "last values",
}


def _grown(root: Path) -> Iterator[tuple[str, dict[str, float]]]:
    for steps in (1_000, 10_000, 100_000, 1_000_000):
        make(root, f"grown-{steps}", steps, 20)
        for task in ("chart", "zoomed", "new"):
            yield f"{_LARGE[task]}, {steps:,} steps x 20", measured(root, f"grown-{steps}", task)
    for runs in (1, 10, 100):
        for name, result in listing(root, runs).items():
            yield f"list {runs} runs, {name}", result


if __name__ == "__main__":
    main()
