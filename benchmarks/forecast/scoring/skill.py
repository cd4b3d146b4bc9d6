"""Scores of a tool, step by step: how well they rank what will fail soon, and whether chances mean what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from forecast.scoring.alarms import AT_ONCE, SUDDEN, Timeline, heard

from rlwatch.errors import ImportFormatError
from rlwatch.forecast import tables
from rlwatch.forecast.forecast import HORIZONS
from rlwatch.forecast.tables import Bools, Floats, Ints, RunTable

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
    found = tables.read_file(path)
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
    named = found.column("run").cast(tables.arrow().string()).to_pylist()
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
    values[rows] = found.column(column).cast(tables.arrow().float64()).to_numpy(zero_copy_only=False)
    return values


def _chance(path: Path, found: Any, column: str, rows: Ints, length: int) -> Floats:
    values = _aligned(found, column, rows, length)
    for wrong in values[(values < 0) | (values > 1)][:1]:
        raise ImportFormatError(str(path), f"gives {wrong:g} in {column!r}; a chance lies in [0, 1]")
    return values


# How well scores rank what will fail soon above the rest, and whether chances mean what they say.

BINS = 10
"""Of the expected calibration error, of equal width."""
RANKS = 512
"""Bins of equal count by which bootstrap draws rank scores: near enough for an interval."""


@dataclass(frozen=True)
class Skill:
    """At one horizon: ``positives`` of ``rows`` at-risk rows; ``covered`` of them have a forecast, others rank last.

    ``auroc``, ``auprc`` in [0, 1], None where all rows are alike. ``brier``, ``brier_skill`` (1 - Brier score over
    that of the base rate; below 0 is worse than it) and ``ece`` are of the covered rows; None without chances.
    ``auroc_built_up``: without the runs whose failure came at once, or too soon after its fault to be seen; None where
    no faults are known of.
    """

    horizon: int
    rows: int
    positives: int
    covered: int
    auroc: float | None
    auprc: float | None
    brier: float | None = None
    brier_skill: float | None = None
    ece: float | None = None
    auroc_interval: tuple[float, float] | None = None
    auroc_built_up: float | None = None


def skill(timeline: Timeline, tool: ToolScores, horizon: int, draws: Ints | None = None) -> Skill:
    """At one horizon; by the tool's chance at that horizon where it gives one, else by its score."""
    rows, fails = timeline.outcome_within(horizon)
    chance = tool.chances.get(horizon)
    score = heard(tool.score if chance is None else chance)[rows]
    fails = fails[rows]
    told = np.isfinite(score) | np.isposinf(score)
    calibrated = (None, None, None) if chance is None else calibration(chance[rows][told], fails[told])
    run = timeline.table.run_of[rows]
    interval = None if draws is None else _interval(score, fails, run, draws)
    ranked = (auroc(score, fails), auprc(score, fails))
    built_up = _built_up(timeline, run, score, fails)
    return Skill(horizon, len(fails), int(fails.sum()), int(told.sum()), *ranked, *calibrated, interval, built_up)


def _built_up(timeline: Timeline, run: Ints, score: Floats, fails: Bools) -> float | None:
    if not any(timeline.warning):
        return None
    kept = np.array([warning not in {AT_ONCE, SUDDEN} for warning in timeline.warning])[run]
    return auroc(score[kept], fails[kept])


def auroc(score: Floats, fails: Bools) -> float | None:
    """Chance that a row that fails outranks one that does not, ties half."""
    hits, misses = _tied(score, fails)
    if not hits.sum() or not misses.sum():
        return None
    below = np.cumsum(misses) - misses
    return float((hits * (below + misses / 2.0)).sum() / (hits.sum() * misses.sum()))


def auprc(score: Floats, fails: Bools) -> float | None:
    """Average precision: precision at each threshold, weighted by the recall it adds; rows that tie come together."""
    hits, misses = _tied(score, fails)
    if not hits.sum():
        return None
    above, false = np.cumsum(hits[::-1]), np.cumsum(misses[::-1])
    return float((hits[::-1] * above / np.maximum(above + false, 1)).sum() / hits.sum())


def _tied(score: Floats, fails: Bools) -> tuple[Floats, Floats]:
    """Rows that fail and rows that do not, at each distinct score, ascending."""
    _, place = np.unique(score, return_inverse=True)
    count = int(place.max(initial=-1)) + 1
    hits = np.bincount(place[fails], minlength=count).astype(np.float64)
    return hits, np.bincount(place[~fails], minlength=count).astype(np.float64)


def calibration(chance: Floats, fails: Bools) -> tuple[float | None, float | None, float | None]:
    """(Brier score, skill against the base rate, expected calibration error)."""
    if not len(fails):
        return None, None, None
    brier, base = float(np.mean((chance - fails) ** 2)), float(fails.mean())
    place = np.minimum((chance * BINS).astype(np.int64), BINS - 1)
    gap = np.bincount(place, weights=chance - fails, minlength=BINS)
    spread = base * (1.0 - base)
    return brier, (1.0 - brier / spread if spread else None), float(np.abs(gap).sum() / len(fails))


def _interval(score: Floats, fails: Bools, run: Ints, draws: Ints) -> tuple[float, float] | None:
    """90 % of the bootstrap draws (draws x runs: how often each run is drawn)."""
    finite = score[np.isfinite(score)]
    edges = np.unique(np.quantile(finite, np.linspace(0, 1, RANKS))) if len(finite) else finite
    place = np.searchsorted(edges, score, side="right")
    runs, count = draws.shape[1], len(edges) + 1
    cell = run * count + place
    hits, misses = (
        draws @ np.bincount(cell[kind], minlength=runs * count).reshape(runs, count).astype(np.float64)
        for kind in (fails, ~fails)
    )
    pairs = hits.sum(axis=1) * misses.sum(axis=1)
    won = (hits * (np.cumsum(misses, axis=1) - misses / 2.0)).sum(axis=1)
    usable = pairs > 0
    if not usable.any():
        return None
    low, high = np.percentile(won[usable] / pairs[usable], (5, 95))
    return float(low), float(high)
