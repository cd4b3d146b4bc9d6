"""How far a forecast can go on runs whose faults are known: what is not there yet cannot be seen.

Many faults of a made corpus begin at a random step, and some a few steps before they break the run. The ceiling is a
tool that cheats: from the step on at which a fault begins it knows the onset. What it misses, nobody can know. Told
five steps later it is the bound of a tool that must see something of a fault first.
"""

from __future__ import annotations

import numpy as np

from rlwatch.forecast.evaluation.labels import Labels, Outcome
from rlwatch.forecast.evaluation.run_table import RunTable
from rlwatch.forecast.evaluation.scores import ToolScores
from rlwatch.forecast.forecast import HORIZONS

CEILING, LATER = "told of the fault (ceiling)", "told of it 5 steps later"
"""Names of the rows."""
TO_LOOK = 5
"""Steps of the second: a median of five rows needs three of them to move."""


def ceilings(table: RunTable, labels: Labels) -> list[ToolScores]:
    """Scores of that tool: the nearer the onset, the higher, in the last 100 steps and once the fault is there.

    Told at once, and told five steps later. A failing run of which no fault is recorded is known from its first step.
    Empty where the table records no faults.
    """
    if not any(fault is not None for fault in table.faults):
        return []
    return [_told(table, labels, CEILING, 0), _told(table, labels, LATER, TO_LOOK)]


def _told(table: RunTable, labels: Labels, name: str, later: int) -> ToolScores:
    score = np.zeros(len(table))
    for i, label in enumerate(labels.of(table)):
        if label.outcome is not Outcome.EVENT or label.onset is None:
            continue
        rows = table.rows(i)
        steps = table.step[rows]
        ahead = label.onset - steps
        fault = table.faults[i]
        known = (ahead <= HORIZONS[-1]) & (steps >= (0 if fault is None else fault + later))
        score[rows] = np.where(known, 1.0 + HORIZONS[-1] - np.maximum(ahead, 0), 0.0)
    return ToolScores(name, score)
