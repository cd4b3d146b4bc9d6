"""The model of sparse logs: fitted, put into a model's file, and judged on recipes that it has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from forecast.cadence import AHEAD, built_up

from rlwatch.cli.options import examples
from rlwatch.errors import RLWatchError
from rlwatch.forecast import thresholds
from rlwatch.forecast.examples import Examples, Floats, LogCadence
from rlwatch.forecast.forecaster import BUDGET
from rlwatch.forecast.labels import Labels, RunOutcome, label_runs
from rlwatch.forecast.model import load, write_model
from rlwatch.forecast.tables import RunTable, read_runs
from rlwatch.forecast.thresholds import NEAR
from rlwatch.forecast.training import SPARSE_LOGS, Trained, train_sparse

EXAMPLES = examples("python -m benchmarks.forecast sparse build/corpus/corpus.parquet --into mine.json")
HEADER = (
    "| a row every | forecast, built up | clean runs alarmed | alarms in 1000 healthy steps |",
    "|---|---|---|---|",
)


def sparse(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Runs: a file, or a folder of shards.")],
    *,
    into: Annotated[Path, typer.Option("--into", help="A model; the one of sparse logs in it is made anew.")],
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 1,
) -> None:
    """Fit the model of sparse logs, put it into a model's file, and say what it is worth on recipes held out."""
    whole, runs = load(into), read_runs(table)
    labels = label_runs(runs)
    made = train_sparse(runs, labels, jobs=jobs, progress=print, meta={"runs": len(runs.runs)})
    if made is None:
        raise RLWatchError(f"{table} has too few failures to fit a model of sparse logs to")
    print(f"{into}: sha256 {write_model(replace(whole, sparse=made.model), into)}")
    print(*HEADER, *lines(runs, labels, made), sep="\n")


def lines(table: RunTable, labels: Labels, made: Trained) -> Iterator[str]:
    """A row of the table for each kind of log, each of the runs as they are and then of small batches."""
    logs = made.examples
    edges = [0, *(np.flatnonzero(np.diff(logs.run) < 0) + 1).tolist(), len(logs)]
    kinds = [(log, small) for log in SPARSE_LOGS for small in (False, True)]
    for (log, small), first, after in zip(kinds, edges[:-1], edges[1:], strict=True):
        rows = np.arange(first, after)
        yield line(log, small, table, labels, made, logs.only(rows), made.p50[rows])


def line(
    log: LogCadence, small: bool, table: RunTable, labels: Labels, made: Trained, part: Examples, p50: Floats
) -> str:
    """One of them."""
    profile, known = made.model.profiles[0], labels.of(table)
    judged, ways = thresholds.smoothed(part, p50), thresholds.smoothed(part, part.static)
    alarm = (judged >= profile.thresholds[BUDGET]) | (ways >= profile.static[BUDGET])
    at = {run: part.step[alarm & (part.run == run)] for run in np.unique(part.run).tolist()}
    clean = [bool(len(at[run])) for run in at if known[run].outcome is RunOutcome.CLEAN]
    onsets = {run: onset for run in at if (onset := known[run].onset) is not None and built_up(table, run, onset)}
    ahead = [bool(((onset - NEAR <= at[run]) & (at[run] <= onset - AHEAD)).any()) for run, onset in onsets.items()]
    sound = thresholds.healthy(part, thresholds.sound_until(table, labels))
    false = thresholds.episodes(part.only(sound), alarm[sound]) / thresholds.steps_watched(part.only(sound))
    how = ("last" if log.last else "mean") + (", small batches" if small else "")
    shares = (f"{sum(each)} of {len(each)} ({sum(each) / max(1, len(each)):.2f})" for each in (ahead, clean))
    return f"| {log.every}, {how} | {' | '.join(shares)} | {1000.0 * false:.2f} |"
