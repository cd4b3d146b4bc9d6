"""The first steps of a run as simple tools use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlwatch.forecast.evaluation.limits import limits
from rlwatch.forecast.evaluation.run_table import Floats
from rlwatch.stats import GAUSSIAN

WATCHED = (
    *("reward/mean", "reward/std", "reward/zero_std_frac", "policy/entropy", "policy/logp_mean", "policy/logp_min"),
    *("loss/policy", "optim/grad_norm", "ratio/mean", "ratio/max", "ratio/ess", "ratio/clipfrac", "policy/kl_old"),
    *("policy/kl_ref_k3", "mismatch/k3", "mismatch/log_ppl_absdiff", "mismatch/prob_absdiff_max"),
    *("mismatch/weight_max", "mismatch/ess", "len/mean", "len/clipped", "text/repetition"),
)
"""Metrics that tools without a limit look at: 22, over all families."""
LEAST_ROWS = 5
"""A baseline has at least so many rows, also where there is a row every 10 steps."""


def watched(metrics: Mapping[str, float], names: Sequence[str] = WATCHED) -> Floats:
    """Values of the row, of shape (names,); NaN where not measured or not finite."""
    row = np.array([metrics.get(name, np.nan) for name in names], dtype=np.float64)
    row[~np.isfinite(row)] = np.nan
    return row


class Start:
    """Collects the rows of the baseline's steps (10 to 39, or until there are enough), then knows centre and spread."""

    def __init__(self) -> None:
        self._first, self._last = limits().windows.baseline
        self._rows: list[Floats] = []
        self._known: tuple[Floats, Floats] | None = None

    def add(self, step: int, row: Floats) -> tuple[Floats, Floats] | None:
        """Median and robust standard deviation, where known before this row (which then is no part of them)."""
        if self._known is None and step > self._last and len(self._rows) >= LEAST_ROWS:
            self._known = _center_and_spread(np.array(self._rows))
        elif self._known is None and step >= self._first:
            self._rows.append(row)
        return self._known


def _center_and_spread(rows: Floats) -> tuple[Floats, Floats]:
    """Of each column; the spread is at least 2 % of the centre, for what hardly moves."""
    center = middle(rows)
    return center, np.maximum(GAUSSIAN * middle(np.abs(rows - center)), 0.02 * np.abs(center) + 1e-6)


def middle(rows: Floats) -> Floats:
    """Median of each column without its NaN; NaN where there is nothing else."""
    ordered = np.sort(rows, axis=0)
    count = np.count_nonzero(~np.isnan(ordered), axis=0)
    columns = np.arange(rows.shape[1])
    low, high = ordered[np.maximum(count - 1, 0) // 2, columns], ordered[np.minimum(count // 2, len(rows) - 1), columns]
    return np.where(count > 0, (low + high) / 2.0, np.nan)
