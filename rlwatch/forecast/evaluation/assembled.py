"""Run tables from what is in memory, and from several tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlwatch.errors import ConfigError
from rlwatch.forecast.evaluation.run_table import Column, RunTable

Rows = Mapping[int, Mapping[str, float]]
"""Step -> canonical metrics."""


def table_of_rows(runs: Mapping[str, Rows], *, recipe: str = "own", family: str = "own") -> RunTable:
    """A table of runs whose rows are at hand; runs without rows are left out.

    Raises
    ------
    ConfigError
        If no run has a row.
    """
    kept = {run: rows for run, rows in runs.items() if rows}
    if not kept:
        raise ConfigError("there are no rows in any of these runs")
    flat = [(step, rows[step]) for rows in kept.values() for step in sorted(rows)]
    names = dict.fromkeys(name for _, metrics in flat for name in metrics)
    columns = {
        name: Column(
            np.array([metrics.get(name, math.nan) for _, metrics in flat], dtype=float),
            np.array([name in metrics for _, metrics in flat]),
        )
        for name in names
    }
    starts = np.cumsum([0, *(len(rows) for rows in kept.values())])
    count = len(kept)
    told = (tuple(kept), (recipe,) * count, (family,) * count, ("",) * count)
    return RunTable(*told, starts, np.array([step for step, _ in flat], dtype=np.int64), columns)


def joined_tables(tables: Sequence[RunTable]) -> RunTable:
    """One table of all runs; a metric that a table does not have was not measured there.

    Raises
    ------
    ConfigError
        If two tables have a run of the same name.
    """
    runs = tuple(run for table in tables for run in table.runs)
    if len(set(runs)) != len(runs):
        twice = next(run for i, run in enumerate(runs) if run in runs[:i])
        raise ConfigError(f"run {twice!r} is in two of these tables; give each run once")
    names = dict.fromkeys(name for table in tables for name in table.columns)
    starts, at = [np.zeros(1, dtype=np.int64)], 0
    for table in tables:
        starts.append(table.starts[1:] + at)
        at += len(table)
    return RunTable(
        runs,
        tuple(each for table in tables for each in table.recipes),
        tuple(each for table in tables for each in table.families),
        tuple(each for table in tables for each in table.pairs),
        np.concatenate(starts),
        np.concatenate([table.step for table in tables]),
        {name: _joined([table.columns.get(name) or _absent(len(table)) for table in tables]) for name in names},
        tuple(note for table in tables for note in table.notes),
        tuple(each for table in tables for each in (table.faults or (None,) * len(table.runs))),
        tuple(each for table in tables for each in (table.at_once or (False,) * len(table.runs))),
    )


def _joined(columns: Sequence[Column]) -> Column:
    return Column(np.concatenate([c.values for c in columns]), np.concatenate([c.measured for c in columns]))


def _absent(rows: int) -> Column:
    return Column(np.full(rows, math.nan), np.zeros(rows, dtype=bool))
