"""Small tables of runs, written down in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlwatch.forecast.labels import Label, Labels, RunOutcome
from rlwatch.forecast.tables import MetricColumn, RunTable

Series = Sequence[float | None]


def run_table(
    runs: Mapping[str, Mapping[str, Series]],
    *,
    steps: Mapping[str, Sequence[int]] | None = None,
    recipes: Mapping[str, str] | None = None,
    families: Mapping[str, str] | None = None,
    pairs: Mapping[str, str] | None = None,
) -> RunTable:
    """A table of ``runs`` (run -> column -> values, None: not measured); a row a step from 0 on, unless ``steps``."""
    names = tuple(runs)
    lengths = [max((len(values) for values in runs[name].values()), default=0) for name in names]
    lengths = [len((steps or {}).get(name, ())) or length for name, length in zip(names, lengths, strict=True)]
    step = [list((steps or {}).get(name, range(length))) for name, length in zip(names, lengths, strict=True)]
    columns = {}
    for column in dict.fromkeys(column for name in names for column in runs[name]):
        cells: list[float | None] = []
        for name, length in zip(names, lengths, strict=True):
            cells += list(runs[name].get(column, [None] * length))
        values = np.array([np.nan if cell is None else cell for cell in cells], dtype=np.float64)
        columns[column] = MetricColumn(values, np.array([cell is not None for cell in cells]))

    def told(of: Mapping[str, str] | None) -> tuple[str, ...]:
        return tuple((of or {}).get(name, "") for name in names)

    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return RunTable(
        names,
        told(recipes),
        told(families),
        told(pairs),
        starts,
        np.array([s for run in step for s in run], dtype=np.int64),
        columns,
    )


def fleet(onsets: Sequence[int | None], length: int = 350) -> tuple[RunTable, Labels]:
    """Runs of ``length`` rows that fail at ``onsets`` (None: clean), half of the recipes healthy; with their labels."""
    names = [f"r{i}" for i in range(len(onsets))]
    table = run_table(
        {name: {"reward/mean": [0.5] * length} for name in names},
        recipes={name: f"recipe{i % 7}" for i, name in enumerate(names)},
        families={name: "healthy" if onset is None else "fault" for name, onset in zip(names, onsets, strict=True)},
    )
    return table, Labels("test", tuple(label(name, onset) for name, onset in zip(names, onsets, strict=True)))


def label(name: str, onset: int | None) -> Label:
    """An event at ``onset`` (early before 55), or clean."""
    if onset is None:
        return Label(name, RunOutcome.CLEAN)
    return Label(name, RunOutcome.EARLY if onset < 55 else RunOutcome.EVENT, onset, "reward")


def per_run(table: RunTable, values: Mapping[str, Mapping[int, float]], rest: float = np.nan) -> np.ndarray:
    """Scores: ``values`` at (run, step), ``rest`` elsewhere."""
    score = np.full(len(table), rest)
    for name, at in values.items():
        i = table.place[name]
        for step, value in at.items():
            score[table.starts[i] + int(np.flatnonzero(table.step[table.rows(i)] == step)[0])] = value
    return score
