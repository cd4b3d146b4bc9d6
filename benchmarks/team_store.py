"""What a store on PostgreSQL costs: ``python benchmarks/team_store.py [--steps 20000] [--metrics 60] [--runs 1000]``.

A server of its own (fsync off, as in the tests): the figures are those of the way there and back, not of a disk.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from postgres_server import PostgresServer, sql

from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store


def timed(call, times: int = 5) -> float:
    """Milliseconds, median."""
    took = []
    for _ in range(times):
        before = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - before))
    return median(took)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    for name, value in (("steps", 20_000), ("metrics", 60), ("runs", 1_000)):
        asked.add_argument(f"--{name}", type=int, default=value)
    args = asked.parse_args()
    server = PostgresServer()
    try:
        server.start()
        url = server.url("bench")
        store, names = open_store(url), [f"m{k}" for k in range(args.metrics)]
        writer = store.open_run(RunInfo("run"))
        rng, written = np.random.default_rng(0), 0.0
        for at in range(0, args.steps, 500):
            rows = [StepRecord(step, dict(zip(names, rng.normal(size=args.metrics).tolist(), strict=True)), 1.0)
                    for step in range(at, min(at + 500, args.steps))]  # fmt: skip
            before = time.perf_counter()
            writer.write(rows)
            written += time.perf_counter() - before
        one = iter([StepRecord(args.steps + k, dict.fromkeys(names, 0.5), 1.0) for k in range(200)])
        single = timed(lambda: writer.write([next(one)]), 200)
        writer.close()
        with sql(url) as db:
            size = db.execute("SELECT pg_total_relation_size('bench.record')").fetchone()[0]
        points = args.steps * args.metrics
        print(f"{args.steps} steps x {args.metrics} metrics on {server.bin.parent.name}")
        print(f"write, 500 steps a transaction   {points / written / 1e6:8.2f} M points/s")
        print(f"write, one step a transaction    {single:8.2f} ms")
        print(f"size of rows and their indexes   {float(size) / points:8.1f} bytes a point")
        for count in (1, 12, args.metrics):
            took = timed(lambda k=count: store.series("run", names[:k]))
            print(f"{count:3d} whole series                 {took:8.1f} ms")
        took = timed(lambda: store.series("run", names[:12], steps=(args.steps - 1000, args.steps)))
        print(f" 12 series of 1,000 steps         {took:8.1f} ms")
        took = timed(lambda: store.records("run", after_seq=args.steps - 10))
        print(f"rows since a number               {took:8.1f} ms")
        print(f"last values                       {timed(lambda: store.last_values('run')):8.1f} ms")
        for k in range(args.runs - 1):
            store.open_run(RunInfo(f"r{k}", config={"lr": 1e-6, "beta": 0.04})).close()
        fresh = timed(lambda: open_store(url).runs())
        print(f"list {args.runs} runs, cold             {fresh:8.1f} ms")
    finally:
        server.remove()


if __name__ == "__main__":
    main()
