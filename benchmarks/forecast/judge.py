"""The forecaster, poorer versions of it and simple tools, judged by one protocol; makes the leaderboard.

    python benchmarks/forecast/judge.py build/corpus --out build/judged
    python benchmarks/forecast/judge.py build/corpus --out build/judged --page page.md \
        --scores "rlwatch alarms=build/tools/rlwatch-any.csv" --external ../shared/real_runs

Known recipes: five folds by run. Recipes held out: five folds by recipe, so that no run of a failure's recipe is learnt
from. For each fold the model is trained, calibrated and given its thresholds on the others. External: the shipped model
and all of ``rlwatch scan`` on runs of others, with labels of an index (a folder with ``runs.csv.gz`` and
``index.csv``), also repository by repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent)  # not this folder: its module `statistics` would hide the standard one

from forecast.held_out import Tool, ablations, tools_of, write_tools  # noqa: E402
from rich.progress import track  # noqa: E402

from rlwatch import __version__  # noqa: E402
from rlwatch.forecast import Forecaster  # noqa: E402
from rlwatch.forecast.evaluation import (  # noqa: E402
    Labels,
    RunTable,
    ToolScores,
    evaluate,
    label_runs,
    labels_of_index,
    read_runs,
    read_scores,
)
from rlwatch.forecast.evaluation.baselines import run_baselines  # noqa: E402
from rlwatch.forecast.evaluation.ceiling import ceilings  # noqa: E402
from rlwatch.forecast.evaluation.leaderboard import page  # noqa: E402
from rlwatch.forecast.training.grow import Growth  # noqa: E402
from rlwatch.forecast.training.train import Prepared, prepare  # noqa: E402
from rlwatch.records import ClosedStep, Severity, StepRecord  # noqa: E402
from rlwatch.scanner import scan  # noqa: E402

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


def main() -> None:
    """Judge, write what was found, make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for scores and evaluations")
    parser.add_argument("--page", type=Path, help="write the leaderboard here")
    parser.add_argument("--scores", action="append", default=[], metavar="NAME=FILE", help="another tool's alarms")
    parser.add_argument("--external", type=Path, help="folder with runs.csv.gz and index.csv")
    parser.add_argument("--command", default="", help="what the page says it was made by; this command if not given")
    parser.add_argument("--no-ablations", action="store_true", help="leave out models that lack something")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trees", type=int, default=Growth().trees)
    args = parser.parse_args()
    command = args.command or " ".join(("python", *sys.argv))
    table = read_runs(args.table)
    labels = label_runs(table)
    corpus = Corpus(table, labels, prepare(table, labels, jobs=args.jobs, tell=print))
    how = Growth(trees=args.trees)
    simple = run_baselines(table, lambda items: track(items, description="simple tools"))
    simple += ceilings(table, labels)
    others = [read_scores(Path(path), table, name) for name, _, path in (each.partition("=") for each in args.scores)]
    made = {}
    for split in ("run", "recipe"):
        tools = tools_of(table, labels, corpus.parts, split, how, args.jobs)
        if not args.no_ablations and split == "recipe":
            tools += ablations(table, corpus.parts, split, how, args.jobs)
        write_tools(args.out / "scores", split, table, corpus.parts.fine, tools)
        all_tools = [*map(corpus.aligned, tools), *others, *simple]
        made[split] = told(evaluate(table, labels, all_tools, split=split).to_dict(), command, args.out, split)
    if args.external:
        made["external"] = told(external(args.external), command, args.out, "external")
    if args.page:
        args.page.write_text(page([(TITLES[name], found) for name, found in made.items()]))


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


def told(made: dict[str, Any], command: str, out: Path, name: str) -> dict[str, Any]:
    """Written as JSON, with where it came from."""
    made["about"] |= {"rlwatch": __version__, "command": command}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(made, indent=1))
    return made


if __name__ == "__main__":
    main()
