"""``rlwatch forecast calibrate``: a threshold from one's own healthy runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import say
from rlwatch.cli.forecast_evaluate import bar
from rlwatch.cli.forecast_tables import StoreOption, TablesArgument, gathered
from rlwatch.cli.options import examples
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.forecast.evaluation import RunTable

EPILOG = examples(
    "rlwatch forecast calibrate --store rlwatch-runs --run good-1 --run good-2",
    "RLWATCH_FORECAST_THRESHOLD=0.41 python train.py",
)


def calibrate(
    tables: TablesArgument = None,
    *,
    store: StoreOption = None,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="Only this one (id); give it once for each.", show_default="all"),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0.05, help="False alarms in 1000 healthy steps that are put up with.")
    ] = 0.5,
) -> None:
    """Find the threshold at which runs that are known to be healthy keep the budget (conformal, on episodes).

    Takes at least 2000 healthy steps. Runs in which something did go wrong must not be among them.
    """
    from rlwatch.forecast.conformal import recalibrated
    from rlwatch.forecast.forecaster import smoothed_chances

    table = gathered(tables or [], store)
    places = _chosen(table, run or [])
    found = {table.runs[i]: smoothed_chances(dict(table.stream(i))) for i in bar("forecasting")(places)}
    made = recalibrated({name: rows for name, rows in found.items() if rows}, budget)
    say(
        f"threshold {made.threshold:.3f} on p50: {made.episodes} false alarms in {made.steps} healthy steps of "
        f"{len(found)} runs; use it with RLWATCH_FORECAST_THRESHOLD={made.threshold:.3f}"
    )
    say("below the model's own threshold for twice the default budget it is not followed", style="dim")


def _chosen(table: RunTable, names: list[str]) -> list[int]:
    absent = [name for name in names if name not in table.place]
    if absent:
        raise ConfigError(f"there is no run {absent[0]!r} that has ended; there are {', '.join(table.runs[:8])}")
    return [table.place[name] for name in names] or list(range(len(table.runs)))
