"""The table itself, one file a failure family, in the order every page and document keeps."""

from __future__ import annotations

from rlwatch.metrics.rows import Metric
from rlwatch.metrics.table import (
    exploration,
    likelihood,
    mismatch,
    optimisation,
    reward,
    rollouts,
    system,
    trust_region,
)

TABLE: tuple[Metric, ...] = (
    *reward.ROWS,
    *exploration.ROWS,
    *likelihood.ROWS,
    *trust_region.ROWS,
    *optimisation.ROWS,
    *mismatch.ROWS,
    *rollouts.ROWS,
    *system.ROWS,
)

OPEN: tuple[Metric, ...] = (*reward.OPEN, *exploration.OPEN, *optimisation.OPEN, *rollouts.OPEN)
"""Families whose members a run names itself (its layers, its tasks): a row's name is what theirs begin with."""
