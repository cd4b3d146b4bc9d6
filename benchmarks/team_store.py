"""What a store on PostgreSQL costs: ``python benchmarks/team_store.py [--steps 20000] [--metrics 60] [--runs 1000]``.

A server of its own (fsync off, as in the tests): the figures are those of the way there and back, not of a disk.
Reading from chunks and from rows alternates; the best of 15 is printed before the median: others may use the machine.
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
from rlwatch.store.postgres import series
from rlwatch.store.url import open_store


def took(call) -> float:
    before = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - before)


def timed(*calls, times: int = 15) -> list[str]:
    """Milliseconds of each call, in turn: best, and median."""
    rounds = [[took(call) for call in calls] for _ in range(times)]
    return [f"{min(each):8.2f} / {median(each):7.2f} ms" for each in zip(*rounds, strict=True)]


def write(store, run_id: str, names: list[str], steps: int) -> None:
    writer, rng, seconds = store.open_run(RunInfo(run_id)), np.random.default_rng(0), 0.0
    for at in range(0, steps, 500):
        values = rng.normal(size=(min(500, steps - at), len(names))).tolist()
        rows = [StepRecord(at + k, dict(zip(names, row, strict=True)), 1.0) for k, row in enumerate(values)]
        seconds += took(lambda rows=rows: writer.write(rows)) / 1e3
    print(f"{run_id:7s} 500 steps a transaction    {steps * len(names) / seconds / 1e6:8.2f} M points/s")
    later = iter([StepRecord(steps + k, dict.fromkeys(names, 0.5), 1.0) for k in range(300)])
    print(f"{run_id:7s} one step a transaction     {timed(lambda: writer.write([next(later)]), times=300)[0]}")
    writer.close()


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
        print(f"{args.steps} steps x {args.metrics} metrics; best / median")
        write(store, "chunks", names, args.steps)
        series.ROWS = 1 << 60
        write(store, "rows", names, args.steps)
        with sql(url) as db:
            db.execute("VACUUM ANALYZE")
            for tables in (("record",), ("chunk", "chunk_axis")):
                size = "SELECT " + " + ".join(f"pg_total_relation_size('bench.{table}')" for table in tables)
                points = args.steps * args.metrics * (2 if tables == ("record",) else 1)
                each = db.execute(size).fetchone()[0] / points
                print(f"size of {' and '.join(tables):20s}     {each:8.1f} bytes a point")
        for count in (1, 12, args.metrics):
            both = timed(*(lambda run=run, k=count: store.series(run, names[:k]) for run in ("chunks", "rows")))
            print(f"{count:3d} whole series     chunks {both[0]}   rows {both[1]}")
        window = (args.steps - 1000, args.steps)
        both = timed(*(lambda run=run: store.series(run, names[:12], steps=window) for run in ("chunks", "rows")))
        print(f" 12, 1,000 steps     chunks {both[0]}   rows {both[1]}")
        print(f"rows since a number         {timed(lambda: store.records('chunks', after_seq=args.steps + 290))[0]}")
        print(f"last values                 {timed(lambda: store.last_values('chunks'))[0]}")
        for k in range(args.runs - 2):
            store.open_run(RunInfo(f"r{k}", config={"lr": 1e-6, "beta": 0.04})).close()
        print(f"list {args.runs} runs, cold        {timed(lambda: open_store(url).runs())[0]}")
    finally:
        server.remove()


if __name__ == "__main__":
    main()
