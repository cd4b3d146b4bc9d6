"""What a tool said, step by step; nothing else of it is known to the scorer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlwatch.errors import ImportFormatError
from rlwatch.forecast.evaluation import files
from rlwatch.forecast.evaluation.run_table import Floats, Ints, RunTable
from rlwatch.forecast.forecast import HORIZONS

_CHANCES = tuple(f"p{horizon}" for horizon in HORIZONS)


@dataclass(frozen=True)
class ToolScores:
    """Of one tool, aligned to the rows of a table.

    ``score``: the higher the worse; NaN: no forecast. A tool that only says alarm or not (``alarms_only``) has 1 where
    it alarms and NaN elsewhere, and no dial. ``chances``: horizon (steps) -> probability in [0, 1] that the run fails
    within it, where the tool gives them. ``note``: shown beside the name.
    """

    name: str
    score: Floats
    alarms_only: bool = False
    chances: Mapping[int, Floats] = field(default_factory=dict)
    note: str = ""


def read_scores(path: Path, table: RunTable, name: str = "") -> ToolScores:
    """A tool's file: ``run, step`` and ``score`` or ``alarm``; optionally its chances ``p20``, ``p50``, ``p100``.

    Rows it does not mention have no forecast. With a ``score``, ``alarm`` is not read: the scorer turns the dial.

    Raises
    ------
    ImportFormatError
        If a column is missing, a run or step is not in the table, a step comes twice or a chance is not in [0, 1].
    """
    found = files.read(path)
    there = set(found.column_names)
    if not {"run", "step"} <= there or not there & {"score", "alarm"}:
        raise ImportFormatError(str(path), f"needs run, step and score (or alarm); its columns are {sorted(there)}")
    rows = _rows(path, found, table)
    alarms_only = "score" not in there
    score = _aligned(found, "alarm" if alarms_only else "score", rows, len(table))
    if alarms_only:
        score = np.where(score > 0, 1.0, np.nan)
    chances = {int(p[1:]): _chance(path, found, p, rows, len(table)) for p in _CHANCES if p in there}
    return ToolScores(name or path.name.split(".")[0], score, alarms_only, chances)


def _rows(path: Path, found: Any, table: RunTable) -> Ints:
    """Of each row of the file, the row of the table."""
    named = found.column("run").cast(files.arrow().string()).to_pylist()
    unknown = next((run for run in named if run not in table.place), None)
    if unknown is not None:
        raise ImportFormatError(str(path), f"scores the run {unknown!r}, which is not in the table")
    if found.column("step").null_count:
        raise ImportFormatError(str(path), f"{found.column('step').null_count} rows have no step")
    steps = found.column("step").to_numpy().astype(np.int64)
    runs = np.array([table.place[run] for run in named], dtype=np.int64)
    at = np.minimum(table.find(runs, steps), len(table) - 1)
    for wrong in np.flatnonzero((table.step[at] != steps) | (table.run_of[at] != runs))[:1]:
        raise ImportFormatError(str(path), f"scores step {steps[wrong]} of {named[wrong]!r}, which the table has not")
    ordered = np.sort(at)
    for twice in np.flatnonzero(np.diff(ordered) == 0)[:1]:
        row = ordered[twice]
        raise ImportFormatError(str(path), f"scores step {table.step[row]} of {table.runs[table.run_of[row]]!r} twice")
    return at


def _aligned(found: Any, column: str, rows: Ints, length: int) -> Floats:
    values = np.full(length, np.nan)
    values[rows] = found.column(column).cast(files.arrow().float64()).to_numpy(zero_copy_only=False)
    return values


def _chance(path: Path, found: Any, column: str, rows: Ints, length: int) -> Floats:
    values = _aligned(found, column, rows, length)
    for wrong in values[(values < 0) | (values > 1)][:1]:
        raise ImportFormatError(str(path), f"gives {wrong:g} in {column!r}; a chance lies in [0, 1]")
    return values
