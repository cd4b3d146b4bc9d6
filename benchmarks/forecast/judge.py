"""The forecaster, poorer versions of it and simple tools, judged by one protocol; makes the leaderboard.

Known recipes: five folds by run. Recipes held out: five folds by recipe, so that no run of a failure's recipe is learnt
from. For each fold the model is trained, calibrated and given its thresholds on the others. External: the shipped model
and all of ``rlwatch scan`` on runs of others, with labels of an index (a folder with ``runs.csv.gz`` and
``index.csv``), also repository by repository.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from forecast.held_out import Tool, ablations, tools_of, write_tools
from forecast.scoring.baselines import ceilings, run_baselines
from forecast.scoring.pages import leaderboard_page
from forecast.scoring.scorer import evaluate
from forecast.scoring.skill import ToolScores, read_scores
from rich.progress import track

from rlwatch import __version__
from rlwatch.cli.options import examples
from rlwatch.forecast import Forecaster
from rlwatch.forecast.labels import Labels, label_runs, labels_of_index
from rlwatch.forecast.tables import RunTable, read_runs
from rlwatch.forecast.training import Prepared, TreeSettings, prepare
from rlwatch.records import ClosedStep, Severity, StepRecord
from rlwatch.scanner import scan

TITLES = {"run": "Known recipes", "recipe": "Recipes held out", "external": "Runs of others"}


@dataclass(frozen=True)
class Corpus:
    """Runs, labels, examples."""

    table: RunTable
    labels: Labels
    parts: Prepared

    def aligned(self, tool: Tool) -> ToolScores:
        """Scores of the examples as those of the table's rows; NaN before there is a forecast."""
        fine = self.parts.fine
        starts = self.table.starts[fine.run]
        rows = np.empty(len(fine), dtype=np.int64)
        for i in range(len(self.table.runs)):
            mine = fine.run == i
            rows[mine] = starts[mine] + np.searchsorted(self.table.step[self.table.rows(i)], fine.step[mine])
        score = np.full(len(self.table), np.nan)
        score[rows] = tool.score
        chances = {}
        for column, horizon in enumerate((20, 50, 100) if tool.p is not None else ()):
            chances[horizon] = np.full(len(self.table), np.nan)
            chances[horizon][rows] = tool.p[:, column]  # type: ignore[index]
        return ToolScores(tool.name, score, chances=chances)


EXAMPLES = examples(
    "python -m benchmarks.forecast judge build/corpus --out build/judged",
    "python -m benchmarks.forecast judge build/corpus --out build/judged --page page.md "
    "--scores alarms=build/tools/rlwatch-any.csv --external FOLDER",
)


def judge(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Runs: a file, or a folder of shards.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for scores and evaluations.")],
    page_file: Annotated[Path | None, typer.Option("--page", help="Write the leaderboard here.")] = None,
    scores: Annotated[
        list[str] | None, typer.Option("--scores", metavar="NAME=FILE", help="Another tool's alarms.")
    ] = None,
    external_runs: Annotated[
        Path | None, typer.Option("--external", help="Folder with runs.csv.gz and index.csv.")
    ] = None,
    command: Annotated[str, typer.Option("--command", help="Said to have made the page; by default this one.")] = "",
    ablated: Annotated[bool, typer.Option("--ablations/--no-ablations", help="Models that lack something.")] = True,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 1,
    trees: Annotated[int, typer.Option("--trees", min=5, help="Trees of each hazard.")] = TreeSettings().trees,
) -> None:
    """Judge the forecaster fold by fold beside simple tools, write what came of it, and make the leaderboard's page."""
    made_by = command or " ".join(("python", *sys.argv))
    rows = read_runs(table)
    labels = label_runs(rows)
    corpus = Corpus(rows, labels, prepare(rows, labels, jobs=jobs, progress=print))
    how = TreeSettings(trees=trees)
    simple = run_baselines(rows, lambda items: track(items, description="simple tools"))
    simple += ceilings(rows, labels)
    named = (each.partition("=") for each in scores or [])
    others = [read_scores(Path(path), rows, name) for name, _, path in named]
    made = {}
    for split in ("run", "recipe"):
        tools = tools_of(rows, labels, corpus.parts, split, how, jobs)
        if ablated and split == "recipe":
            tools += ablations(rows, corpus.parts, split, how, jobs)
        write_tools(out / "scores", split, rows, corpus.parts.fine, tools)
        all_tools = [*map(corpus.aligned, tools), *others, *simple]
        made[split] = written(evaluate(rows, labels, all_tools, split=split).to_dict(), made_by, out, split)
    if external_runs:
        made["external"] = written(external(external_runs), made_by, out, "external")
    if page_file:
        page_file.write_text(leaderboard_page([(TITLES[name], each) for name, each in made.items()]))


def external(folder: Path) -> dict[str, Any]:
    """The shipped model on runs of others, beside the simple tools."""
    table = read_runs(folder / "runs.csv.gz")
    labels = labels_of_index(folder / "index.csv")
    tools: Sequence[ToolScores] = [*shipped(table), *scanned(table), *run_baselines(table)]
    return evaluate(table, labels, tools, split="none").to_dict()


def shipped(table: RunTable) -> list[ToolScores]:
    """Risk at each row, and the alarms at the default threshold."""
    risk = np.full(len(table), np.nan)
    for i in range(len(table.runs)):
        forecaster = Forecaster()
        found = [forecaster.update(ClosedStep(step, metrics)) for step, metrics in table.stream(i)]
        risk[table.rows(i)] = [np.nan if forecast.risk is None else forecast.risk for forecast in found]
    alarm = np.where(risk >= 1.0, 1.0, np.nan)
    return [ToolScores("rlwatch", risk), ToolScores("rlwatch as shipped", alarm, alarms_only=True)]


def scanned(table: RunTable) -> list[ToolScores]:
    """All that ``rlwatch scan`` says, forecasts among it, and what of it is critical."""
    found = {"rlwatch scan": np.full(len(table), np.nan), "rlwatch scan, critical": np.full(len(table), np.nan)}
    for i in range(len(table.runs)):
        records = [StepRecord(step, metrics) for step, metrics in table.stream(i)]
        place = {record.step: row for row, record in enumerate(records, start=int(table.starts[i]))}
        for alarm in scan(records).alarms:
            found["rlwatch scan"][place[alarm.step]] = 1.0
            if alarm.severity is Severity.CRITICAL:
                found["rlwatch scan, critical"][place[alarm.step]] = 1.0
    return [ToolScores(name, score, alarms_only=True) for name, score in found.items()]


def written(made: dict[str, Any], command: str, out: Path, name: str) -> dict[str, Any]:
    """Write an evaluation as JSON, with where it came from."""
    made["about"] |= {"rlwatch": __version__, "command": command}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(made, indent=1))
    return made
