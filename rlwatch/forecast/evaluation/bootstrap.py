"""Intervals over runs: rows of a run stand and fall together, so runs are what is drawn."""

from __future__ import annotations

import numpy as np

from rlwatch.forecast.evaluation.run_table import Floats, Ints

INTERVAL = (5, 95)
"""Percentiles: 90 % of the draws."""
Interval = tuple[float, float]


def drawn(runs: int, draws: int, seed: int) -> Ints:
    """How often each run is drawn, of shape (draws, runs): as many as there are, with replacement."""
    chances = np.full(runs, 1.0 / max(runs, 1))
    return np.random.default_rng(seed).multinomial(runs, chances, size=draws).astype(np.int64)


def interval(draws: Ints, part: Floats, whole: Floats, scale: float = 1.0) -> Interval | None:
    """Of ``scale * sum(part) / sum(whole)``, each with one entry a run; None where no draw has a whole."""
    parts, wholes = draws @ part, draws @ whole
    usable = wholes > 0
    if not usable.any():
        return None
    low, high = np.percentile(scale * parts[usable] / wholes[usable], INTERVAL)
    return float(low), float(high)
