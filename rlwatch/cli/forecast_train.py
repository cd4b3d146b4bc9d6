"""``rlwatch forecast train TABLE...``: a forecaster made from one's own runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlwatch.cli.console import errors, say
from rlwatch.cli.forecast_label import counted
from rlwatch.cli.forecast_tables import StoreOption, TablesArgument, gathered
from rlwatch.cli.options import examples

if TYPE_CHECKING:
    from rlwatch.forecast.evaluation import Labels, RunTable
    from rlwatch.forecast.training.train import Tell, Trained

EPILOG = examples(
    "rlwatch forecast train corpus.parquet --out mine.json",
    "rlwatch forecast train corpus.parquet --store rlwatch-runs --out mine.json",
    "RLWATCH_FORECAST_MODEL=mine.json python train.py",
)


def train(
    tables: TablesArgument = None,
    *,
    store: StoreOption = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", help="Labels of the runs.", show_default="made by labels-v3"),
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
    from rlwatch.forecast.evaluation import label_runs, read_labels

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


def _tell(made: Trained, out: Path, digest: str) -> None:
    from rlwatch.forecast.forecaster import BUDGET

    size = out.stat().st_size
    say(f"{out}: {size / 1000:.0f} kB, sha256 {digest[:16]}...; use it with RLWATCH_FORECAST_MODEL={out}")
    for profile in made.model.profiles:
        least = profile.thresholds[BUDGET]
        say(f"  {profile.name}: an alarm from p50 = {least:.2f} at {BUDGET} false alarms in 1000 steps", style="dim")


@contextmanager
def _doing() -> Iterator[Tell]:
    """Says on stderr what is being done."""
    with errors().status("training") as status:
        yield status.update
