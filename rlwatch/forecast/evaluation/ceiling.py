"""How far a forecast can go on runs whose faults are known: what is not there yet cannot be seen.

Many faults of a made corpus begin at a random step, and some a few steps before they break the run. The ceiling is a
tool that cheats: from the step on at which a fault begins it knows the onset. What it misses, nobody can know.
"""

from __future__ import annotations

import numpy as np

from rlwatch.forecast.evaluation.labels import Labels, Outcome
from rlwatch.forecast.evaluation.run_table import RunTable
from rlwatch.forecast.evaluation.scores import ToolScores
from rlwatch.forecast.forecast import HORIZONS

CEILING = "told of the fault (ceiling)"
"""Name of the row."""


def ceiling(table: RunTable, labels: Labels) -> ToolScores | None:
    """Scores of that tool: the nearer the onset, the higher, in the last 100 steps and once the fault is there.

    A failing run of which no fault is recorded is known from its first step. None where the table records no faults.
    """
    if not any(fault is not None for fault in table.faults):
        return None
    score = np.zeros(len(table))
    for i, label in enumerate(labels.of(table)):
        if label.outcome is not Outcome.EVENT or label.onset is None:
            continue
        rows = table.rows(i)
        steps = table.step[rows]
        ahead = label.onset - steps
        known = (ahead <= HORIZONS[-1]) & (steps >= (table.faults[i] or 0))
        score[rows] = np.where(known, 1.0 + HORIZONS[-1] - np.maximum(ahead, 0), 0.0)
    return ToolScores(CEILING, score)
