"""What a mere clock would have hit: alarms of clean runs over the same steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlwatch.forecast.evaluation.run_table import Bools, Floats


def expected(alarmed: Bools, reached: Bools) -> Floats:
    """Of each event (row), the share of clean runs (columns) that alarmed, of those that reached its window."""
    count = reached.sum(axis=1)
    return np.where(count > 0, alarmed.sum(axis=1) / np.maximum(count, 1), 0.0)


def at_least(count: int, chances: Sequence[float]) -> float:
    """Chance of ``count`` or more hits among independent ``chances`` (Poisson-binomial).

    >>> at_least(2, [0.5, 0.5])
    0.25
    """
    spread = np.zeros(len(chances) + 1)
    spread[0] = 1.0
    for chance in chances:
        spread[1:] = spread[1:] * (1.0 - chance) + spread[:-1] * chance
        spread[0] *= 1.0 - chance
    return float(min(1.0, spread[count:].sum()))
