"""Alarm thresholds that keep a budget of false alarms, on runs a model has not seen or on a user's own healthy runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from rlwatch.errors import ConfigError
from rlwatch.forecast.examples import Examples, Floats
from rlwatch.forecast.forecaster import cadence, rows_judged
from rlwatch.forecast.labels import Labels, RunOutcome
from rlwatch.forecast.tables import RunTable

BUDGETS = (0.25, 0.5, 1.0, 2.0, 5.0)
"""Budgets for which thresholds are computed: false alarm episodes in 1000 healthy steps."""
QUIET_STEPS = 25
"""Most steps between two alarms that count as one episode."""
NEAR = 100
"""Steps before a failure's onset in which an alarm is not counted as false."""
RAISED = tuple(1.0 + 0.1 * i for i in range(11))
"""Factors by which the budget shares of both layers are raised in search of the best pair of thresholds."""
STATIC_SHARE = 0.4
"""Share of the budget for progress to the nearest limit; the model gets the rest."""


def smoothed(part: Examples, scores: Floats) -> Floats:
    """Return for each row the median score of the last rows of its run, as the forecaster computes it.

    The rows of each run must be adjacent and in order.
    """
    found = scores.copy()
    for at in _runs(part):
        mine, rows = scores[at], rows_judged(part.step[at])
        found[at] = [np.median(mine[max(0, i - rows + 1) : i + 1]) for i in range(len(mine))]
    return found


def sound_until(table: RunTable, labels: Labels) -> Floats:
    """Return for each run the step before which it is healthy.

    It is infinite for a clean run, the step of the fault for a faulty one, and minus infinity for all others.
    """
    known = [label.outcome for label in labels.of(table)]
    whole = np.where([outcome is RunOutcome.CLEAN for outcome in known], np.inf, -np.inf)
    return np.where([outcome is RunOutcome.FAULTY for outcome in known], table.sound_until, whole)


def healthy(part: Examples, sound: Floats) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows at which any alarm is false: of sound runs, and of failing ones long before the onset.

    ``sound``: result of :func:`sound_until` for the runs of the table.
    """
    fails = np.isfinite(part.ahead)
    return np.where(fails, part.ahead > NEAR, part.step < sound[part.run])


def episodes(part: Examples, alarm: npt.NDArray[np.bool_]) -> int:
    """Return the number of alarm episodes; alarms of one run within 25 steps of each other count once."""
    rows = np.flatnonzero(alarm)
    if not len(rows):
        return 0
    gaps = np.diff(part.step[rows])
    return 1 + int(((gaps > QUIET_STEPS) | (gaps < 0) | (np.diff(part.run[rows]) != 0)).sum())


def steps_watched(part: Examples) -> float:
    """Return the number of steps that the rows of ``part`` cover, given the cadence of each run."""
    return sum(len(part.step[at]) * cadence(part.step[at]) for at in _runs(part))


def threshold(part: Examples, scores: Floats, budget: float) -> float:
    """Return the lowest threshold with at most ``budget`` alarm episodes in 1000 steps.

    ``part``: rows at which any alarm is false; ``scores``: their smoothed scores. Candidates are the scores themselves,
    so the number of episodes is exact; raising a threshold can split an episode, so the search goes down from the top.
    """
    return _at(_descent(part, scores, budget), budget * steps_watched(part) / 1000.0)


def jointly(
    part: Examples, model: Floats, static: Floats, budgets: Sequence[float] = BUDGETS
) -> list[tuple[float, float]]:
    """Return for each budget a threshold for the model and one for the progress to limits that together keep it.

    Each of the two has its share of the budget; as many false alarms occur in both, the shares are raised alike until
    the budget is used up. ``part``: rows at which any alarm is false; ``model``, ``static``: their smoothed scores.
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


def _runs(part: Examples) -> list[slice]:
    """Rows of each run; those of one run at several cadences are as many runs."""
    edges = np.flatnonzero((np.diff(part.run) != 0) | (np.diff(part.step) < 0)) + 1
    return [slice(a, b) for a, b in zip((0, *edges), (*edges, len(part)), strict=True)]


# A threshold from one's own healthy runs: how high the forecast has gone where nothing went wrong.

LEAST_STEPS = 2000
"""Fewest healthy steps for a threshold; fewer are less informative than the data that the model was trained with."""
APART = 25
"""Steps without an alarm that end an episode."""


@dataclass(frozen=True, slots=True)
class Recalibrated:
    """A custom ``threshold`` on p50, from ``steps`` healthy steps in which it would have alarmed ``episodes`` times."""

    threshold: float
    steps: int
    episodes: int


def recalibrated(runs: Mapping[str, Sequence[tuple[int, float]]], budget: float, *, least: float = 0.0) -> Recalibrated:
    """Return the lowest threshold on p50 that keeps a budget of false alarms on runs that are known to be healthy.

    Split conformal prediction on episodes: of n peaks that a threshold may be exceeded by, one more is taken to be
    still to come, so ``budget * steps / 1000 - 1`` of those seen may lie above it. Valid if the next healthy run is
    like these; no labels of failures are needed.

    Parameters
    ----------
    runs
        Step and smoothed p50 of the rows of each run, ascending.
    budget
        False alarm episodes in 1000 healthy steps, > 0.
    least
        Lower bound of the result: the model's own threshold at twice the default budget.

    Raises
    ------
    ConfigError
        With fewer than 2000 healthy steps, or too few for the budget.
    """
    steps = sum(rows[-1][0] - rows[0][0] + 1 for rows in runs.values() if rows)
    allowed = math.floor(budget * steps / 1000.0) - 1
    if steps < LEAST_STEPS or allowed < 0:
        needed = max(LEAST_STEPS, math.ceil(1000.0 / budget))
        raise ConfigError(
            f"{steps} healthy steps are too few for a threshold of one's own at {budget:g} false alarms in 1000 steps; "
            f"it takes {needed}: add runs that are known to be healthy"
        )
    levels = sorted({p for rows in runs.values() for _, p in rows})
    low, high = 0, len(levels)  # the first level that keeps the budget; beyond the last one nothing alarms
    while low < high:
        middle = (low + high) // 2
        if _alarm_episodes(runs, levels[middle]) <= allowed:
            high = middle
        else:
            low = middle + 1
    found = levels[low] if low < len(levels) else math.nextafter(levels[-1], 2.0)
    threshold = max(found, least)
    return Recalibrated(threshold, steps, _alarm_episodes(runs, threshold))


def _alarm_episodes(runs: Mapping[str, Sequence[tuple[int, float]]], threshold: float) -> int:
    """Alarms at or above the threshold, those of one run within :data:`APART` steps of each other counted once."""
    count = 0
    for rows in runs.values():
        last = -math.inf
        for step, p in rows:
            if p >= threshold:
                count += step - last > APART
                last = step
    return count
