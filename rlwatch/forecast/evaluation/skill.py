"""How well scores rank what will fail soon above the rest, and whether chances mean what they say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlwatch.forecast.evaluation.episodes import heard
from rlwatch.forecast.evaluation.run_table import Bools, Floats, Ints
from rlwatch.forecast.evaluation.scores import ToolScores
from rlwatch.forecast.evaluation.timeline import AT_ONCE, SUDDEN, Timeline

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
