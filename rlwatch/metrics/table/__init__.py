"""The table itself, one file a failure family, in the order every page and document keeps."""

from __future__ import annotations

from rlwatch.metrics.rows import Metric
from rlwatch.metrics.table import exploration, mismatch, optimisation, reward, rollouts, system, trust_region

TABLE: tuple[Metric, ...] = (
    *reward.ROWS,
    *exploration.ROWS,
    *trust_region.ROWS,
    *optimisation.ROWS,
    *mismatch.ROWS,
    *rollouts.ROWS,
    *system.ROWS,
)
