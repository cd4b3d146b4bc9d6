"""CPU time that it takes to log and to store rows of 60 metrics in a tight loop, without a judge.

    python benchmarks/writer_cost.py [--rows 20000]

One thread logs a thousand rows, then stores them, in turn, so that each has its own CPU time; the long way beside the
quick way, which most rows go. Prints microseconds a row, points a CPU second, bytes a point on the disk, and a digest
of what is stored: it is the same for both ways.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import sqlite3
import tempfile
import time
from pathlib import Path

from one_tool import row

from rlwatch.clock import SystemClock
from rlwatch.recorder.intake import BoundedQueue, Intake, admit
from rlwatch.recorder.losses import Counters
from rlwatch.recorder.writer import BATCH_LIMIT, StoreSink, Writer
from rlwatch.records import RunInfo, RunState
from rlwatch.store.url import open_store

STORED = (
    "SELECT seq, attempt, rank, step, mset, v FROM record ORDER BY seq",
    "SELECT id, kept_in, mset, n, seqs, steps, attempts, ranks FROM block ORDER BY id",
    "SELECT id, v FROM chunk ORDER BY id",
    "SELECT id, v FROM level ORDER BY id",
    "SELECT id, names FROM metric_set ORDER BY id",
)


def digest(path: Path) -> str:
    """Of all that is stored but the times."""
    found = hashlib.sha256()
    with contextlib.closing(sqlite3.connect(path)) as db:
        for query in STORED:
            for each in db.execute(query):
                found.update(repr(each).encode())
    return found.hexdigest()[:12]


def measured(rows: int, *, quick: bool) -> str:
    """A line of the table."""
    rng = random.Random(0)
    made = [row(rng) for _ in range(500)]
    with tempfile.TemporaryDirectory() as directory:
        counters, logging_s, storing_s = Counters(), 0.0, 0.0
        run = open_store(directory).open_run(RunInfo("run"))
        intake = Intake(BoundedQueue(10 * BATCH_LIMIT), run.journal, counters)
        writer = Writer(intake, [StoreSink(run, counters, SystemClock())], counters)
        for begin in range(0, rows, BATCH_LIMIT):
            before = time.thread_time()
            for step in range(begin, begin + BATCH_LIMIT):
                metrics = made[step % len(made)]
                if not (quick and intake.quick(metrics, step)):
                    intake.put(admit(metrics, step, 1.0))
            between = time.thread_time()
            writer._round()
            logging_s, storing_s = logging_s + between - before, storing_s + time.thread_time() - between
        run.finish(RunState.FINISHED, "", 1.0)
        run.close()
        size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
        stored = digest(Path(directory, "run", "run.db"))
    points = len(made[0]) * rows
    costs = f"{1e6 * logging_s / rows:.1f} | {1e6 * storing_s / rows:.1f}"
    return f"| {costs} | {points / (logging_s + storing_s) / 1e6:.2f} | {size / points:.1f} | {stored} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--reps", type=int, default=3)
    asked = parser.parse_args()
    measured(BATCH_LIMIT, quick=True)  # what is imported late
    print("| way | log us | store us | M points a CPU second | bytes a point | stored |\n|---|---|---|---|---|---|")
    for _ in range(asked.reps):
        for name, quick in (("long", False), ("quick", True)):
            print(f"| {name} {measured(asked.rows, quick=quick)}", flush=True)


if __name__ == "__main__":
    main()
