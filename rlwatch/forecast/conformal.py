"""A threshold from one's own healthy runs: how high the forecast has gone where nothing went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlwatch.errors import ConfigError

LEAST_STEPS = 2000
"""Healthy steps below which they say less than what the model was made with."""
APART = 25
"""Steps of quiet that end an episode."""


@dataclass(frozen=True, slots=True)
class Recalibrated:
    """``threshold`` on p50, from ``steps`` healthy steps in which it would have alarmed ``episodes`` times."""

    threshold: float
    steps: int
    episodes: int


def recalibrated(runs: Mapping[str, Sequence[tuple[int, float]]], budget: float, *, least: float = 0.0) -> Recalibrated:
    """The lowest threshold that keeps the budget on runs that are known to be healthy.

    Split conformal prediction on episodes: of n peaks that a threshold may be exceeded by, one more is taken to be
    still to come, so ``budget * steps / 1000 - 1`` of those seen may lie above it. Valid if the next healthy run is
    like these; no labels of failures are needed.

    Parameters
    ----------
    runs
        Run -> (step, p50) of its rows, ascending, p50 smoothed as the forecaster does it.
    budget
        False alarm episodes in 1000 healthy steps, > 0.
    least
        The result is never lower: the model's own threshold at twice the default budget.

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
        if _episodes(runs, levels[middle]) <= allowed:
            high = middle
        else:
            low = middle + 1
    found = levels[low] if low < len(levels) else math.nextafter(levels[-1], 2.0)
    threshold = max(found, least)
    return Recalibrated(threshold, steps, _episodes(runs, threshold))


def _episodes(runs: Mapping[str, Sequence[tuple[int, float]]], threshold: float) -> int:
    """Alarms at or above the threshold, those of one run within :data:`APART` steps of each other counted once."""
    count = 0
    for rows in runs.values():
        last = -math.inf
        for step, p in rows:
            if p >= threshold:
                count += step - last > APART
                last = step
    return count
