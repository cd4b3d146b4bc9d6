"""The last rows of a run's signals, and the level they started from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.signals import SIGNALS, SPREAD_METRICS, Scale

Floats = npt.NDArray[np.float64]

ROWS = 64
"""Rows kept: 60 steps at one row a step, and more than that at a coarser cadence."""
WARM_FROM, WARM_UNTIL = 10, 40
"""Steps of a run, counted from its first, that make its baseline."""
LEAST_WARM = 5
"""Rows a baseline needs: a coarse log goes on past ``WARM_UNTIL`` until it has them."""

_RATIO = np.array([signal.scale is Scale.RATIO for signal in SIGNALS])
_FLOOR = np.array([signal.floor for signal in SIGNALS])
_UNIT = np.array([signal.floor if signal.scale is Scale.NATS else 1.0 for signal in SIGNALS])
_SPREAD = np.array([signal.scale is Scale.SPREAD for signal in SIGNALS])
_KL = np.array([signal.name.startswith("kl_ref") for signal in SIGNALS])


class History:
    """Raw values of every signal in the last rows; missing and non-finite ones are NaN here, and counted.

    Each signal keeps to the metric it was first read from: another estimator has another level. ``broken``: of each
    row, whether a signal that had been a number no longer was; ``blamed``: the metric of which that was last so. What
    never was a number is switched off (TRL's ``kl`` at beta = 0), not broken.
    """

    def __init__(self) -> None:
        self.steps: Floats = np.empty(0)
        self.raw: Floats = np.empty((0, len(SIGNALS)))
        self.broken: Floats = np.empty(0)
        self.blamed = ""
        self._numbers = np.zeros(len(SIGNALS), dtype=bool)
        self._metric: list[str | None] = [None] * len(SIGNALS)
        self._warm: list[Floats] = []
        self._spread: list[float] = []
        self._first: int | None = None
        self._baseline: Floats | None = None
        self._unit: Floats = _UNIT

    @property
    def source(self) -> tuple[str | None, ...]:
        """Metric that each signal is read from; None where the run has none."""
        return tuple(self._metric)

    @property
    def warm_rows(self) -> int:
        """Rows that the baseline has so far."""
        return len(self._warm)

    @property
    def baseline(self) -> Floats | None:
        """Median of each signal over the first steps; None before it is complete."""
        return self._baseline

    def since_start(self, step: int) -> int:
        """Steps since the first."""
        return 0 if self._first is None else step - self._first

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row. A step that is not beyond the last one takes back all from there on."""
        self._first = step if self._first is None else min(self._first, step)
        row, broken = self._read(metrics)
        kept = (self.steps < step).nonzero()[0][-(ROWS - 1) :]
        self.steps = np.append(self.steps[kept], float(step))
        self.raw = np.vstack((self.raw[kept], row))
        self.broken = np.append(self.broken[kept], float(broken))
        self._learn(step, row, metrics)

    def forget_reference(self) -> None:
        """The reference was reset: KL to the old one says nothing of KL to the new one."""
        self.raw[:, _KL] = math.nan

    def changes(self, rows: Floats | None = None) -> Floats:
        """Changes against the baseline, in the scale of each signal: (rows, signals)."""
        raw, base = self.raw if rows is None else rows, self._baseline
        if base is None:
            return np.full_like(raw, math.nan)
        edge = np.maximum(0.05 * np.abs(base), _FLOOR)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(np.maximum(raw + edge, 1e-12) / np.maximum(base + edge, 1e-12))
        return np.where(_RATIO, ratio, (raw - base) / self._unit)

    @property
    def start(self) -> Floats:
        """The baseline in the unit of the changes; NaN before it is complete."""
        base = self._baseline
        return np.full(len(SIGNALS), math.nan) if base is None else base / self._unit

    def warm_changes(self) -> Floats:
        """The same of the baseline's own rows."""
        return self.changes(np.array(self._warm))

    def _read(self, metrics: Mapping[str, float]) -> tuple[Floats, bool]:
        row, broken = np.full(len(SIGNALS), math.nan), False
        for i, signal in enumerate(SIGNALS):
            found = signal.read(metrics)
            if found is None:
                continue
            name, value = found
            self._metric[i] = self._metric[i] or name
            finite = math.isfinite(value)
            if not finite and self._numbers[i]:
                broken, self.blamed = True, name
            self._numbers[i] |= finite
            if name == self._metric[i] and finite:
                row[i] = value
        return row, broken

    def _learn(self, step: int, row: Floats, metrics: Mapping[str, float]) -> None:
        since = self.since_start(step)
        if self._baseline is not None or since < WARM_FROM:
            return
        if since >= WARM_UNTIL and len(self._warm) >= LEAST_WARM:
            self._freeze()
            return
        self._warm.append(row)
        spread = next((metrics[name] for name in SPREAD_METRICS if name in metrics), math.nan)
        self._spread += [spread] if math.isfinite(spread) else []

    def _freeze(self) -> None:
        warm = np.array(self._warm)
        seen = np.isfinite(warm).sum(0) >= min(LEAST_WARM, 3)
        self._baseline = np.full(len(SIGNALS), math.nan)
        self._baseline[seen] = np.nanmedian(warm[:, seen], axis=0)
        told = float(np.median(self._spread)) if self._spread else 0.0
        self._unit = np.where(_SPREAD, max(told, self._own_spread(warm), 1e-6), _UNIT)

    @staticmethod
    def _own_spread(warm: Floats) -> float:
        """Spread of the rows' means, where the run tells none, or none within a row."""
        values = warm[:, _SPREAD]
        values = values[np.isfinite(values)]
        return float(np.std(values)) if values.size else 0.0
