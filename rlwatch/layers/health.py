"""Each layer against its own level, step by step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlwatch.layers.concentration import Floats, participation, shares
from rlwatch.layers.correlation import heterogeneity
from rlwatch.layers.step import TIMES, WINDOW, LayerStep, SpikingLayer

WARM_UP = 20
"""Rows from which a layer has a level, and layers a correlation."""
DEVIATIONS = 6.0
"""Least distance from its level in (robust, log) standard deviations."""
SCATTER = 0.05
"""Least standard deviation of a log norm: what hardly moves may still move a little."""
FEWEST = 3
"""Layers below which none can be told from the others."""
SILENT = 20.0
"""Factor below the usual total norm from which a step says nothing of its layers: batches without a signal."""
MOST = 4096
"""Layers that are followed; any beyond are not."""
LARGEST = 700.0
"""Logarithm of the largest factor told: beyond it there are no floats."""
GAUSSIAN = 1.4826
"""Makes a median absolute deviation estimate a normal standard deviation."""


@dataclass(slots=True)
class _Row:
    """One step: norms (L,), NaN where there is none, and their logs relative to the median layer of the step.

    ``telling``: it had a signal, so levels learn of it; ``ordinary``: nothing spiked either, so correlations do.
    """

    step: int
    norms: Floats
    relative: Floats
    log_total: float
    telling: bool
    ordinary: bool


class LayerHealth:
    """Judges each step's layer norms by the steps before it, then learns of them.

    What moves all layers alike (batch size, schedule, a batch without a signal) must not look like a layer's own
    doing: levels are medians, over the last ``window`` rows, of a layer's log norm minus that of the step's median
    layer. A spike cannot move a median; a change that lasts for half the window is the new level. Cost per step is
    O(window * layers); memory likewise.
    """

    def __init__(self, *, window: int = WINDOW, warm_up: int = WARM_UP) -> None:
        self.warm_up = warm_up
        self._columns: dict[str, int] = {}
        self._rows: deque[_Row] = deque(maxlen=window)
        self._open: _Row | None = None
        self._step: int | None = None
        self._given: dict[str, float] = {}

    def update(self, step: int, norms: Mapping[str, float]) -> LayerStep | None:
        """Take a step's norms by layer; None if none of them is a finite, positive number.

        Layers of the same step that come later join those that came before. A lower step than the last one (back to a
        checkpoint) forgets what lay at or after it.
        """
        self._turn(step)
        self._given |= norms
        usual = self._usual_total()
        self._open = self._row(step, self._given, usual)
        return None if self._open is None else self._judged(self._open, self._given, usual)

    def _turn(self, step: int) -> None:
        """Learn of the last step once another begins."""
        if self._step == step:
            return
        if self._open is not None:
            self._rows.append(self._open)
        while self._rows and self._rows[-1].step >= step:
            self._rows.pop()
        self._step, self._given, self._open = step, {}, None

    def _row(self, step: int, given: dict[str, float], usual: float | None) -> _Row | None:
        for layer in given:
            if len(self._columns) < MOST:
                self._columns.setdefault(layer, len(self._columns))
        norms = np.full(len(self._columns), np.nan)
        for layer, norm in given.items():
            if layer in self._columns and 0.0 < norm < math.inf:
                norms[self._columns[layer]] = norm
        there = norms[np.isfinite(norms)]
        if not len(there):
            return None
        logs = np.log(norms)
        total = math.log(there.max()) + 0.5 * math.log(np.square(there / there.max()).sum())
        telling = usual is None or total >= usual - math.log(SILENT)
        return _Row(step, norms, logs - _median(logs), total, telling, telling)

    def _judged(self, row: _Row, given: dict[str, float], usual: float | None) -> LayerStep:
        measured = {layer: norm for layer, norm in given.items() if 0.0 <= norm < math.inf}
        norms = np.array(list(measured.values()))
        parts = shares(norms)
        spiking, rise = self._against_levels(row) if row.telling else (None, None)
        times = None if usual is None else math.exp(min(row.log_total - usual, LARGEST))
        # A single spike would outweigh all other rows of the window in a correlation.
        row.ordinary = row.telling and not spiking and (times is None or times < TIMES)
        return LayerStep(
            layers=len(measured),
            max_share=float(parts.max()),
            heaviest=list(measured)[int(parts.argmax())],
            participation=participation(norms) or 0.0,
            heterogeneity=self._heterogeneity(row),
            rise=rise,
            spiking=spiking,
            total_times=times,
        )

    def _against_levels(self, row: _Row) -> tuple[tuple[SpikingLayer, ...] | None, float | None]:
        """The layers that spike, and by how much the furthest is above the median one."""
        before = self._stacked([past.relative for past in self._rows if past.telling])
        if len(before) < self.warm_up:
            return None, None
        level = _medians(before, self.warm_up)
        off = row.relative - level
        if np.isfinite(off).sum() < FEWEST:
            return None, None
        off -= _median(off)
        scatter = np.maximum(GAUSSIAN * _medians(np.abs(before - level), self.warm_up), SCATTER)
        with np.errstate(invalid="ignore"):
            found = np.flatnonzero((off > math.log(TIMES)) & (off > DEVIATIONS * scatter))
        times = np.exp(np.minimum(off, LARGEST))
        names = list(self._columns) if len(found) else []
        spiking = [
            SpikingLayer(names[i], float(row.norms[i]), float(times[i]), float(off[i] / scatter[i]))
            for i in found[np.argsort(-off[found], kind="stable")]
        ]
        return tuple(spiking), float(np.nanmax(times))

    def _heterogeneity(self, row: _Row) -> float | None:
        norms = self._stacked([*(past.norms for past in self._rows if past.ordinary), *([row.norms] * row.ordinary)])
        # A step most of whose layers are missing would shut those layers out, not only itself.
        norms = norms[np.isfinite(norms).mean(axis=1) > 0.5]
        return heterogeneity(norms) if len(norms) > self.warm_up else None

    def _stacked(self, rows: list[Floats]) -> Floats:
        """(W, L), oldest first; layers that a row did not know yet are NaN."""
        width = len(self._columns)
        if any(len(row) != width for row in rows):
            rows = [np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows]
        return np.array(rows).reshape(len(rows), width)

    def _usual_total(self) -> float | None:
        """Level of the logarithm of the total norm: of steps with a signal, which may be one in four."""
        if len(self._rows) < self.warm_up:
            return None
        totals = np.sort([row.log_total for row in self._rows])
        return _median(totals[totals >= totals[3 * len(totals) // 4] - math.log(SILENT)])


def _median(values: Floats) -> float:
    """Of the finite ones; there is at least one."""
    told = np.sort(values[np.isfinite(values)])
    return float(0.5 * (told[(len(told) - 1) // 2] + told[len(told) // 2]))


def _medians(rows: Floats, least: int) -> Floats:
    """Median of each column's finite values; NaN where there are fewer than ``least``."""
    ordered = np.sort(rows, axis=0)  # NaN last
    count = np.isfinite(rows).sum(axis=0)
    at = np.arange(rows.shape[1])
    below, above = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(rows) - 1)
    return np.where(count >= least, 0.5 * (ordered[below, at] + ordered[above, at]), np.nan)
