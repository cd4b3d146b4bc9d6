"""``rlwatch forecast train TABLE...``: a forecaster made from one's own runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlwatch.cli.console import errors, say
from rlwatch.cli.forecast_label import counted
from rlwatch.cli.options import examples
from rlwatch.cli.progress import reading
from rlwatch.cli.stores import opened
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.forecast.evaluation import Labels, RunTable
    from rlwatch.forecast.training.train import Tell, Trained

EPILOG = examples(
    "rlwatch forecast train corpus.parquet --out mine.json",
    "rlwatch forecast train corpus.parquet --store rlwatch-runs --out mine.json",
    "RLWATCH_FORECAST_MODEL=mine.json python train.py",
)
TablesArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[TABLE]...",
        help="Runs: Parquet or CSV files (run, step and a column a metric), or folders of Parquet files.",
    ),
]


def train(
    tables: TablesArgument = None,
    *,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="Take the runs of this store, too: all that have ended."),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", help="Labels of the runs.", show_default="made by labels-v1"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the model here.")] = Path("forecast.json"),
    trees: Annotated[int, typer.Option("--trees", min=5, max=500, help="Trees of each hazard.")] = 120,
    folds: Annotated[int, typer.Option("--folds", min=2, max=20, help="How often a part of the runs is held out.")] = 5,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes that compute features.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all draws.")] = 0,
) -> None:
    """Train a forecaster: at least 40 labelled runs, 10 of them failed and 10 sound.

    Thresholds and calibration come from runs that the model did not see. The file it writes is JSON, with its hash
    beside it; set RLWATCH_FORECAST_MODEL to its path to use it.
    """
    from rlwatch.forecast import artefact
    from rlwatch.forecast.training.grow import Growth
    from rlwatch.forecast.training.train import train as trained

    rows, known = _runs(tables or [], store, labels)
    say(counted(known))
    with _doing() as tell:
        meta = _meta(known, seed)
        made = trained(rows, known, how=Growth(trees=trees, seed=seed), folds=folds, jobs=jobs, tell=tell, meta=meta)
    digest = artefact.write(made.model, out)
    _tell(made, out, digest)


def _runs(tables: list[Path], store: str | None, labels: Path | None) -> tuple[RunTable, Labels]:
    from rlwatch.forecast.evaluation import label_runs, read_labels, read_runs
    from rlwatch.forecast.evaluation.assembled import joined_tables

    parts = []
    for path in tables:
        with reading(path):
            parts.append(read_runs(path))
    if store is not None:
        parts.append(_stored(store))
    if not parts:
        raise ConfigError("there are no runs to learn from: give tables of runs, or --store")
    rows = parts[0] if len(parts) == 1 else joined_tables(parts)
    return rows, label_runs(rows) if labels is None else read_labels(labels)


def _stored(url: str) -> RunTable:
    """Runs of a store that have ended, as far as their last attempt continued them."""
    from rlwatch.forecast.evaluation.assembled import table_of_rows
    from rlwatch.metrics import canonicalise
    from rlwatch.records import RunState, StepRecord

    runs: dict[str, dict[int, dict[str, float]]] = {}
    with opened(url) as store:
        for info in store.runs():
            if info.state is RunState.RUNNING or info.last_step is None:
                continue
            rows = runs.setdefault(info.run_id, {})
            for item in store.branch(info.run_id, info.attempt + 1, info.last_step + 1):
                if isinstance(item, StepRecord):
                    rows.setdefault(item.step, {}).update(canonicalise(item.metrics, info.source)[0])
    return table_of_rows(runs)


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


def _tell(made: Trained, out: Path, digest: str) -> None:
    size = out.stat().st_size
    say(f"{out}: {size / 1000:.0f} kB, sha256 {digest[:16]}...; use it with RLWATCH_FORECAST_MODEL={out}")
    for profile in made.model.profiles:
        say(
            f"  {profile.name}: an alarm from p50 = {profile.thresholds['1']:.2f} at 1 false alarm in 1000 steps",
            style="dim",
        )


@contextmanager
def _doing() -> Iterator[Tell]:
    """Says on stderr what is being done."""
    with errors().status("training") as status:
        yield status.update
