"""Any tool's scores or alarms judged by one protocol, and the leaderboard's page made of such evaluations."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from forecast.scoring.baselines import ceilings, run_baselines
from forecast.scoring.pages import Page, facts, leaderboard_page, pages
from forecast.scoring.scorer import evaluate as judged
from forecast.scoring.skill import ToolScores, read_scores

from rlwatch import __version__
from rlwatch.cli.console import dumps, print_table, print_text, reading
from rlwatch.cli.forecast import RunsOption, TableArgument, bar
from rlwatch.cli.options import examples
from rlwatch.errors import ConfigError, ImportFormatError
from rlwatch.forecast.examples import Split
from rlwatch.forecast.labels import Labels, label_runs, labels_of_index, read_labels
from rlwatch.forecast.tables import RunTable, read_runs

EVALUATE_EXAMPLES = examples(
    "python -m benchmarks.forecast evaluate runs.parquet",
    "python -m benchmarks.forecast evaluate runs.parquet --scores mine.csv --scores other=theirs.parquet",
    "python -m benchmarks.forecast evaluate runs.parquet --split recipe --scores mine.csv --format json --out by.json",
    "python -m benchmarks.forecast evaluate real.csv.gz --index index.csv --split none",
)


class Shape(StrEnum):
    """Forms of an evaluation."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


ScoresOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scores",
        metavar="[NAME=]FILE",
        help="A tool: a CSV or Parquet file with run, step and score (the higher the worse; empty or nan: no forecast) "
        "or alarm (0 or 1); p20, p50 and p100 too, if it gives chances. Once for each tool.",
    ),
]
SplitOption = Annotated[
    Split,
    typer.Option(
        "--split",
        help="Thresholds come from other runs (run), other recipes (recipe), other families (family), or are picked on "
        "the scored runs themselves (none).",
    ),
]


def evaluate(
    table: TableArgument,
    *,
    runs: RunsOption = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", help="Labels of the runs.", show_default="made by labels-v3"),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option("--index", metavar="FILE", help="Labels that people gave: run_id, severity, onset_step; repo."),
    ] = None,
    scores: ScoresOption = None,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Simple tools to compare with: never, a clock, CUSUM...")
    ] = True,
    split: SplitOption = Split.RUN,
    folds: Annotated[int, typer.Option("--folds", min=2, max=20, help="How many folds.")] = 5,
    draws: Annotated[int, typer.Option("--draws", min=20, help="Bootstrap draws over runs, for 90 % intervals.")] = 300,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws.")] = 0,
    shape: Annotated[Shape, typer.Option("--format", help="A table for people, JSON, or a page of Markdown.")] = (
        Shape.TABLE
    ),
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it here and print nothing.")] = None,
) -> None:
    """Judge tools that forecast failures: recall at a budget of false alarms, lead, calibration, beside a placebo.

    Nothing of a tool is read but its file. Without --scores only the simple tools are judged.
    """
    with reading(table):
        rows, known = _read(table, runs, labels, index)
        tools = _tools(rows, scores or [])
    if baselines:
        tools = [*run_baselines(rows, bar("running simple tools")), *ceilings(rows, known), *tools]
    if not tools:
        raise ConfigError("there is nothing to judge: give --scores, or leave out --no-baselines")
    made = judged(
        rows, known, tools, split=split.value, folds=folds, draws=draws, seed=seed, progress=bar("judging")
    ).to_dict()
    made["about"] |= _origin(table)
    _show(made, shape, out, rows.notes)


def _read(table: Path, runs: Path | None, labels: Path | None, index: Path | None) -> tuple[RunTable, Labels]:
    if labels is not None and index is not None:
        raise ConfigError("--labels and --index both say what became of the runs; give one")
    rows = read_runs(table, runs)
    if labels is not None:
        return rows, read_labels(labels)
    return rows, label_runs(rows) if index is None else labels_of_index(index)


def _tools(rows: RunTable, given: Sequence[str]) -> list[ToolScores]:
    tools = []
    for each in given:
        name, equals, path = each.partition("=")
        tools.append(read_scores(Path(path if equals else each), rows, name if equals else ""))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two tools are called {name!r}; name them: --scores NAME=FILE")
    return tools


def _origin(table: Path) -> dict[str, Any]:
    """Table, version and command that an evaluation comes from."""
    words = ["python", "-m", "benchmarks.forecast", *(sys.argv[1:] if sys.argv[1:2] == ["evaluate"] else ())]
    return {"table": table.name, "rlwatch": __version__, "command": " ".join(words)}


def _show(made: dict[str, Any], shape: Shape, out: Path | None, notes: Sequence[str]) -> None:
    if shape is Shape.TABLE and out is None:
        print_text(facts(made["about"]))
        for note in notes:
            print_text(note, style="dim")
        for page in pages(made, each=False):
            _print(page)
        return
    if shape is Shape.JSON:
        text = dumps(made) + "\n"
    else:
        text = "\n".join((facts(made["about"]), "", *(page.markdown() for page in pages(made))))
    write_text(out, text)


def _print(page: Page) -> None:
    print_text()
    print_table((page.headers[0], *(f">{header}" for header in page.headers[1:])), page.rows, title=page.title)
    print_text(page.note, style="dim")


LEADERBOARD_EXAMPLES = examples(
    "python -m benchmarks.forecast leaderboard run.json recipe.json real.json --out docs/forecast-leaderboard.md",
    "python -m benchmarks.forecast leaderboard 'Recipes held out=recipe.json'",
)


def leaderboard(
    evaluations: Annotated[
        list[str],
        typer.Argument(metavar="[TITLE=]FILE...", help="What evaluate --format json wrote."),
    ],
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it here and print nothing.")] = None,
) -> None:
    """Make the leaderboard's page (Markdown) from evaluations, with the commands that made them."""
    write_text(out, leaderboard_page([_section(each) for each in evaluations]))


def _section(given: str) -> tuple[str, dict[str, Any]]:
    title, equals, path = given.partition("=")
    file = Path(path if equals else given)
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        return title if equals else "", {"about": made["about"], "tools": made["tools"]}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise ImportFormatError(str(file), "is no evaluation; make one with evaluate --format json") from None


def write_text(path: Path | None, text: str) -> None:
    """Write ``text``, whole or not at all: beside ``path`` and then put it in its place; without a path, on stdout."""
    if path is None:
        sys.stdout.write(text)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)  # noqa: PTH105  (atomic on one file system)
    finally:
        beside.unlink(missing_ok=True)
