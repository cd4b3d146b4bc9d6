"""From scores of runs the model has not seen to thresholds that keep a budget of false alarms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.evaluation.labels import Labels, Outcome
from rlwatch.forecast.evaluation.run_table import RunTable
from rlwatch.forecast.forecaster import SMOOTHED
from rlwatch.forecast.training.examples import Examples, Floats

BUDGETS = (0.25, 0.5, 1.0, 2.0, 5.0)
"""False alarm episodes in 1000 healthy steps."""
QUIET_STEPS = 25
"""Alarms closer than this are one episode."""
NEAR = 100
"""Steps before an onset in which an alarm is no false one."""
RAISED = tuple(1.0 + 0.1 * i for i in range(11))
"""How far the shares of both layers are raised."""
STATIC_SHARE = 0.4
"""Part of the budget that the way to the nearest limit gets; the model gets the rest."""


def smoothed(scores: Floats, run: npt.NDArray[np.int64]) -> Floats:
    """Median of the last rows of each run, as the forecaster takes it; rows of a run lie together, in order."""
    found = scores.copy()
    for at in _runs(run):
        part = scores[at]
        found[at] = [np.median(part[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(part))]
    return found


def sound_until(table: RunTable, labels: Labels) -> Floats:
    """Of each run without an onset, the step before which it is healthy.

    Infinite of a clean one, that of the fault of a faulty one; -inf of others, which count nowhere.
    """
    known = [label.outcome for label in labels.of(table)]
    whole = np.where([outcome is Outcome.CLEAN for outcome in known], np.inf, -np.inf)
    return np.where([outcome is Outcome.FAULTY for outcome in known], table.sound_until, whole)


def healthy(part: Examples, sound: Floats) -> npt.NDArray[np.bool_]:
    """Rows in which any alarm is false: of sound runs, and of failing ones long before the onset.

    ``sound``: of each place in the table, as :func:`sound_until` gives it.
    """
    fails = np.isfinite(part.ahead)
    return np.where(fails, part.ahead > NEAR, part.step < sound[part.run])


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
    return _at(_descent(part, scores, budget), budget * steps_watched(part) / 1000.0)


def jointly(
    part: Examples, model: Floats, static: Floats, budgets: Sequence[float] = BUDGETS
) -> list[tuple[float, float]]:
    """Of each budget, thresholds of both layers that keep it together and make the most of it.

    Each layer has its share; but many false alarms are those of both, so the shares are raised alike until the budget
    is used up. ``part``, ``model``, ``static``: as :func:`threshold` takes them.
    """
    thousands, most = steps_watched(part) / 1000.0, RAISED[-1] * max(budgets)
    ways = [(_descent(part, model, most), 1.0 - STATIC_SHARE), (_descent(part, static, most), STATIC_SHARE)]
    found = []
    for budget in budgets:
        pairs = [tuple(_at(way, more * budget * share * thousands) for way, share in ways) for more in RAISED]
        kept = 0
        for i, (first, second) in enumerate(pairs[1:], start=1):
            if episodes(part, (model >= first) | (static >= second)) > budget * thousands:
                break
            kept = i
        found.append((pairs[kept][0], pairs[kept][1]))
    return found


def _descent(part: Examples, scores: Floats, most: float) -> list[tuple[float, int]]:
    """Candidates from the top down with their episodes, up to the first that has more than ``most`` in 1000 steps."""
    allowed = most * steps_watched(part) / 1000.0
    candidates = np.unique(np.quantile(scores, np.linspace(0.5, 1.0, 2001)))[::-1]
    found = [(float(candidates[0]) * 1.001 + 1e-9, 0)]
    for candidate in candidates:
        found.append((float(candidate), episodes(part, scores >= candidate)))
        if found[-1][1] > allowed:
            break
    return found


def _at(way: Sequence[tuple[float, int]], allowed: float) -> float:
    """The last candidate before the first with too many episodes."""
    within = list(takewhile(lambda step: step[1] <= allowed, way))
    return within[-1][0]


def _runs(run: npt.NDArray[np.int64]) -> list[slice]:
    edges = np.flatnonzero(np.diff(run)) + 1
    return [slice(a, b) for a, b in zip((0, *edges), (*edges, len(run)), strict=True)]
