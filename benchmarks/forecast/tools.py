"""Scores of detectors on a table of runs: our own alarms, and two public packages by their own code.

Writes one CSV a tool (``run, step, alarm``) and prints the options for ``evaluate``. Peers get the rows in
environments of their own, one of them has our package's name; ``--peers`` names the folder, made if it is not there.
Each sees a run's rows in order, one at a time, and no hidden column.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from joblib import Parallel, delayed
from rich.progress import Progress, track

from rlwatch.cli.options import examples
from rlwatch.forecast.tables import RunTable, read_runs
from rlwatch.records import Severity, StepRecord
from rlwatch.scanner import scan

HERE = Path(__file__).parent
PEERS = {
    "PyPI rlwatch 0.5.1": ("rlwatch==0.5.1", "peer_rlwatch.py"),
    "rldoctor 0.2.0": ("rldoctor==0.2.0", "peer_rldoctor.py"),
}
FORECAST = "crash_forecast"
"""Alarms of this kind are the forecaster's own: it is judged by its scores."""
Alarms = Iterable[tuple[str, int]]
"""(run, step) of each."""


EXAMPLES = examples("python -m benchmarks.forecast tools build/corpus --out build/tools --peers build/peers")


def tools(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Runs: a file, or a folder of shards.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for the alarms.")],
    peer_environments: Annotated[
        Path | None, typer.Option("--peers", help="Folder of the peers' environments; without it they are left out.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 1,
) -> None:
    """Run rlwatch's detectors and public packages over a table of runs, and write their alarms."""
    rows = read_runs(table)
    out.mkdir(parents=True, exist_ok=True)
    ours = list(own(rows, jobs))
    files = {
        "rlwatch critical": write(out / "rlwatch-critical.csv", (each[:2] for each in ours if each[2])),
        "rlwatch any alarm": write(out / "rlwatch-any.csv", (each[:2] for each in ours)),
    }
    for name, (package, worker) in PEERS.items() if peer_environments else ():
        alarms = list(peers(rows, environment(peer_environments, package), worker, jobs))
        stem = package.replace("==", "-")
        files[name] = write(out / f"{stem}-critical.csv", (each[:2] for each in alarms if each[2]))
        files[f"{name}, any"] = write(out / f"{stem}-any.csv", (each[:2] for each in alarms))
    print(" ".join(f'--scores "{name}={path}"' for name, path in files.items()))


def own(table: RunTable, jobs: int) -> Iterator[tuple[str, int, bool]]:
    """Alarms of the Monitor with its default rules, and whether they are critical."""
    runs = range(len(table.runs))
    found = Parallel(n_jobs=jobs, return_as="generator")(delayed(_scanned)(list(table.stream(i))) for i in runs)
    for i, alarms in zip(track(runs, description="our detectors"), found, strict=True):
        yield from ((table.runs[i], step, critical) for step, critical in alarms)


def _scanned(rows: list[tuple[int, dict[str, float]]]) -> list[tuple[int, bool]]:
    records = [StepRecord(step, metrics) for step, metrics in rows]
    alarms = [alarm for alarm in scan(records).alarms if alarm.kind != FORECAST]
    return [(alarm.step, alarm.severity is Severity.CRITICAL) for alarm in alarms]


def peers(table: RunTable, python: Path, worker: str, jobs: int) -> Iterator[tuple[str, int, bool]]:
    """Alarms of a package, by its own code; so many of its processes share the runs."""
    shares = [range(first, len(table.runs), jobs) for first in range(jobs)]
    with Progress() as progress:
        bar = progress.add_task(worker, total=len(table.runs))
        work = (delayed(peer)(table, python, worker, runs, lambda: progress.advance(bar)) for runs in shares)
        for found in Parallel(n_jobs=jobs, prefer="threads", return_as="generator")(work):
            yield from found


def peer(
    table: RunTable, python: Path, worker: str, runs: Sequence[int], done: Callable[[], None]
) -> list[tuple[str, int, bool]]:
    """Alarms in some of the runs (places), by one process of a package; ``done`` is called after each."""
    found: list[tuple[str, int, bool]] = []
    command = [python, "-E", HERE.parent / "detection" / worker]  # PYTHONPATH may hold our own package of that name
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for i in runs:
            process.stdin.write(json.dumps(list(table.stream(i))) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{worker} ended at run {table.runs[i]!r}")
            found += [(table.runs[i], step, critical) for step, critical in json.loads(line)]
            done()
    return found


def environment(folder: Path, package: str) -> Path:
    """Python of the package's own environment."""
    place = folder / package.replace("==", "-")
    if not (place / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([place / "bin" / "pip", "install", "--quiet", package], check=True)
    return place / "bin" / "python"


def write(path: Path, alarms: Alarms) -> Path:
    """One row an alarm; beside and then in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with beside.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("run", "step", "alarm"))
        rows.writerows((run, step, 1) for run, step in sorted(set(alarms)))
    os.replace(beside, path)  # noqa: PTH105  (atomic on one file system)
    return path
