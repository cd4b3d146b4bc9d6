"""What is known of the tokens of a run: the steps that were localised, and the rows of one step."""

from __future__ import annotations

import numpy as np

from rlwatch.records import CULPRITS, FAR_OUT, LOCALISED, NON_FINITE, Event, RunInfo, SpikeBatch

from .curves import canonical_names, metric_names, whole
from .door import store

MOST = 300
"""Batches read at most for a list of steps, the newest: some 50 ms of a large run."""

NORM = "optim/grad_norm"


def localised(run_id: str) -> list[Event]:
    """What was said of each localised step, in order."""
    return [event for event in store().events(run_id) if event.kind == LOCALISED]


def culprits(run_id: str) -> list[SpikeBatch]:
    """The newest batches of culprits, by step."""
    return store().spikes(run_id, last=MOST, reason=CULPRITS)


def far_out(run_id: str) -> list[SpikeBatch]:
    """The newest batches of far-out tokens, and of tokens of steps that were not finite."""
    source = store()
    return [batch for reason in (FAR_OUT, NON_FINITE) for batch in source.spikes(run_id, last=MOST, reason=reason)]


def of_step(run_id: str, step: int) -> list[SpikeBatch]:
    """Everything recorded of the tokens of a step, in all attempts."""
    return store().spikes(run_id, step=step)


def usual_norm(run: RunInfo) -> float | None:
    """Median gradient norm of the run, of the steps where it was finite."""
    name = canonical_names(metric_names(run), run.source).get(NORM)
    if name is None:
        return None
    values = whole(run, (name,))[name].values
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None
