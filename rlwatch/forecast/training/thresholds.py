"""From scores of runs the model has not seen to thresholds that keep a budget of false alarms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.forecaster import SMOOTHED
from rlwatch.forecast.training.examples import Examples, Floats

BUDGETS = (0.25, 0.5, 1.0, 2.0, 5.0)
"""False alarm episodes in 1000 healthy steps."""
QUIET_STEPS = 25
"""Alarms closer than this are one episode."""
NEAR = 100
"""Steps before an onset in which an alarm is no false one."""
STATIC_SHARE = 0.4
"""Part of the budget that the way to the nearest limit gets; the model gets the rest."""


def smoothed(scores: Floats, run: npt.NDArray[np.int64]) -> Floats:
    """Median of the last rows of each run, as the forecaster takes it; rows of a run lie together, in order."""
    found = scores.copy()
    for at in _runs(run):
        part = scores[at]
        found[at] = [np.median(part[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(part))]
    return found


def healthy(part: Examples, clean: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Rows in which any alarm is false: of clean runs, and of failing ones long before the onset.

    ``clean``: of each place in the table, whether the run is one; runs that are neither count nowhere.
    """
    fails = np.isfinite(part.ahead)
    return np.where(fails, part.ahead > NEAR, clean[part.run])


def episodes(part: Examples, alarm: npt.NDArray[np.bool_]) -> int:
    """Alarms, those of one run within 25 steps of each other counted once."""
    rows = np.flatnonzero(alarm)
    if not len(rows):
        return 0
    apart = (np.diff(part.step[rows]) > QUIET_STEPS) | (np.diff(part.run[rows]) != 0)
    return 1 + int(apart.sum())


def steps_watched(part: Examples) -> float:
    """Steps that the rows stand for: their own cadence counts, not their number."""
    gaps = np.diff(part.step)
    same = np.diff(part.run) == 0
    inside = gaps[same & (gaps > 0)]
    return float(len(part)) * (float(np.median(inside)) if len(inside) else 1.0)


def threshold(part: Examples, scores: Floats, budget: float) -> float:
    """The lowest threshold with at most ``budget`` episodes in 1000 steps.

    ``part``: rows in which any alarm is false; ``scores``: smoothed. Candidates are the scores themselves, so the
    number of episodes is exact; raising a threshold can split an episode, so the search goes down from the top.
    """
    allowed = budget * steps_watched(part) / 1000.0
    candidates = np.unique(np.quantile(scores, np.linspace(0.5, 1.0, 2001)))[::-1]
    best = float(candidates[0]) * 1.001 + 1e-9
    for candidate in candidates:
        if episodes(part, scores >= candidate) > allowed:
            break
        best = float(candidate)
    return best


def _runs(run: npt.NDArray[np.int64]) -> list[slice]:
    edges = np.flatnonzero(np.diff(run)) + 1
    return [slice(a, b) for a, b in zip((0, *edges), (*edges, len(run)), strict=True)]
