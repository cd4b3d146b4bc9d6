"""``rlwatch forecast``: label runs, train a forecaster, calibrate its alarm threshold, and review past forecasts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.console import Cell, errors, plain, print_json, print_table, print_text, reading
from rlwatch.cli.options import ByOption, FormatOption, OutputFormat, StoreOption, examples, me, opened
from rlwatch.clock import SystemClock
from rlwatch.errors import ConfigError, StoreError
from rlwatch.records import JSON
from rlwatch.wording import NOTHING, chance, one_line, plural, step

if TYPE_CHECKING:
    from rlwatch.forecast.labels import Labels
    from rlwatch.forecast.record import Bin, Past, Record
    from rlwatch.forecast.tables import RunTable
    from rlwatch.forecast.training import Progress, Trained
    from rlwatch.ports import Store


# ``rlwatch forecast record | judge``: past forecasts of a store, and their outcomes.


RECORD = examples("rlwatch forecast record", "rlwatch forecast record math-7b-s3 --format json")
JUDGE = examples(
    "rlwatch forecast judge math-7b-s3 4690 --right --why 'entropy collapsed at 4730'",
    "rlwatch forecast judge math-7b-s3 1200 --wrong --why 'a harmless dip'",
)


def record(
    run: Annotated[str | None, typer.Argument(help="Only this run: id, name or unique prefix.")] = None,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Show past forecast alarms with their outcome, missed failures, and the calibration.

    An alarm is true if a failure (by labels-v3) began within 50 steps of it. Steps with an open horizon and steps
    after a failure are not counted.
    """
    with opened(store) as source:
        found = _record(source, run)
    if output is OutputFormat.JSON:
        print_json(record_row(found))
        return
    if not found.runs:
        print_text("no forecasts yet")
        return
    if found.past:
        print_table((">step", "run", "what", ">highest", ">lead", "answer"), [_cells(past) for past in found.past])
    print_text(record_words(found))
    if found.curve:
        print_table((">predicted", ">observed", ">steps", ">runs"), [_bin_cells(each) for each in found.curve])


def judge(
    run: Annotated[str, typer.Argument(help="Id, name or unique prefix.")],
    at: Annotated[int, typer.Argument(metavar="STEP", help="Step of the alarm or of the failure.")],
    *,
    right: Annotated[bool, typer.Option("--right/--wrong", help="Whether the run failed.")],
    why: Annotated[str, typer.Option("--why", help="Reason, kept with the record.")] = "",
    by: ByOption = "",
    store: StoreOption = None,
) -> None:
    """Record whether a forecast was right; rlwatch forecast calibrate uses it."""
    from rlwatch.forecast.record import answer, find_past, record_of_run

    with opened(store) as target:
        info = find_run(target, run)
        past = find_past(record_of_run(target, info), at)
        mark = answer(target, past, right=right, by=by or me(), why=why, now=SystemClock().now())
    print_text(
        f"{info.run_id}: the forecast at step {step(mark.step)} was {'right' if mark.right else 'wrong'}, by {mark.by}"
    )


def _record(store: Store, run: str | None) -> Record:
    from rlwatch.forecast.record import gathered, record_of_run

    records = []
    for info in [find_run(store, run)] if run is not None else store.runs():
        try:
            records.append(record_of_run(store, info))
        except StoreError as error:
            print_text(f"{info.run_id} skipped: {error}", style="yellow")
    return gathered(each for each in records if each is not None)


def record_row(found: Record) -> dict[str, JSON]:
    """Return the record of past forecast alarms as plain values for JSON."""
    past = [plain(asdict(each)) | {"lead": each.lead, "right": each.right} for each in found.past]
    return {"runs": found.runs, "steps": found.steps, "past": past, "curve": [asdict(each) for each in found.curve]}


def record_words(found: Record) -> str:
    """Return one line on past forecast alarms: the number with each outcome, and the median lead of the true ones in
    steps.
    """
    from rlwatch.forecast.record import Came

    counts = [f"{found.count(came)} {came}" for came in Came if found.count(came)]
    median = found.leads[len(found.leads) // 2] if found.leads else None
    lead = "" if median is None else f"; median lead {plural(median, 'step')}"
    answers = plural(sum(past.answer is not None for past in found.past), "answer")
    return f"{', '.join(counts) or 'no alarm'} in {plural(found.runs, 'run')} with forecasts{lead}; {answers} by people"


def _cells(past: Past) -> list[Cell]:
    reply = past.answer
    words = "" if reply is None else f"{'right' if reply.right else 'wrong'}, {reply.by}: {one_line(reply.why, 60)}"
    return [
        step(past.step),
        past.run_id,
        past.came.value + (f" ({past.type} at {step(past.onset)})" if past.onset is not None and past.type else ""),
        NOTHING if past.p50 is None else chance(past.p50),
        NOTHING if past.lead is None else step(past.lead),
        words,
    ]


def _bin_cells(each: Bin) -> list[Cell]:
    return [chance(each.said), chance(each.came), step(each.steps), step(each.runs)]


# ``rlwatch forecast``: label runs, train a custom forecaster, and calibrate a threshold on healthy runs.


Item = TypeVar("Item")
TablesArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[TABLE]...",
        help="Runs: Parquet or CSV files (run, step and a column a metric), or folders of Parquet files.",
    ),
]
AlsoStoreOption = Annotated[
    str | None, typer.Option("--store", metavar="URL", help="Also use all finished runs of this store.")
]


def gathered(tables: list[Path], store: str | None) -> RunTable:
    """Read the runs of all ``tables`` (files or folders), and of the store with URL ``store`` if given, into one table.

    Raises
    ------
    ConfigError
        If there are no runs, or a run occurs twice.
    """
    from rlwatch.forecast.tables import joined_tables, read_runs

    parts = []
    for path in tables:
        with reading(path):
            parts.append(read_runs(path))
    if store is not None:
        parts.append(stored(store))
    if not parts:
        raise ConfigError("no runs to train on: give tables of runs, or --store")
    return parts[0] if len(parts) == 1 else joined_tables(parts)


def stored(url: str) -> RunTable:
    """Return the ended runs of the store at ``url`` as one table.

    Of a run that was resumed, each step is taken from the last attempt that reached it.
    """
    from rlwatch.forecast.record import rows_of
    from rlwatch.forecast.tables import table_of_rows
    from rlwatch.records import RunState

    with opened(url) as store:
        runs = {info.run_id: rows_of(store, info) for info in store.runs() if info.state is not RunState.RUNNING}
    return table_of_rows(runs)


def bar(description: str) -> Callable[[Sequence[Item]], Iterable[Item]]:
    """Return a function that wraps a sequence in a progress bar labelled ``description``; no bar if stderr is not a
    terminal.
    """

    def wrapped(items: Sequence[Item]) -> Iterable[Item]:
        if not sys.stderr.isatty():
            return items
        from rich.progress import track

        return track(items, description=description, console=errors(), transient=True)

    return wrapped


# label: when each run of a table failed, and how

LABEL_EXAMPLES = examples(
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
        help="Table of run, recipe, family and pair (the failing run whose healthy twin it is).",
        show_default="NAME-runs next to TABLE, if present",
    ),
]


def label(
    table: TableArgument,
    *,
    runs: RunsOption = None,
    version: Annotated[str, typer.Option("--version", help="Label version.")] = "labels-v3",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the labels to this .csv or .parquet file instead of printing them."
        ),
    ] = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Label each run: event, early (failed before step 55), ambiguous (nearly failed), faulty or clean.

    A faulty run had not failed by its last row although a fault was active to the end. Each label has class, onset
    and type, and lists the metrics that the run measured.
    """
    from rlwatch.forecast.labels import label_runs
    from rlwatch.forecast.tables import read_runs

    with reading(table):
        labels = label_runs(read_runs(table, runs), version)
    if out is not None:
        print_text(f"{labels.write(out)}: {counted(labels)}")
        return
    columns = labels.columns()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if output is OutputFormat.JSON:
        print_json(rows)
        return
    cells = [(str(r["run"]), str(r["class"]), step(r["onset"]), str(r["type"]), str(r["judged"])) for r in rows]
    print_table(("run", "class", ">onset", "type", "judged"), cells)
    print_text(counted(labels), style="dim")


def counted(labels: Labels) -> str:
    """Return one line with the number of runs that have each label."""
    from rlwatch.forecast.labels import RunOutcome

    counts = ", ".join(f"{labels.count(outcome)} {outcome}" for outcome in RunOutcome)
    return f"{len(labels)} runs by {labels.version}: {counts}"


# train: fit a forecaster to given runs

TRAIN_EXAMPLES = examples(
    "rlwatch forecast train corpus.parquet --out mine.json",
    "rlwatch forecast train corpus.parquet --store rlwatch-runs --out mine.json",
    "RLWATCH_FORECAST_MODEL=mine.json python train.py",
)


def train(
    tables: TablesArgument = None,
    *,
    store: AlsoStoreOption = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", help="Labels file.", show_default="computed by labels-v3"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Output file of the model.")] = Path(
        "forecast.json"
    ),
    trees: Annotated[int, typer.Option("--trees", min=5, max=500, help="Trees per hazard.")] = 120,
    folds: Annotated[int, typer.Option("--folds", min=2, max=20, help="Number of cross-validation folds.")] = 5,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Worker processes for features.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed.")] = 0,
) -> None:
    """Train a forecaster: at least 40 labelled runs, 10 of them failed and 10 sound.

    Thresholds and calibration come from held-out runs. The output is a JSON file with its hash next to it; set
    RLWATCH_FORECAST_MODEL to its path to use it.
    """
    from rlwatch.forecast.model import write_model
    from rlwatch.forecast.training import TreeSettings
    from rlwatch.forecast.training import train as trained

    rows, known = _runs(tables or [], store, labels)
    print_text(counted(known))
    with _doing() as progress:
        meta = _meta(known, seed)
        made = trained(
            rows, known, how=TreeSettings(trees=trees, seed=seed), folds=folds, jobs=jobs, progress=progress, meta=meta
        )
    digest = write_model(made.model, out)
    _report(made, out, digest)


def _runs(tables: list[Path], store: str | None, labels: Path | None) -> tuple[RunTable, Labels]:
    from rlwatch.forecast.labels import label_runs, read_labels

    rows = gathered(tables, store)
    return rows, label_runs(rows) if labels is None else read_labels(labels)


def _meta(known: Labels, seed: int) -> dict[str, Any]:
    from importlib.metadata import version

    from rlwatch import __version__

    return {
        "version": __version__,
        "runs": len(known),
        "labels": known.version,
        "outcomes": counted(known),
        "seed": seed,
        "scikit-learn": version("scikit-learn"),
    }


def _report(made: Trained, out: Path, digest: str) -> None:
    from rlwatch.forecast.forecaster import BUDGET

    size = out.stat().st_size
    print_text(f"{out}: {size / 1000:.0f} kB, sha256 {digest[:16]}...; use it with RLWATCH_FORECAST_MODEL={out}")
    for name, model in (("", made.model), ("sparse logs, ", made.model.sparse)):
        for profile in model.profiles if model is not None else ():
            least = f"an alarm from p50 = {profile.thresholds[BUDGET]:.2f}"
            print_text(f"  {name}{profile.name}: {least} at {BUDGET} false alarms in 1000 steps", style="dim")
    if made.model.sparse is None:
        print_text(
            "  sparse logs: by the same model; too few failures are left in logs of every 5 to 20 steps", style="dim"
        )


@contextmanager
def _doing() -> Iterator[Progress]:
    """Show on stderr which part of the training is running."""
    with errors().status("training") as status:
        yield status.update


# calibrate: a threshold from known healthy runs

CALIBRATE_EXAMPLES = examples(
    "rlwatch forecast calibrate --store rlwatch-runs --run good-1 --run good-2",
    "RLWATCH_FORECAST_THRESHOLD=0.41 python train.py",
)


def calibrate(
    tables: TablesArgument = None,
    *,
    store: AlsoStoreOption = None,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="Only this run (id). Repeatable.", show_default="all"),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0.05, help="Accepted false alarms in 1000 healthy steps.")
    ] = 0.5,
) -> None:
    """Find the threshold at which known healthy runs keep the false-alarm budget (conformal, per alarm episode).

    Needs at least 2000 healthy steps. Exclude failed runs, except runs of --store with a forecast judged --right
    (rlwatch forecast judge): of these only the steps clearly before the failure count. Every other alarm counts as
    false.
    """
    from rlwatch.forecast.forecaster import smoothed_chances
    from rlwatch.forecast.thresholds import recalibrated

    table = gathered(tables or [], store)
    places = _chosen(table, run or [])
    chances = {table.runs[i]: smoothed_chances(dict(table.stream(i))) for i in bar("forecasting")(places)}
    chances = _before_failures(chances, store)
    made = recalibrated({name: rows for name, rows in chances.items() if rows}, budget)
    print_text(
        f"threshold {made.threshold:.3f} on p50: {made.episodes} false alarms in {made.steps} healthy steps of "
        f"{len(chances)} runs; use it with RLWATCH_FORECAST_THRESHOLD={made.threshold:.3f}"
    )
    print_text("below the model's own threshold for twice the default budget it is not followed", style="dim")


def _before_failures(
    chances: dict[str, list[tuple[int, float]]], url: str | None
) -> dict[str, list[tuple[int, float]]]:
    """Return the forecast probabilities without those of steps that a user marked as unhealthy."""
    if url is None:
        return chances
    from rlwatch.forecast.record import healthy_until

    with opened(url) as store:
        answers = store.forecast_answers()
    until = {run: at for run, at in healthy_until(answers).items() if run in chances}
    for run, at in until.items():
        print_text(f"{run}: only steps before {step(at)} count: a forecast was judged right", style="dim")
    wrong = sum(not answer.right and answer.run_id in chances for answer in answers)
    if wrong:
        print_text(f"{wrong} judged wrong: counted as false", style="dim")
    return {run: [row for row in rows if row[0] < until.get(run, row[0] + 1)] for run, rows in chances.items()}


def _chosen(table: RunTable, names: list[str]) -> list[int]:
    absent = [name for name in names if name not in table.place]
    if absent:
        raise ConfigError(f"there is no run {absent[0]!r} that has ended; there are {', '.join(table.runs[:8])}")
    return [table.place[name] for name in names] or list(range(len(table.runs)))


group = typer.Typer(
    help="Failure forecasts: label runs, train a forecaster, calibrate a threshold, review past forecasts.",
    no_args_is_help=True,
    epilog=examples("rlwatch forecast label runs.parquet", "rlwatch forecast train runs.parquet --out mine.json"),
)
group.command("label", epilog=LABEL_EXAMPLES)(label)
group.command("train", epilog=TRAIN_EXAMPLES)(train)
group.command("calibrate", epilog=CALIBRATE_EXAMPLES)(calibrate)
group.command("record", epilog=RECORD)(record)
group.command("judge", epilog=JUDGE)(judge)
