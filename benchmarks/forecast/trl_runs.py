"""Makes the TRL part of the corpus: tiny policies trained by TRL itself and watched by rlwatch's own integration.

    python -m benchmarks.forecast generate-trl --out build/corpus --runs 84 --jobs 1 --seed 1

One Parquet file a run (:mod:`tables`); a run that has its file is not made again. Metrics are what
``rlwatch.integrations.trl.watch`` recorded, under canonical names; metrics of the clock and of single layers and tasks
are left out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import joblib
from forecast.knobs import Pace
from forecast.tables import RunInfo, is_done, path_of, versions, write_run
from forecast.trl_jobs import Deck, Job, jobs
from forecast.trl_setting import Setting
from rich.console import Console
from rich.progress import track

import rlwatch
from rlwatch.metrics import OPEN, Family, canonicalise, metric_of
from rlwatch.store.memory import forget

Rows = dict[int, dict[str, float]]
LEFT_OUT = ("text/", "time/", *(family.name for family in OPEN))


def make(job: Job, out: Path) -> str:
    """Make one run and its file, if it has none; returns a line about it."""
    if is_done(out, job.run):
        return f"{job.run}: there already"
    begun = time.perf_counter()
    columns, end = train(job, out / "starts")
    spent = time.perf_counter() - begun
    info = RunInfo(
        job.run, job.recipe, job.family, "trl", job.seed, asdict(job.setting), job.pair, job.fault_step, versions()
    )
    write_run(out, info, columns)
    steps = len(columns["step"])
    return f"{job.run}: {steps} steps, {1000 * spent / max(1, steps):.0f} ms a step, {end}"


def train(job: Job, starts: Path) -> tuple[dict[str, list[float | None]], str]:
    """Train as ``job`` says; returns the columns of its table and how training ended."""
    from forecast.trl_trainer import make_trainer, quiet

    quiet()
    starts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, _memory(job.run) as store:
        end, truth, dense = "finished", None, job.setting.logging_steps == 1
        for setting, checkpoint in parts(job.setting, Path(directory)):
            trainer, truth = make_trainer(setting, job.seed, starts, Path(directory), truth)
            watched = _watched(trainer, store, job) if dense else None
            try:
                trainer.train(resume_from_checkpoint=checkpoint)
            except (RuntimeError, ValueError) as error:  # TRL cannot sample from weights that are not finite
                end = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            if watched is not None:
                watched.finish()
        rows = measured(store, job.run) if dense else logged(trainer.state.log_history)
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row})
    columns: dict[str, list[float | None]] = {"step": list(steps)}
    columns |= {name: [rows[step].get(name) for step in steps] for name in names}
    return columns | truth.columns(steps), end


def _watched(trainer: Any, store: str, job: Job) -> Any:
    """The run as its taps see it."""
    from rlwatch.integrations.trl import watch

    return watch(trainer, store=store, run_id=job.run, localise=False, detectors=list, rules=(), sigterm=False)


def parts(setting: Setting, directory: Path) -> list[tuple[Setting, str | None]]:
    """A run as it is, or up to where it stops and then from its checkpoint on."""
    if setting.resumed is None:
        return [(setting, None)]
    stop, kept = setting.resumed
    return [(replace(setting, stop=stop), None), (setting, str(directory / "output" / f"checkpoint-{kept}"))]


def measured(store: str, run: str) -> Rows:
    """Step -> what was recorded of it under canonical names that do not depend on the machine."""
    place = rlwatch.open_store(store)
    source, merged = place.run(run).source, Rows()
    for record in place.records(run):
        merged.setdefault(record.step, {}).update(record.metrics)
    return _canonical(merged, source)


def logged(history: Sequence[Mapping[str, Any]]) -> Rows:
    """The same of the trainer's own log alone: one that writes a row every so many steps, of means over them."""
    merged = Rows()
    for entry in history:
        if "train_runtime" not in entry:
            numbers = {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
            merged.setdefault(int(entry["step"]), {}).update(numbers)
    return _canonical(merged, "trl")


def _canonical(merged: Rows, source: str) -> Rows:
    rows = {step: canonicalise(metrics, source)[0] for step, metrics in merged.items()}
    return {step: {name: value for name, value in row.items() if _kept(name)} for step, row in rows.items()}


def _kept(name: str) -> bool:
    row = metric_of(name)
    return row is not None and row.family is not Family.SYSTEM and not name.startswith(LEFT_OUT)


@contextmanager
def _memory(name: str) -> Iterator[str]:
    try:
        yield f"memory://{name}"
    finally:
        forget(name)


def generate(
    out: Path,
    count: int,
    workers: int,
    seed: int,
    pace: Pace = Pace.DRAWN,
    batch: int = 1,
    deck: Deck = Deck.LARGE,
) -> None:
    """Make the first ``count`` runs of ``seed`` that are not there yet, in random order of recipes."""
    wanted = jobs(count, seed, pace, batch, deck)
    missing = [job for job in wanted if not path_of(out, job.run).exists()]
    console = Console(stderr=True)
    console.print(f"{len(missing)} of {len(wanted)} runs to be made in {out}")
    work = joblib.Parallel(n_jobs=workers, return_as="generator_unordered")
    for line in track(work(joblib.delayed(make)(job, out) for job in missing), "runs", len(missing), console=console):
        console.print(line, highlight=False)
