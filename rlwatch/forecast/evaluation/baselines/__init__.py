"""Simple tools that every leaderboard holds: what a forecaster has to beat.

Each is a small object that is given the rows of one run, one at a time, and says how bad it looks: the future is out of
reach by the interface. The higher the worse; None: no forecast.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from rlwatch.forecast.evaluation.baselines.constant import Always, Never, Random, StepIndex
from rlwatch.forecast.evaluation.baselines.reach import Extrapolation, Static
from rlwatch.forecast.evaluation.baselines.statistics import Cusum, EarlyWarning, EwmaZ
from rlwatch.forecast.evaluation.run_table import RunTable
from rlwatch.forecast.evaluation.scores import ToolScores

__all__ = ["BASELINES", "Tool", "run_baselines", "run_tool"]


class Tool(Protocol):
    """One run's watcher."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """How bad the run looks after this row; ``metrics`` holds what was measured, NaN where that was NaN."""
        ...


BASELINES: Mapping[str, Callable[[int], Tool]] = {
    "never": lambda _seed: Never(),
    "always": lambda _seed: Always(),
    "random score": Random,
    "step index": lambda _seed: StepIndex(),
    "static limits": lambda _seed: Static(),
    "EWMA z": lambda _seed: EwmaZ(),
    "CUSUM": lambda _seed: Cusum(),
    "linear extrapolation": lambda _seed: Extrapolation(),
    "early-warning statistics": lambda _seed: EarlyWarning(),
}
"""By name: what makes a fresh one for a run; the seed is the run's own."""
_WITHOUT_A_DIAL = ("never", "always")


def run_tool(name: str, make: Callable[[int], Tool], table: RunTable) -> ToolScores:
    """One tool on every run of a table, row by row."""
    return _run({name: make}, table)[0]


def run_baselines(
    table: RunTable, progress: Callable[[Sequence[int]], Iterable[int]] | None = None
) -> list[ToolScores]:
    """All of them. ``progress`` wraps the places of the runs, to show how far it is."""
    return _run(BASELINES, table, progress)


def _run(
    makers: Mapping[str, Callable[[int], Tool]],
    table: RunTable,
    progress: Callable[[Sequence[int]], Iterable[int]] | None = None,
) -> list[ToolScores]:
    scores = {name: np.full(len(table), np.nan) for name in makers}
    places = range(len(table.runs))
    for i in places if progress is None else progress(places):
        seed = zlib.crc32(table.runs[i].encode())
        tools = [(scores[name], make(seed)) for name, make in makers.items()]
        for row, (step, metrics) in enumerate(table.stream(i), start=int(table.starts[i])):
            for score, tool in tools:
                told = tool.update(step, metrics)
                if told is not None:
                    score[row] = told
    return [ToolScores(name, score, alarms_only=name in _WITHOUT_A_DIAL) for name, score in scores.items()]
