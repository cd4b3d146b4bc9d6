"""What the shipped forecaster is worth on each kind of log: the table that its gate goes by, and a picture of it.

Other people's runs are the public sets beside the repository. Of per-token logs no other people's runs are known:
there the runs are rlwatch's own, of recipes (corpus) that the judged model has not seen, and of the shard ``small``,
which no model has seen.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from detection.runs import Labelled, labelled, named
from forecast.held_out import calibrated
from forecast.scoring.baselines import Extrapolation
from forecast.scoring.classes import HORIZONS, Floats, Rows, diagram, picture, skill

from rlwatch import __version__
from rlwatch.cli.options import examples
from rlwatch.errors import ImportFormatError
from rlwatch.forecast.examples import Row, Split, folds_of
from rlwatch.forecast.forecaster import Forecaster
from rlwatch.forecast.gate import Evidence, LogClass, skill_of
from rlwatch.forecast.labels import Label, RunOutcome, label_runs
from rlwatch.forecast.tables import RunTable, read_runs
from rlwatch.forecast.training import TreeSettings, out_of_fold, prepare
from rlwatch.importers.registry import read_log
from rlwatch.records import ClosedStep

EXAMPLES = examples("python -m benchmarks.forecast classes build/corpus --into rlwatch/forecast/shipped/skill.json")
OTHERS, HELD_OUT, SMALL = "other people", "rlwatch, recipes held out", "rlwatch, small batches"
PUBLIC = ("real_runs", "real_runs_2", "wild")
THIRD, FOLDS = 3, 3
"""Every third run of the corpus is judged, in so many folds by recipe: an hour less than all of them."""
TRL = "TRL's log"
JUDGED = {"healthy", "transient", "instability", "crash", "clean", "event"}
DECIDES = {
    LogClass.TAPS: HELD_OUT,
    LogClass.TAPS_SMALL: SMALL,
    LogClass.FINE: OTHERS,
    LogClass.COARSE: OTHERS,
    LogClass.SPARSE: OTHERS,
}
"""Whose runs a class is opened or closed by: other people's, where there are any."""


@dataclass
class Gathered:
    """Columns of :class:`Rows` of one class and one kind of people, run by run."""

    projects: list[str] = field(default_factory=list)
    parts: list[tuple[Floats, Floats, Floats, Floats, Floats]] = field(default_factory=list)

    def add(self, project: str, steps: Floats, p: Floats, line: Floats, first: int, onset: float, last: int) -> None:
        """Rows of a run before its failure (infinite: it has none)."""
        before = steps < onset
        if before.any():
            self.projects.append(project)
            at = steps[before]
            self.parts.append((p[before], at - first, line[before], onset - at, last - at))

    def rows(self) -> Rows:
        """All of them."""
        number = {name: i for i, name in enumerate(sorted(set(self.projects)))}
        lengths = [len(part[1]) for part in self.parts]
        run = np.repeat(np.arange(len(lengths)), lengths)
        project = np.repeat([number[name] for name in self.projects], lengths)
        p, clock, line, ahead, left = (np.concatenate(each) for each in zip(*self.parts, strict=True))
        return Rows(run, project, p, clock, line, ahead, left)


Found = defaultdict[tuple[str, str], Gathered]


def classes(
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", help="Folder with corpus.parquet and small.parquet.")],
    *,
    into: Annotated[Path, typer.Option("--into", help="The gate's table.")],
    drawn: Annotated[Path, typer.Option("--picture", help="The reliability diagrams.")] = Path(
        "docs/pictures/forecast-reliability.svg"
    ),
) -> None:
    """Judge forecasts by kind of log, beside a clock and a straight line: the table of the gate, and its picture."""
    written(gathered(corpus), f"python -m benchmarks.forecast classes {corpus} --into {into}", into, drawn)


def written(found: Found, made_by: str, into: Path, drawn: Path) -> None:
    """Write both, and print the table as the guide shows it."""
    table_of = [line for key in sorted(found) if (line := row(*key, found[key].rows())) is not None]
    into.write_text(json.dumps({"made by": made_by, "rlwatch": __version__, "classes": table_of}, indent=1) + "\n")
    shown = [(f"{each['class']} ({each['people']})", each["diagram"]) for each in table_of if each["decides"]]
    drawn.write_text(picture(shown, escape))
    print(*markdown(table_of), sep="\n")


def gathered(corpus: Path) -> Found:
    """Rows of all runs that are judged, by kind of log and whose runs they are."""
    found: Found = defaultdict(Gathered)
    for run in public():
        as_shipped(found, OTHERS, run.run.project, run.rows, run.run.onset if run.run.event else None)
    table = read_runs(corpus / "small.parquet")
    for i, label in enumerate(label_runs(table).of(table)):
        if label.outcome.value in JUDGED:
            as_shipped(found, SMALL, table.recipes[i], list(table.stream(i)), label.onset)
    held_out(found, read_runs(corpus / "corpus.parquet"))
    return found


def public() -> Iterator[Labelled]:
    """Runs of others whose label is without doubt, and that failed or did well."""
    sets = [run for name in PUBLIC for run in named(name)]
    yield from (run for run in sets if run.run.severity in JUDGED and not run.run.doubt)
    yield from third_set(Path(__file__).parents[3] / "shared" / "real_runs_3")


def third_set(folder: Path) -> Iterator[Labelled]:
    """Healthy runs of the third public set, which lie there as their owners left them."""
    import csv

    if not folder.is_dir():
        return
    with (folder / "index.csv").open(newline="") as file:
        listed = [entry for entry in csv.DictReader(file) if entry["label"] == "healthy"]
    for entry in listed:
        path = folder / "files" / entry["repo"].replace("/", "+") / entry["path"]
        try:
            (run,) = read_log(path)
        except (ImportFormatError, ValueError):
            continue
        yield labelled(run, "healthy", project=entry["repo"], name=entry["run_id"])


def as_shipped(found: Found, people: str, project: str, rows: Sequence[Row], onset: float | None) -> None:
    """Chances of the shipped model, ungated, of a run."""
    forecasts = Forecaster().extend([ClosedStep(step, metrics) for step, metrics in rows])
    told = [(i, each) for i, each in enumerate(forecasts) if each.p50 is not None]
    if not told:
        return
    places, line = [i for i, _ in told], lines(rows)
    p = np.array([[each.p20, each.p50, each.p100] for _, each in told], dtype=np.float64)
    steps = np.array([rows[i][0] for i in places], dtype=np.float64)
    end = np.inf if onset is None else onset
    found[told[0][1].log, people].add(project, steps, p, line[places], rows[0][0], end, rows[-1][0])


def lines(rows: Iterable[Row]) -> Floats:
    """Nearness of a limit on a straight line, at each row; 0 where nothing is known."""
    tool = Extrapolation()
    return np.array([tool.update(step, metrics) or 0.0 for step, metrics in rows])


def held_out(found: Found, whole: RunTable) -> None:
    """Chances of models that have not seen the run's recipe, of every third run of the corpus."""
    table = whole.only(list(range(0, len(whole.runs), THIRD)))
    labels = label_runs(table)
    parts, fold = prepare(table, labels, progress=print), folds_of(table, Split.RECIPE, FOLDS)
    scored = parts.scored
    logits = out_of_fold(scored, parts.coarse, fold, TreeSettings(), profiles=["taps", TRL], progress=print)
    chances = {name: calibrated(scored, fold, each, logits["taps"]) for name, each in logits.items()}
    fine = parts.fine
    for i, label in enumerate(labels.of(table)):
        if label.outcome.value not in JUDGED:
            continue
        rows = list(table.stream(i))
        mine = np.flatnonzero(fine.run == i)
        steps = fine.step[mine].astype(np.float64)
        line = lines(rows)[np.searchsorted([step for step, _ in rows], fine.step[mine])]
        for name, kind in (("taps", log_of(rows)), (TRL, LogClass.FINE.value)):
            found[kind, HELD_OUT].add(
                table.recipes[i], steps, chances[name][mine], line, rows[0][0], _end(label), rows[-1][0]
            )


def _end(label: Label) -> float:
    return label.onset if label.outcome is RunOutcome.EVENT and label.onset is not None else np.inf


def log_of(rows: Sequence[Row]) -> str:
    """Kind of a run's log, as its first forecast names it."""
    forecaster = Forecaster()
    for step, metrics in rows:
        kind = forecaster.update(ClosedStep(step, metrics)).log
        if kind:
            return kind
    return ""


def row(kind: str, people: str, rows: Rows) -> dict[str, Any] | None:
    """One line of the table; None of what is no kind of log."""
    if not kind:
        return None
    by_horizon = {f"within {h} steps": skill(rows, h) for h in HORIZONS}
    decides = DECIDES[LogClass(kind)] == people
    return {"class": kind, "people": people, "decides": decides, **by_horizon, "diagram": diagram(rows)}


def markdown(table: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table as the guide shows it, at 50 steps."""
    heads: tuple[str, ...] = ("log", "whose runs", "runs, failing", "AUROC", "over a clock", "over a line")
    heads += ("Brier skill over a clock", "over a line", "calibration error", "chance shown")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for each in table:
        at = each["within 50 steps"]
        if at is None:
            yield f"| {each['class']} | {each['people']} | none that fails | | | | | | | no |"
            continue
        gains = " | ".join(
            "{:+.2f} [{:+.2f}, {:+.2f}]".format(*at[f"{kind}_over_{name}"])
            for kind in ("auroc", "brier")
            for name in ("clock", "line")
        )
        runs = f"{at['runs']}, {at['failures']}"
        skill = skill_of(each)
        answer = "yes" if skill.shown() else "with `own`" if skill.shown(Evidence.OWN) else "no"
        shown = answer if each["decides"] else ""
        cells = (
            each["class"],
            each["people"],
            runs,
            f"{at['auroc']:.2f}",
            gains,
            f"{at['calibration_error']:.3f}",
            shown,
        )
        yield f"| {' | '.join(cells)} |"
