"""``rlwatch forecast evaluate TABLE``: any tool's scores or alarms, judged by one protocol."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rlwatch.cli.console import dumps, errors, print_table, reading, say
from rlwatch.cli.forecast_label import RunsOption, TableArgument
from rlwatch.cli.options import examples
from rlwatch.cli.written import write_text
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.forecast.evaluation import Labels, RunTable, ToolScores
    from rlwatch.forecast.evaluation.pages import Page

EPILOG = examples(
    "rlwatch forecast evaluate runs.parquet",
    "rlwatch forecast evaluate runs.parquet --scores mine.csv --scores other=theirs.parquet",
    "rlwatch forecast evaluate runs.parquet --split recipe --scores mine.csv --format json --out recipe.json",
    "rlwatch forecast evaluate real.csv.gz --index index.csv --split none",
)
Item = TypeVar("Item")


class Shape(StrEnum):
    """What is printed."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


class SplitBy(StrEnum):
    """How runs are dealt into folds; see :class:`rlwatch.forecast.evaluation.Split`."""

    RUN = "run"
    RECIPE = "recipe"
    FAMILY = "family"
    NONE = "none"


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
    SplitBy,
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
    split: SplitOption = SplitBy.RUN,
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
    from rlwatch.forecast.evaluation import evaluate as judged

    with reading(table):
        rows, known = _read(table, runs, labels, index)
        tools = _tools(rows, scores or [])
    if baselines:
        from rlwatch.forecast.evaluation.baselines import run_baselines
        from rlwatch.forecast.evaluation.ceiling import ceilings

        tools = [*run_baselines(rows, bar("running simple tools")), *ceilings(rows, known), *tools]
    if not tools:
        raise ConfigError("there is nothing to judge: give --scores, or leave out --no-baselines")
    made = judged(
        rows, known, tools, split=split.value, folds=folds, draws=draws, seed=seed, progress=bar("judging")
    ).to_dict()
    made["about"] |= _origin(table)
    _show(made, shape, out, rows.notes)


def _read(table: Path, runs: Path | None, labels: Path | None, index: Path | None) -> tuple[RunTable, Labels]:
    from rlwatch.forecast.evaluation import label_runs, labels_of_index, read_labels, read_runs

    if labels is not None and index is not None:
        raise ConfigError("--labels and --index both say what became of the runs; give one")
    rows = read_runs(table, runs)
    if labels is not None:
        return rows, read_labels(labels)
    return rows, label_runs(rows) if index is None else labels_of_index(index)


def _tools(rows: RunTable, given: Sequence[str]) -> list[ToolScores]:
    from rlwatch.forecast.evaluation import read_scores

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
    """What made this: the table, the version, the command."""
    from rlwatch import __version__

    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv[1:2] == ["forecast"] else ["rlwatch", "forecast"]
    return {"table": table.name, "rlwatch": __version__, "command": " ".join(words)}


def _show(made: dict[str, Any], shape: Shape, out: Path | None, notes: Sequence[str]) -> None:
    from rlwatch.forecast.evaluation.pages import facts, pages

    if shape is Shape.TABLE and out is None:
        say(facts(made["about"]))
        for note in notes:
            say(note, style="dim")
        for page in pages(made, each=False):
            _print(page)
        return
    if shape is Shape.JSON:
        text = dumps(made) + "\n"
    else:
        text = "\n".join((facts(made["about"]), "", *(page.markdown() for page in pages(made))))
    write_text(out, text)


def _print(page: Page) -> None:
    say()
    print_table((page.headers[0], *(f">{header}" for header in page.headers[1:])), page.rows, title=page.title)
    say(page.note, style="dim")


def bar(description: str) -> Callable[[Sequence[Item]], Iterable[Item]]:
    """Wraps a sequence in a progress bar on stderr, where a terminal is there to see it."""

    def wrapped(items: Sequence[Item]) -> Iterable[Item]:
        if not sys.stderr.isatty():
            return items
        from rich.progress import track

        return track(items, description=description, console=errors(), transient=True)

    return wrapped
