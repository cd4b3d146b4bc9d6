"""Runs that a command learns from: of tables, of a store, or of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import reading
from rlwatch.cli.options import opened
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.forecast.evaluation import RunTable

TablesArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[TABLE]...",
        help="Runs: Parquet or CSV files (run, step and a column a metric), or folders of Parquet files.",
    ),
]
StoreOption = Annotated[
    str | None, typer.Option("--store", metavar="URL", help="Take the runs of this store, too: all that have ended.")
]


def gathered(tables: list[Path], store: str | None) -> RunTable:
    """All of them as one table.

    Raises
    ------
    ConfigError
        If there are none, or a run comes twice.
    """
    from rlwatch.forecast.evaluation import read_runs
    from rlwatch.forecast.evaluation.assembled import joined_tables

    parts = []
    for path in tables:
        with reading(path):
            parts.append(read_runs(path))
    if store is not None:
        parts.append(stored(store))
    if not parts:
        raise ConfigError("there are no runs to learn from: give tables of runs, or --store")
    return parts[0] if len(parts) == 1 else joined_tables(parts)


def stored(url: str) -> RunTable:
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
