"""``rlwatch import LOG``: store the runs in a log as finished runs, so that the dashboard shows them."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, print_remark, print_text, progress_bar, reading
from rlwatch.cli.names import print_names
from rlwatch.cli.options import (
    FormatOption,
    LogArgument,
    MapOption,
    OutputFormat,
    PatternOption,
    ReadAsOption,
    RunOfLogOption,
    StoreOption,
    TrainerOption,
    examples,
    format_of,
    naming_of,
    opened,
)
from rlwatch.errors import ConfigError, ImportFormatError, RunNotFoundError
from rlwatch.ports import Progress, RunReader, Store
from rlwatch.records import IMPORTED, JSON, Finding, ForecastRecord, RunInfo, RunState, StepRecord
from rlwatch.redaction import recordable

if TYPE_CHECKING:
    from rlwatch.importers import About, ImportedRun
    from rlwatch.importers.naming import Naming
    from rlwatch.state import Ending


PROJECT = "default"
EPILOG = examples(
    "rlwatch import train.log --project math-rl --name seed3",
    "rlwatch import runs.csv --run seed3",
    "rlwatch show $(rlwatch import train.log)",
)


def import_log(
    log: LogArgument,
    *,
    project: Annotated[
        str, typer.Option("--project", help="Project of the run.", show_default="from the log, else default")
    ] = "",
    name: Annotated[
        str, typer.Option("--name", help="Display name of the run.", show_default="from the log, else the id")
    ] = "",
    run: RunOfLogOption = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id", metavar="ID", help="Id of the run in the store.", show_default="derived from the file name"
        ),
    ] = None,
    read_as: ReadAsOption = None,
    pattern: PatternOption = None,
    source: TrainerOption = "",
    mapped: MapOption = None,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Import a log into the store as finished runs with records and findings; print their ids.

    If an id exists in the store, nothing is imported. The mapping of metric names is printed on stderr.
    """
    from rlwatch.importers import read_log

    with reading(log):
        runs = read_log(log, run=run, format=format_of(read_as, pattern), naming=naming_of(mapped))
    if not runs:
        raise ImportFormatError(str(log), "holds no run")
    if run_id is not None and len(runs) > 1:
        raise ConfigError(f"{log} holds {len(runs)} runs and --run-id names one; choose one with --run")
    now = time.time()
    with opened(store) as target:
        infos = [
            info_of(
                imported,
                run_id or plain_id(imported.name),
                project=project,
                name=name,
                source=source,
                now=now,
            )
            for imported in runs
        ]
        require_new(target, [info.run_id for info in infos])
        rows = [_import(target, info, imported, now) for info, imported in zip(infos, runs, strict=True)]
    if output is OutputFormat.JSON:
        print_json(rows)
    else:
        for row, info, imported in zip(rows, infos, runs, strict=True):
            print_text(row["run_id"])
            print_names({name for record in imported.records for name in record.metrics}, info.source, print_remark)


def _import(store: Store, info: RunInfo, imported: ImportedRun, now: float) -> dict[str, JSON]:
    from rlwatch.scanner import replay

    report = replay(imported, source=info.source, progress=progress_bar)
    observed: list[Finding | ForecastRecord] = [*report.findings, *report.view.recoveries, *report.forecasts]
    import_run(store, info, list(imported.records), observed, now, ending=report.view.ending)
    return {"run_id": info.run_id, "steps": report.steps, "findings": len(report.findings), "format": report.format}


# Storing the run of a log as a finished run.


def holds(store: RunReader, run_id: str) -> bool:
    """Return whether ``store`` has a run with the id ``run_id``. Raises ``StoreError`` if the store cannot be read."""
    try:
        store.run(run_id)
    except RunNotFoundError:
        return False
    return True


def require_new(store: RunReader, run_ids: Sequence[str]) -> None:
    """Raise ``ConfigError`` if one of ``run_ids`` exists in ``store`` or occurs twice in the list."""
    for index, run_id in enumerate(run_ids):
        if holds(store, run_id):
            raise ConfigError(f"run {run_id!r} exists in this store ; choose another id with --run-id")
        if run_id in run_ids[:index]:
            raise ConfigError(f"two runs of this log would be called {run_id!r}; import them singly: --run, --run-id")


def info_of(imported: ImportedRun, run_id: str, *, project: str, name: str, source: str, now: float) -> RunInfo:
    """Return the description to store for an imported run: its id, project, name, trainer, settings and start time.

    Empty arguments are filled from the log; ``now`` (Unix seconds) is the start time if the log has no times.
    """
    first = next((record.ts for record in imported.records if record.ts), now)
    return RunInfo(
        run_id=run_id,
        project=project or imported.project or PROJECT,
        name=name or imported.title or imported.name or run_id,
        source=source or imported.source,
        created_at=first,
        config=recordable(imported.config),
        tags=("imported", *imported.tags),
    )


def import_run(
    store: Store,
    info: RunInfo,
    records: list[StepRecord],
    judged: Sequence[Finding | ForecastRecord],
    now: float,
    *,
    ending: Ending | None = None,
) -> None:
    """Write an imported run with its ``records`` and ``judged`` findings and forecasts into ``store``, and end it.

    Each start of the trainer in the log is written as a separate attempt. No alerts are sent, since the log is of the
    past. ``now`` is in Unix seconds; ``ending`` gives the reason if the training stopped unfinished.
    """
    from rlwatch.layers import DerivedLayers

    last = max((record.ts for record in records), default=0.0) or now
    groups = [(attempt, list(group)) for attempt, group in groupby(records, key=lambda record: record.attempt)]
    for number, (attempt, group) in enumerate(groups, 1):
        writer = store.open_run(info)
        try:
            writer.write([*DerivedLayers().added(group), *(item for item in judged if item.attempt == attempt)])
            writer.write([], Progress(judged=writer.last_seq))  # else a dashboard would judge them, and send alerts
            if number == len(groups):
                stopped = ending is not None and ending.why
                state = RunState.UNFINISHED if stopped else RunState.FINISHED
                writer.finish(state, stopped or IMPORTED, last)
        finally:
            writer.close()


# The id of a log's run in the store.

LONGEST_ID = 120


def plain_id(name: str) -> str:
    """Return ``name`` with each other character that a run id may not contain replaced by ``-``.

    >>> plain_id("train v2: seed/3")
    'train-v2-seed-3'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:LONGEST_ID] or "imported"


@dataclass(frozen=True, slots=True)
class NamedLog:
    """A log to record: its path, format and mapping of names, and the project, name and id of its run in the store.

    Empty fields are filled from the log.
    """

    path: Path
    run: str | None = None
    read_as: str | None = None
    naming: Naming | None = None
    trainer: str = ""
    project: str = ""
    name: str = ""
    run_id: str | None = None

    def id_of(self, training: int = 1) -> str:
        """Return the id of a run recorded from the log, equal each time the log is watched.

        ``training`` counts the trainings in one log from 1; ids of later ones end in ``-2``, ``-3`` and so on.
        """
        first = self.run_id or log_id(self.path, self.run or "")
        return first if training == 1 else f"{first}-{training}"

    def info(self, name: str, source: str, now: float, about: About | None = None, training: int = 1) -> RunInfo:
        """Return the description of the recorded run for the store.

        Parameters
        ----------
        name, source
            Name and trainer of the run, unless this log has others.
        now
            Start time in Unix seconds.
        about
            Name, project, settings and tags found in the log.
        training
            Number of the training in the log, from 1.
        """
        from rlwatch.importers.tensorboard_events import called

        run_id = self.id_of(training)
        return RunInfo(
            run_id=run_id,
            project=self.project or (about.project if about else "") or PROJECT,
            name=called(self.name or (about.name if about else "") or name, training),
            source=self.trainer or source,
            created_at=now,
            config=recordable(about.config if about else {}),
            tags=("watched", *(about.tags if about else ())),
        )


def log_id(path: Path, run: str = "") -> str:
    """Return a run id for a log: the name of its file, or the ``run`` in it, and a digest of its path.

    >>> log_id(Path("/runs/a/train.log")) == log_id(Path("/runs/b/train.log"))
    False
    """
    trace = hashlib.sha256(f"{path.absolute()}\0{run}".encode(errors="surrogateescape")).hexdigest()[:8]
    return plain_id(f"{run or path.stem}-{trace}")
