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
from rlwatch.export import spike_table, write_csv, write_parquet

EPILOG = examples(
    "rlwatch export spikes math-7b-s3 culprits.parquet",
    "rlwatch export spikes 4f2a culprits.csv",
    "rlwatch export metrics --listen 127.0.0.1:9464",
)
WRITERS = {".csv": write_csv, ".parquet": write_parquet}

group = typer.Typer(no_args_is_help=True, help="Give what runs recorded to other tools.", epilog=EPILOG)
group.command("metrics", epilog=serving_metrics.EPILOG)(serving_metrics.metrics)


@group.command("spikes", epilog=EPILOG)
def spikes(
    run: Annotated[str, typer.Argument(help="A run: its id, its name, or the unambiguous beginning of either.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, *.csv or *.parquet.")],
    *,
    store: StoreOption = None,
    force: Annotated[bool, typer.Option("--force", help="Write over the file if it is there.")] = False,
) -> None:
    """Write the culprits of all localised spikes of a run, a row each; docs/localisation.md lists the columns."""
    writer = WRITERS.get(file.suffix.lower())
    if writer is None:
        raise ConfigError(f"the name of the file says its format, *.csv or *.parquet: got {file.name!r}")
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; --force writes over it")
    with opened(store) as source:
        rows = spike_table(source, find_run(source, run))
    try:
        writer(rows, file)
    except OSError as error:
        raise ConfigError(f"{file} could not be written: {error}") from error
    steps = len({(row["attempt"], row["step"]) for row in rows})
    say(f"{len(rows)} rows of {steps} localised steps written to {file}")
