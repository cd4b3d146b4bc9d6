"""``rlwatch forecast label TABLE``: when each run of a table failed, and how."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, print_table, reading, say
from rlwatch.cli.options import Format, FormatOption, examples
from rlwatch.cli.wording import step

if TYPE_CHECKING:
    from rlwatch.forecast.evaluation import Labels

EPILOG = examples(
    "rlwatch forecast label runs.parquet",
    "rlwatch forecast label build/corpus --out labels.csv",
    "rlwatch forecast label runs.csv --format json",
)
TableArgument = Annotated[
    Path,
    typer.Argument(
        metavar="TABLE",
        help="Runs: a Parquet or CSV file (run, step and a column a metric; or run, step, metric, value), or a folder "
        "of Parquet files.",
    ),
]
RunsOption = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        metavar="FILE",
        help="What is known of each run: run, recipe, family, pair (the run it is the faultless twin of).",
        show_default="NAME-runs beside TABLE, if it is there",
    ),
]


def label(
    table: TableArgument,
    *,
    runs: RunsOption = None,
    version: Annotated[str, typer.Option("--version", help="Which table of limits.")] = "labels-v3",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write them here, as .csv or .parquet, and print none.")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Label each run: event, early (failed before step 55), ambiguous (nearly failed), faulty or clean.

    Faulty is a run that had not failed by its last row, though a fault was in it to the end. With the class come onset
    and type. What a run did not measure is not judged, and the label says what was.
    """
    from rlwatch.forecast.evaluation import label_runs, read_runs

    with reading(table):
        labels = label_runs(read_runs(table, runs), version)
    if out is not None:
        say(f"{labels.write(out)}: {counted(labels)}")
        return
    columns = labels.columns()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if output is Format.JSON:
        print_json(rows)
        return
    cells = [(str(r["run"]), str(r["class"]), step(r["onset"]), str(r["type"]), str(r["judged"])) for r in rows]
    print_table(("run", "class", ">onset", "type", "judged"), cells)
    say(counted(labels), style="dim")


def counted(labels: Labels) -> str:
    """How many of each class."""
    from rlwatch.forecast.evaluation import Outcome

    found = ", ".join(f"{labels.count(outcome)} {outcome}" for outcome in Outcome)
    return f"{len(labels)} runs by {labels.version}: {found}"
