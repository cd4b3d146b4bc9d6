"""Making the runs: many processes, one file a run, nothing done twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import joblib
import torch
from forecast.knobs import TESTBED, Pace, Start
from forecast.policy import fitted
from forecast.recipes import RECIPES, Plan, plans
from forecast.tables import RunInfo, is_done, versions, write_run
from forecast.training import train
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlwatch.errors import RLWatchError

BACKENDS = ("loky", "ray", "dask")
RAY_RUNS = 64
"""Runs handed to Ray at once: the last of them are waited for before the next begin."""


def make(plan: Plan, folder: Path) -> float:
    """One run's file, unless it is there; returns the seconds it took."""
    begun = time.perf_counter()
    if is_done(folder, plan.run):
        return 0.0
    torch.set_num_threads(1)
    knobs = plan.config.knobs
    start = fitted(knobs.task, knobs.k, plan.config.base, folder / "bases")
    info = RunInfo(
        run=plan.run,
        recipe=plan.recipe,
        family=plan.family,
        source="testbed",
        seed=plan.seed,
        config=plan.config.record(),
        pair=plan.pair,
        fault_step=plan.fault_step,
        versions=versions(testbed=TESTBED),
    )
    write_run(folder, info, train(plan.config, plan.seed, start))
    return time.perf_counter() - begun


def generate(
    folder: Path,
    runs: int,
    jobs: int,
    seed: int,
    only: tuple[str, ...] = (),
    backend: str = "loky",
    pace: Pace = Pace.DRAWN,
    batch: int = 1,
    start: Start = Start.WARM,
) -> int:
    """Make the first ``runs`` runs of ``seed`` that are not in ``folder`` yet; returns how many were made."""
    if unknown := sorted(set(only) - {*RECIPES, "control"}):
        raise RLWatchError(f"no recipe is called {', '.join(unknown)}; there are: {', '.join(RECIPES)}")
    todo = [plan for plan in islice(plans(seed, only, pace, batch, start), runs) if not is_done(folder, plan.run)]
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with joblib.parallel_config(_cluster(backend), n_jobs=jobs), Progress(*columns) as progress:
        bar = progress.add_task("", total=runs, completed=runs - len(todo))
        for _ in _made(todo, folder, backend):
            progress.advance(bar)
    return len(todo)


def _made(todo: list[Plan], folder: Path, backend: str) -> Iterator[float]:
    """Each run once it is made; Ray's backend of joblib gives lists only, so there some at a time."""
    if backend != "ray":
        parallel = joblib.Parallel(return_as="generator_unordered", batch_size=1)
        yield from parallel(joblib.delayed(make)(plan, folder) for plan in todo)
        return
    for start in range(0, len(todo), RAY_RUNS):
        yield from joblib.Parallel()(joblib.delayed(make)(plan, folder) for plan in todo[start : start + RAY_RUNS])


def _cluster(backend: str) -> str:
    """joblib's name of ``backend``, which is there."""
    try:
        if backend == "ray":
            from ray.util.joblib import register_ray

            register_ray()
        elif backend == "dask":
            from distributed import Client

            Client()
    except ImportError as missing:
        package = "ray" if backend == "ray" else "distributed"
        raise RLWatchError(
            f"--backend {backend} needs {package}, which is not here: pip install {package}"
        ) from missing
    return backend
