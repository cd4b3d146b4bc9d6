"""The forecaster in logs of every 1 to 20 steps: the same runs, resampled as trainers log them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from joblib import Parallel, delayed
from rich.progress import track

from rlwatch.cli.options import examples
from rlwatch.forecast import Forecaster
from rlwatch.forecast.examples import LogCadence, Row
from rlwatch.forecast.labels import Label, RunOutcome, label_runs, read_labels
from rlwatch.forecast.tables import RunTable, read_runs
from rlwatch.forecast.thresholds import NEAR, QUIET_STEPS
from rlwatch.records import ClosedStep

CADENCES = (1, 2, 5, 10, 20)
WAYS = ("mean", "last")
BUILT_UP = 20
"""Steps that a fault was there before the onset of a failure that could be seen coming."""
AHEAD, AFTER = 5, 10
"""Steps before the onset by which a failure is forecast, and after it by which it is detected."""
LATE_STEPS, LATE_ROWS = 10, 2
"""How much later than in a log of every step an alarm may come: the larger of both."""
HEADER = (
    "| a row every | forecast, built up | in time | clean runs alarmed | of those quiet at 1 | alarms in 1000 |",
    "|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Run:
    """Alarms of a run by (cadence, way of averaging), and what became of it."""

    label: Label
    built_up: bool
    steps: int
    alarms: dict[tuple[int, str], list[int]]

    def first(self, every: int, how: str) -> int | None:
        """The first alarm that is of its failure."""
        onset = self.label.onset
        assert onset is not None
        return next((step for step in self.alarms[every, how] if onset - NEAR <= step <= onset + AFTER), None)

    def episodes(self, every: int, how: str) -> int:
        """Alarms, those within 25 steps (of a coarse log, two rows) of each other counted once."""
        steps = self.alarms[every, how]
        return len(steps) and 1 + int((np.diff(steps) > max(QUIET_STEPS, 2 * every)).sum())


def alarmed(rows: Sequence[Row]) -> list[int]:
    """Steps at which the forecaster alarms."""
    made = Forecaster().extend([ClosedStep(step, dict(metrics)) for step, metrics in rows])
    return [forecast.step for forecast in made if forecast.alarm]


def judged(rows: Sequence[Row], label: Label, built_up: bool, cadences: Sequence[int] = CADENCES) -> Run:
    """A run at all cadences."""
    found = {
        (every, how): alarmed(LogCadence(every, how == "last").of(list(rows)))
        for every in cadences
        for how in WAYS
        if every > 1
    }
    fine = alarmed(rows)
    steps = rows[-1][0] - rows[0][0] + 1
    return Run(label, built_up, steps, found | dict.fromkeys([(1, how) for how in WAYS], fine))


def built_up(table: RunTable, run: int, onset: int) -> bool:
    """True of a failure that could be seen coming: its fault was there for so long, and did not come at once."""
    at_once = bool(table.at_once) and bool(table.at_once[run])
    return bool(np.isfinite(table.fault[run])) and not at_once and onset - table.fault[run] >= BUILT_UP


def judged_runs(table: RunTable, labels: Sequence[Label], jobs: int = 1) -> list[Run]:
    """Runs that failed or stayed clean; others count nowhere."""
    work = [
        (list(table.stream(i)), label, built_up(table, i, label.onset or 0))
        for i, label in enumerate(labels)
        if label.outcome in {RunOutcome.EVENT, RunOutcome.CLEAN}
    ]
    found = Parallel(n_jobs=jobs, return_as="generator")(delayed(judged)(*each) for each in work)
    return list(track(found, description="runs", total=len(work)))


def figures(runs: Sequence[Run], every: int, how: str) -> dict[str, Any]:
    """Row of the table."""
    failing = [run for run in runs if run.label.onset is not None and run.built_up]
    clean = [run for run in runs if run.label.outcome is RunOutcome.CLEAN]
    ahead = [run for run in failing if (at := run.first(every, how)) is not None and at <= run.label.onset - AHEAD]  # type: ignore[operator]
    fine = [run for run in failing if run.first(1, how) is not None]
    late = max(LATE_STEPS, LATE_ROWS * every)
    kept = [run for run in fine if (run.first(every, how) or 10**9) <= run.first(1, how) + late]  # type: ignore[operator]
    quiet = [run for run in clean if not run.alarms[1, how]]
    steps = sum(run.steps for run in clean)
    return {
        "every": every,
        "how": how if every > 1 else "",
        "forecast": (len(ahead), len(failing)),
        "in time": (len(kept), len(fine)),
        "clean alarmed": (sum(bool(run.alarms[every, how]) for run in clean), len(clean)),
        "newly alarmed": (sum(bool(run.alarms[every, how]) for run in quiet), len(quiet)),
        "false in 1000": 1000.0 * sum(run.episodes(every, how) for run in clean) / max(1, steps),
    }


EXAMPLES = examples(
    "python -m benchmarks.forecast cadence build/corpus", "python -m benchmarks.forecast cadence sample"
)


def cadence(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Runs: a file, or a folder of shards.")],
    *,
    labels_file: Annotated[Path | None, typer.Option("--labels", help="Made from the runs without it.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 1,
) -> None:
    """Alarms of the shipped forecaster in logs of every 1, 2, 5, 10, 20 steps, as a table (Markdown)."""
    rows = read_runs(table)
    labels = read_labels(labels_file) if labels_file else label_runs(rows)
    runs = judged_runs(rows, labels.of(rows), jobs)
    for line in HEADER:
        print(line)
    for every, how in [(1, "mean"), *((every, how) for every in CADENCES[1:] for how in WAYS)]:
        row = figures(runs, every, how)
        shares = (f"{a} of {b} ({a / max(1, b):.2f})" for a, b in list(row.values())[2:6])
        print(f"| {every} {row['how']} | {' | '.join(shares)} | {row['false in 1000']:.2f} |")
