"""The shipped forecaster on runs it was not trained on: hits beside what alarms in the same steps of clean runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from forecast.cadence import LATE_ROWS, LATE_STEPS, alarmed

from rlwatch.cli.options import examples
from rlwatch.forecast.examples import Row, coarse
from rlwatch.forecast.forecaster import cadence
from rlwatch.forecast.labels import Label, RunOutcome, label_runs
from rlwatch.forecast.tables import read_runs
from rlwatch.forecast.thresholds import NEAR
from rlwatch.testing.small_batches import FAILURES, small_run

LOGS = {
    "as logged, 1 or 2": (1, 2, 0),
    "as logged, 5 to 20": (3, 20, 0),
    "5": (1, 5, 5),
    "10": (1, 10, 10),
    "20": (1, 20, 20),
}
"""Name of a log -> least and most steps a row as runs were logged, and those that rows are joined to (0: none)."""
EXAMPLES = examples("python -m benchmarks.forecast unseen build/corpus/small.parquet")


@dataclass(frozen=True, slots=True)
class Judged:
    """A run's alarms in a log with rows ``every`` so many steps, and its last step."""

    label: Label
    every: float
    end: int
    alarms: list[int]

    def hit(self, onset: int, every: float) -> bool:
        """True with an alarm in the steps in which one of a failure at ``onset`` would be a hit."""
        last = onset + max(LATE_STEPS, LATE_ROWS * every)
        return any(onset - NEAR <= step <= last for step in self.alarms)


def unseen(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Runs: a file, or a folder of shards.")],
) -> None:
    """Hits, placebo and clean runs alarmed, in logs as they are and joined to 5, 10 and 20 steps a row (Markdown)."""
    runs = read_runs(table)
    labels = label_runs(runs).of(runs)
    rows = [(list(runs.stream(i)), label) for i, label in enumerate(labels)]
    print("| a row every | hits | placebo | clean runs alarmed |", "|---|---|---|---|", sep="\n")
    for name, log in LOGS.items():
        print(line(name, [run for each in rows if (run := _judged(*each, *log)) is not None]))


SOUND, FAILING = 300, 30
"""Synthetic runs that are sound, and that fail in each of the ways."""
SMALL_EXAMPLES = examples("python -m benchmarks.forecast small-batches")


def small_batches() -> None:
    """Say how many synthetic runs with 4 to 32 responses a step are warned of: sound ones, and failing ones in time."""
    sound = [small_run(seed) for seed in range(SOUND)]
    failing = [small_run(1000 + seed, failure=way) for way in FAILURES for seed in range(FAILING)]
    alarms = [alarmed([(row.step, row.metrics) for row in run.rows]) for run in (*sound, *failing)]
    hits = [
        any((run.onset or 0) - NEAR <= step <= run.last_in_time for step in steps)
        for run, steps in zip(failing, alarms[SOUND:], strict=True)
    ]
    print(f"{sum(map(bool, alarms[:SOUND]))} of {SOUND} sound runs alarmed, {sum(hits)} of {len(hits)} failures hit")


def line(name: str, runs: Sequence[Judged]) -> str:
    """Row of the table."""
    clean = [run for run in runs if run.label.outcome is RunOutcome.CLEAN]
    failed = [(run, run.label.onset) for run in runs if run.label.outcome is RunOutcome.EVENT]
    hits = [run.hit(onset, run.every) for run, onset in failed if onset is not None]
    there = [[one for one in clean if onset is not None and one.end >= onset] for _, onset in failed]
    placebo = [
        np.mean([one.hit(onset, run.every) for one in twins])
        for (run, onset), twins in zip(failed, there, strict=True)
        if twins and onset is not None
    ]
    false = sum(bool(run.alarms) for run in clean)
    share = f"{np.mean(placebo):.2f}" if placebo else "-"
    return f"| {name} | {sum(hits)} of {len(hits)} | {share} | {false} of {len(clean)} |"


def _judged(rows: list[Row], label: Label, least: int, most: int, every: int) -> Judged | None:
    """None where the log is not one of these."""
    own = cadence(np.array([step for step, _ in rows]))
    if not least <= own <= most or label.outcome not in {RunOutcome.EVENT, RunOutcome.CLEAN}:
        return None
    joined = coarse(rows, every) if every else rows
    return Judged(label, every or own, joined[-1][0], alarmed(joined))
