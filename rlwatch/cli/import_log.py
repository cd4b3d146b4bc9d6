"""``rlwatch import LOG``: a log becomes a finished run of the store, so that the dashboard shows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, say
from rlwatch.cli.importing import import_run, info_of, require_new
from rlwatch.cli.log_run import plain_id
from rlwatch.cli.options import (
    Format,
    FormatOption,
    LogArgument,
    ReadAsOption,
    RunOfLogOption,
    StoreOption,
    TrainerOption,
    examples,
)
from rlwatch.cli.progress import progress_bar, reading
from rlwatch.cli.stores import opened
from rlwatch.errors import ConfigError, ImportFormatError
from rlwatch.records import JSON

if TYPE_CHECKING:
    from rlwatch.importers import ImportedRun
    from rlwatch.ports import Store
    from rlwatch.records import RunInfo

EPILOG = examples(
    "rlwatch import train.log --project math-rl --name seed3",
    "rlwatch import runs.csv --run seed3",
    "rlwatch show $(rlwatch import train.log)",
)


def import_log(
    log: LogArgument,
    *,
    project: Annotated[str, typer.Option("--project", help="The project the run belongs to.")] = "default",
    name: Annotated[str, typer.Option("--name", help="What people call the run.", show_default="its id")] = "",
    run: RunOfLogOption = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="ID", help="Its id in the store.", show_default="made of the file's name"),
    ] = None,
    read_as: ReadAsOption = None,
    source: TrainerOption = "",
    store: StoreOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Copy a log's records and findings into the store as finished runs; prints their ids.

    An id the store has already is refused, and then nothing is imported.
    """
    from rlwatch.importers import read_log

    with reading(log):
        runs = read_log(log, run=run, format=read_as)
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
    if output is Format.JSON:
        print_json(rows)
    else:
        for row in rows:
            say(row["run_id"])


def _import(store: Store, info: RunInfo, imported: ImportedRun, now: float) -> dict[str, JSON]:
    from rlwatch.scanner import replay

    report = replay(imported, source=info.source, progress=progress_bar)
    import_run(store, info, list(imported.records), [*report.findings, *report.forecasts], now)
    return {"run_id": info.run_id, "steps": report.steps, "findings": len(report.findings), "format": report.format}
