"""``rlwatch export``: write the records of a run to files, or send them to other tools."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli import serving_metrics
from rlwatch.cli.console import print_text, progress_bar
from rlwatch.cli.options import StoreOption, examples, opened, require_directory
from rlwatch.errors import ConfigError
from rlwatch.export import TABLES, write_csv, write_jsonl, write_parquet, write_trace
from rlwatch.wording import plural

if TYPE_CHECKING:
    from rlwatch.analysis.runs import StoredRun
    from rlwatch.analysis.sending import Sent

EPILOG = examples(
    "rlwatch export history math-7b-s3 history.parquet",
    "rlwatch export spikes 4f2a culprits.csv",
    "rlwatch export mlflow math-7b-s3 --uri http://127.0.0.1:5000",
    "rlwatch export metrics --listen 127.0.0.1:9464",
)
WRITERS = {".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}
FORMATS = "*.csv, *.jsonl or *.parquet"

group = typer.Typer(no_args_is_help=True, help="Export recorded runs to files and other tools.", epilog=EPILOG)
group.command("metrics", epilog=serving_metrics.EPILOG)(serving_metrics.metrics)

RunArgument = Annotated[str, typer.Argument(help="Run: id, name or unique prefix.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help=f"Output file, {FORMATS}.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


def _add(kind: str) -> None:
    def export(run: RunArgument, file: FileArgument, *, store: StoreOption = None, force: ForceOption = False) -> None:
        _write(kind, run, file, store, force=force)

    group.command(
        kind,
        help=f"Write {TABLES[kind]}. Missing values are empty; NaN and infinities are kept.",
        epilog=examples(f"rlwatch export {kind} math-7b-s3 {kind}.parquet"),
    )(export)


for _kind in TABLES:
    _add(_kind)


def _write(kind: str, run: str, file: Path, store: str | None, *, force: bool) -> None:
    from rlwatch.analysis.runs import StoredRun

    writer = WRITERS.get(file.suffix.lower())
    if writer is None:
        raise ConfigError(f"the name of the file says its format, {FORMATS}: got {file.name!r}")
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; --force writes over it")
    require_directory(file)
    with opened(store) as source:
        table = StoredRun(source, find_run(source, run).run_id).table(kind)
        try:
            number = writer(table, file)
        except OSError as error:
            raise ConfigError(f"{file} could not be written: {error}") from error
    print_text(f"{number} rows written to {file}")


TRACE_EPILOG = examples(
    "rlwatch export trace math-7b-s3 -o trace.json",
    "rlwatch export trace math-7b-s3 -o trace.json --force",
)


@group.command("trace", epilog=TRACE_EPILOG)
def trace(
    run: RunArgument,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Output file, *.json.")],
    store: StoreOption = None,
    force: ForceOption = False,
) -> None:
    """Write a timeline of the stages of each step, a process for each rank: for ui.perfetto.dev or chrome://tracing."""
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; --force writes over it")
    require_directory(output)
    with opened(store) as source:
        try:
            slices = write_trace(source, find_run(source, run), output)
        except OSError as error:
            raise ConfigError(f"{output} could not be written: {error}") from error
    if not slices:
        print_text("no stages recorded: watch(trainer), run.stage() and Watcher.stage() record them", style="yellow")
    print_text(f"{plural(slices, 'slice')} written to {output}; open it at https://ui.perfetto.dev")


# Export of a run to another tracker.

AT_ONCE = 1_000
"""Number of rows sent to a tracker from which a progress bar is drawn."""
SENDING = partial(progress_bar, worth=AT_ONCE, what="sending")


@group.command("tensorboard", epilog=examples("rlwatch export tensorboard math-7b-s3 tb/math-7b-s3"))
def tensorboard(
    run: RunArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory without event files.")],
    *,
    store: StoreOption = None,
) -> None:
    """Write an event file for TensorBoard: metrics, findings, settings and tags. Numbers have 32 bits there."""
    _send(run, store, lambda one: one.to_tensorboard(directory, progress=SENDING))


@group.command(
    "wandb",
    epilog=examples(
        "rlwatch export wandb math-7b-s3 --project math-rl",
        "rlwatch export wandb math-7b-s3 --offline --dir out && wandb sync out/wandb/offline-run-*",
    ),
)
def wandb(
    run: RunArgument,
    *,
    project: Annotated[str, typer.Option("--project", help="wandb project.", show_default="the run's project")] = "",
    entity: Annotated[
        str | None, typer.Option("--entity", help="wandb team or user.", show_default="wandb's default")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Write files only, for a later `wandb sync`.")] = False,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Parent of the wandb/ output directory.")
    ] = Path(),
    store: StoreOption = None,
) -> None:
    """Create a wandb run with the same id: metrics, findings, settings and tags. An existing run is not changed."""
    _send(
        run,
        store,
        lambda one: one.to_wandb(
            project=project, entity=entity, offline=offline, directory=directory, progress=SENDING
        ),
    )


@group.command("mlflow", epilog=examples("rlwatch export mlflow math-7b-s3 --uri http://127.0.0.1:5000"))
def mlflow(
    run: RunArgument,
    *,
    uri: Annotated[
        str | None,
        typer.Option("--uri", help="MLflow tracking URI.", show_default="MLFLOW_TRACKING_URI, or MLflow's own"),
    ] = None,
    experiment: Annotated[
        str, typer.Option("--experiment", help="MLflow experiment.", show_default="the run's project")
    ] = "",
    store: StoreOption = None,
) -> None:
    """Create an MLflow run: metrics, findings, settings and tags. An existing run is not changed.

    MLflow databases store infinities as the largest float.
    """
    os.environ.setdefault(
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"
    )  # the default of 7 takes minutes if the server is unreachable
    _send(run, store, lambda one: one.to_mlflow(uri, experiment=experiment, progress=SENDING))


def _send(run: str, store: str | None, to: Callable[[StoredRun], Sent]) -> None:
    from rlwatch.analysis.runs import StoredRun

    with opened(store) as source:
        sent = to(StoredRun(source, find_run(source, run).run_id))
    print_text(f"{plural(sent.rows, 'row')}, {plural(sent.values, 'value')} sent: {sent.where}")
    if sent.renamed:
        print_text(
            "renamed: " + ", ".join(f"{own} as {other}" for own, other in sent.renamed.items()),
            style="dim",
        )
