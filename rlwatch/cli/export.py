"""``rlwatch export``: what a run recorded, for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli import serving_metrics
from rlwatch.cli.console import say
from rlwatch.cli.options import StoreOption, examples, opened
from rlwatch.errors import ConfigError
from rlwatch.export import TABLES, write_csv, write_jsonl, write_parquet

EPILOG = examples(
    "rlwatch export history math-7b-s3 history.parquet",
    "rlwatch export spikes 4f2a culprits.csv",
    "rlwatch export metrics --listen 127.0.0.1:9464",
)
WRITERS = {".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}
FORMATS = "*.csv, *.jsonl or *.parquet"

group = typer.Typer(no_args_is_help=True, help="Give what runs recorded to other tools.", epilog=EPILOG)
group.command("metrics", epilog=serving_metrics.EPILOG)(serving_metrics.metrics)

RunArgument = Annotated[str, typer.Argument(help="A run: its id, its name, or the unambiguous beginning of either.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help=f"A new file, {FORMATS}.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Write over the file if it is there.")]


def _add(kind: str) -> None:
    def export(run: RunArgument, file: FileArgument, *, store: StoreOption = None, force: ForceOption = False) -> None:
        _write(kind, run, file, store, force=force)

    group.command(
        kind,
        help=f"Write {TABLES[kind]}. Missing is empty, NaN and infinities are values.",
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
    with opened(store) as source:
        table = StoredRun(source, find_run(source, run).run_id).table(kind)
        try:
            number = writer(table, file)
        except OSError as error:
            raise ConfigError(f"{file} could not be written: {error}") from error
    say(f"{number} rows written to {file}")
