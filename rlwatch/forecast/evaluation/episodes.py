"""Alarm episodes at every threshold at once, and the threshold that keeps to a budget of them.

Alarms are one episode until 25 quiet steps. A row whose score is s, where the highest of the 25 steps before is m,
begins an episode at exactly the thresholds in (m, s]: counting needs no grid of thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlwatch.forecast.evaluation.run_table import Bools, Floats, Ints
from rlwatch.forecast.evaluation.timeline import Timeline

QUIET = 25
"""Quiet steps that end an episode; alarms in rows next to each other are one however far their steps are apart."""
MOST_OCCUPIED = 0.25
"""A tool that alarms on more than this share of healthy steps meets no budget, however few its episodes are."""


@dataclass(frozen=True)
class Episodes:
    """Of one tool on some rows: each begins at thresholds in (``low``, ``high``], in run ``run``.

    ``score``, ``weight``, ``place``: of the rows themselves, their steps and their run.
    """

    low: Floats
    high: Floats
    run: Ints
    score: Floats
    weight: Floats
    place: Ints

    def begun(self, threshold: Floats) -> Ints:
        """How many begin in each run, at each run's ``threshold``."""
        at = threshold[self.run]
        return np.bincount(self.run[(self.low < at) & (at <= self.high)], minlength=len(threshold))

    def occupied(self, threshold: Floats) -> Floats:
        """Steps under alarm in each run, at each run's ``threshold``."""
        alarm = self.score >= threshold[self.place]
        occupied = np.bincount(self.place[alarm], weights=self.weight[alarm], minlength=len(threshold))
        return occupied.astype(np.float64)


def heard(score: Floats) -> Floats:
    """Scores with minus infinity for no forecast: below every threshold."""
    return np.where(np.isnan(score), -np.inf, score)


def episodes(timeline: Timeline, score: Floats, rows: Bools) -> Episodes:
    """Episodes among ``rows``."""
    score = np.where(rows, heard(score), -np.inf)
    low = _highest_before(timeline, score)
    begins = np.flatnonzero(score > low)
    kept = np.flatnonzero(rows)
    run = timeline.table.run_of
    return Episodes(low[begins], score[begins], run[begins], score[kept], timeline.weight[kept], run[kept])


def _highest_before(timeline: Timeline, score: Floats) -> Floats:
    """Of each row, the highest score of the ``QUIET`` steps before it in its run, and of the row before."""
    table, highest = timeline.table, np.full(len(score), -np.inf)
    for back in range(1, min(QUIET, len(score) - 1) + 1):
        near = table.run_of[back:] == table.run_of[:-back]
        near &= (table.step[back:] - table.step[:-back] <= QUIET) | (back == 1)
        np.maximum(highest[back:], np.where(near, score[:-back], -np.inf), out=highest[back:])
    return highest


def thresholds_for(found: Episodes, runs: Bools, candidates: Floats, budgets: Sequence[float]) -> list[float]:
    """For each budget the lowest threshold at which, as at every higher one, episodes in ``runs`` stay within it.

    ``budgets``: episodes per 1000 steps. ``candidates``: scores to choose from. NaN, which no score reaches, where even
    the highest is too much. The way down stops at the first threshold beyond the budget: further down, episodes melt
    into few.
    """
    tried = np.unique(candidates[np.isfinite(candidates)])[::-1]
    if np.isposinf(candidates).any():
        tried = np.concatenate([[np.inf], tried])
    mine, rows = runs[found.run], runs[found.place]
    steps = float(found.weight[rows].sum())
    count = _at_least(found.high[mine], tried) - _at_least(found.low[mine], tried)
    under = _weight_at_least(found.score[rows], found.weight[rows], tried)
    latched = under > MOST_OCCUPIED * steps
    return [_lowest(tried, latched | (1000.0 * count > budget * steps)) for budget in budgets]


def _lowest(tried: Floats, over: Bools) -> float:
    kept = int(np.argmax(over)) if over.any() else len(tried)
    return float(tried[kept - 1]) if kept else float("nan")


def _at_least(values: Floats, thresholds: Floats) -> Ints:
    """How many of ``values`` reach each threshold."""
    return len(values) - np.searchsorted(np.sort(values), thresholds, side="left")


def _weight_at_least(values: Floats, weights: Floats, thresholds: Floats) -> Floats:
    order = np.argsort(values)
    ahead = np.concatenate([[0.0], np.cumsum(weights[order])])
    reached: Floats = ahead[-1] - ahead[np.searchsorted(values[order], thresholds, side="left")]
    return reached
