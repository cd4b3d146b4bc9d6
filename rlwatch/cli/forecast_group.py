"""``rlwatch forecast``: judge forecasts of failures on tables of runs, and train a forecaster."""

from __future__ import annotations

import typer

from rlwatch.cli import (
    forecast_calibrate,
    forecast_evaluate,
    forecast_label,
    forecast_leaderboard,
    forecast_train,
)
from rlwatch.cli.options import examples

group = typer.Typer(
    help="Forecasts of failures: label tables of runs, judge any tool on them, train one's own.",
    no_args_is_help=True,
    epilog=examples("rlwatch forecast label runs.parquet", "rlwatch forecast evaluate runs.parquet --scores mine.csv"),
)
group.command("label", epilog=forecast_label.EPILOG)(forecast_label.label)
group.command("train", epilog=forecast_train.EPILOG)(forecast_train.train)
group.command("calibrate", epilog=forecast_calibrate.EPILOG)(forecast_calibrate.calibrate)
group.command("evaluate", epilog=forecast_evaluate.EPILOG)(forecast_evaluate.evaluate)
group.command("leaderboard", epilog=forecast_leaderboard.EPILOG)(forecast_leaderboard.leaderboard)
