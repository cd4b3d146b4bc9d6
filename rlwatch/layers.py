"""Health of a model's layers from their gradient norms: which layer dominates a step, and which rose far above its
level.

Norms are logged as ``grad_layer/<layer>``, one number for each layer and step, before clipping. The module uses numpy
only, no torch. A norm that is NaN, infinite, or zero (an expert without tokens) enters no statistic of the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlwatch.metrics import LAYER_PREFIX
from rlwatch.records import StepRecord
from rlwatch.stats import GAUSSIAN

__all__ = ["DerivedLayers", "LayerHealth", "LayerStep", "SpikingLayer", "layer_norms"]


# The metrics of layers that are stored with the norms from which they are computed.


def layer_norms(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return layer -> gradient norm, from the metrics named ``grad_layer/<layer>``."""
    return {layer: metrics[name] for name, layer in _layers(tuple(metrics))}


@lru_cache(maxsize=32)
def _layers(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return pairs of the metric name and the layer for each layer norm in a row; cached, as most rows have the same
    names.
    """
    return tuple((name, name[len(LAYER_PREFIX) :]) for name in names if name.startswith(LAYER_PREFIX))


class DerivedLayers:
    """Adds the metrics ``layers/...``, computed from layer norms, to the rows of one run as they arrive."""

    def __init__(self) -> None:
        self._health: LayerHealth | None = None

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics ``layers/...`` of a step to its ``metrics``, in place, if these contain layer norms.

        A metric that is already present is kept. Steps must arrive in order, as each is compared with those before it.
        """
        norms = layer_norms(metrics)
        if not norms:
            return
        self._health = self._health or LayerHealth()
        health = self._health.update(step, norms)
        for name, value in (health.metrics() if health is not None else {}).items():
            metrics.setdefault(name, value)

    def added(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield ``records`` in order, each with the metrics ``layers/...`` if it has layer norms. For logs of other
        programs.
        """
        for record in records:
            metrics = dict(record.metrics)
            self.add(record.step, metrics)
            yield record if len(metrics) == len(record.metrics) else replace(record, metrics=metrics)


# Results of one step, as plain numbers.

WINDOW_ROWS = 50
"""Number of rows over which levels and correlations are computed."""
SPIKE_TIMES = 6.0
"""Smallest factor over its level from which on a layer's norm is a spike."""


@dataclass(frozen=True, slots=True)
class SpikingLayer:
    """A layer whose gradient norm is far above the norm it would have if it followed the other layers as before.

    Parameters
    ----------
    layer
        Name of the layer.
    norm
        Gradient norm of the layer in this step, before clipping.
    times
        ``norm`` divided by the expected norm.
    deviations
        Distance from the expected norm in standard deviations of the log norm.
    """

    layer: str
    norm: float
    times: float
    deviations: float

    @property
    def usual(self) -> float:
        """Gradient norm that the layer would have if it followed the other layers as before."""
        return self.norm / self.times


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Statistics of the layers' gradient norms in one step; None where the run is too young, or has too few layers, to
    judge.

    Parameters
    ----------
    layers
        Number of layers measured with a finite norm.
    max_share, heaviest
        Largest share of the squared gradient norm, in [0, 1], and the layer that has it.
    participation
        In [1/L, 1]: how evenly the squared norm is spread over the L layers.
    heterogeneity
        1 - mean pairwise correlation of the norms over the last rows in which nothing spiked.
    rise
        max_l(n_l / usual_l) / median_l(n_l / usual_l), >= 1.
    spiking
        Layers far above their level relative to the others, the worst first.
    total_times
        Norm of all layers together, divided by its usual level.
    """

    layers: int
    max_share: float
    heaviest: str
    participation: float
    heterogeneity: float | None = None
    rise: float | None = None
    spiking: tuple[SpikingLayer, ...] | None = None
    total_times: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return these statistics as metrics ``layers/...`` (name -> value), without those that are not known."""
        known = {
            "layers/heterogeneity": self.heterogeneity,
            "layers/participation": self.participation,
            "layers/max_share": self.max_share,
            "layers/rise": self.rise,
            "layers/spiking": None if self.spiking is None else float(len(self.spiking)),
        }
        return {name: value for name, value in known.items() if value is not None}


# Each layer against its own level, step by step.

WARM_UP = 20
"""Number of rows from which on a layer has a level, and the layers a correlation."""
DEVIATIONS = 6.0
"""Smallest distance of a spike from the layer's level, in (robust) standard deviations of its log norm."""
SCATTER = 0.05
"""Smallest standard deviation of a log norm that is assumed: a nearly constant norm may still vary a little."""
FEWEST_LAYERS = 3
"""Smallest number of layers among which one can be distinguished from the others."""
SILENT_FACTOR = 20.0
"""A step whose total norm is this many times below the usual one shows nothing about its layers: its batch has no
signal.
"""
MOST_LAYERS = 4096
"""Largest number of layers followed; further ones are ignored."""
LARGEST_LOG = 700.0
"""Logarithm of the largest factor that is reported: floats end a little beyond it."""


@dataclass(slots=True)
class _Row:
    """One step: the norms (L,) of the layers, NaN where there is none, and their logs relative to the step's median
    layer.

    ``informative``: the step had a signal, so levels are updated from it. ``ordinary``: nothing spiked in it either, so
    correlations are too.
    """

    step: int
    norms: Floats
    relative: Floats
    log_total: float
    informative: bool
    ordinary: bool


class LayerHealth:
    """Compares each step's layer norms with those of the steps before it, then adds them to the history.

    A change common to all layers (batch size, schedule, a batch without a signal) must not look like a change of one
    layer. So the level of a layer is a median over the last ``window`` rows: of its log norm minus the log norm of the
    step's median layer. A spike cannot move a median; a change that lasts for half the window becomes the new level.
    Cost and memory per step are O(window * layers).

    Parameters
    ----------
    window
        Number of rows in the history.
    warm_up
        Number of rows from which on layers are judged.
    """

    def __init__(self, *, window: int = WINDOW_ROWS, warm_up: int = WARM_UP) -> None:
        self.warm_up = warm_up
        self._columns: dict[str, int] = {}
        self._rows: deque[_Row] = deque(maxlen=window)
        self._open: _Row | None = None
        self._step: int | None = None
        self._given: dict[str, float] = {}

    def update(self, step: int, norms: Mapping[str, float]) -> LayerStep | None:
        """Add the gradient norms of one step (layer -> norm) and return its statistics; None if no norm is finite and
        positive.

        Several calls with the same step are merged. A step lower than the last one (training went back to a checkpoint)
        removes that step and all later ones from the history.
        """
        self._turn(step)
        self._given |= norms
        usual = self._usual_total()
        self._open = self._row(step, self._given, usual)
        return None if self._open is None else self._judged(self._open, self._given, usual)

    def _turn(self, step: int) -> None:
        """Add the last step to the history when another one begins."""
        if self._step == step:
            return
        if self._open is not None:
            self._rows.append(self._open)
        while self._rows and self._rows[-1].step >= step:
            self._rows.pop()
        self._step, self._given, self._open = step, {}, None

    def _row(self, step: int, given: dict[str, float], usual: float | None) -> _Row | None:
        for layer in given:
            if len(self._columns) < MOST_LAYERS:
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
        informative = usual is None or total >= usual - math.log(SILENT_FACTOR)
        return _Row(step, norms, logs - _median(logs), total, informative, informative)

    def _judged(self, row: _Row, given: dict[str, float], usual: float | None) -> LayerStep:
        measured = {layer: norm for layer, norm in given.items() if 0.0 <= norm < math.inf}
        norms = np.array(list(measured.values()))
        parts = shares(norms)
        spiking, rise = self._against_levels(row) if row.informative else (None, None)
        times = None if usual is None else math.exp(min(row.log_total - usual, LARGEST_LOG))
        # A single spike would outweigh all other rows of the window in a correlation.
        row.ordinary = row.informative and not spiking and (times is None or times < SPIKE_TIMES)
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
        """Return the layers that spike, and by what factor the furthest layer is above the median one."""
        before = self._stacked([past.relative for past in self._rows if past.informative])
        if len(before) < self.warm_up:
            return None, None
        level = _medians(before, self.warm_up)
        off = row.relative - level
        if np.isfinite(off).sum() < FEWEST_LAYERS:
            return None, None
        # Relative to the median layer once more: a change that most layers share is not a layer's own.
        off -= _median(off)
        scatter = np.maximum(GAUSSIAN * _medians(np.abs(before - level), self.warm_up), SCATTER)
        with np.errstate(invalid="ignore"):
            above = np.flatnonzero((off > math.log(SPIKE_TIMES)) & (off > DEVIATIONS * scatter))
        times = np.exp(np.minimum(off, LARGEST_LOG))
        names = list(self._columns) if len(above) else []
        spiking = [
            SpikingLayer(names[i], float(row.norms[i]), float(times[i]), float(off[i] / scatter[i]))
            for i in above[np.argsort(-off[above], kind="stable")]
        ]
        return tuple(spiking), float(np.nanmax(times))

    def _heterogeneity(self, row: _Row) -> float | None:
        norms = self._stacked([*(past.norms for past in self._rows if past.ordinary), *([row.norms] * row.ordinary)])
        # A step that lacks most of its layers would exclude those layers from the correlation, not only itself.
        norms = norms[np.isfinite(norms).mean(axis=1) > 0.5]
        return heterogeneity(norms) if len(norms) > self.warm_up else None

    def _stacked(self, rows: list[Floats]) -> Floats:
        """Stack rows as an array (W, L), oldest first; layers that a row does not know yet are NaN."""
        width = len(self._columns)
        if any(len(row) != width for row in rows):
            rows = [np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows]
        return np.array(rows).reshape(len(rows), width)

    def _usual_total(self) -> float | None:
        """Return the usual log of the total norm, from the steps with a signal, which may be one in four; None during
        warm-up.
        """
        if len(self._rows) < self.warm_up:
            return None
        totals = np.sort([row.log_total for row in self._rows])
        return _median(totals[totals >= totals[3 * len(totals) // 4] - math.log(SILENT_FACTOR)])


def _median(values: Floats) -> float:
    """Median of the finite values; there is at least one."""
    finite = np.sort(values[np.isfinite(values)])
    return float(0.5 * (finite[(len(finite) - 1) // 2] + finite[len(finite) // 2]))


def _medians(rows: Floats, least: int) -> Floats:
    """Median of each column's finite values; NaN where there are fewer than ``least``."""
    ordered = np.sort(rows, axis=0)  # NaN last
    count = np.isfinite(rows).sum(axis=0)
    at = np.arange(rows.shape[1])
    below, above = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(rows) - 1)
    return np.where(count >= least, 0.5 * (ordered[below, at] + ordered[above, at]), np.nan)


# Concentration: the spread of one step's squared gradient norm over the layers.

Floats = NDArray[np.float64]


def shares(norms: Floats) -> Floats:
    """Return each layer's share ``n_l^2 / sum n^2`` of the squared gradient norm.

    ``norms`` (L,) are finite and >= 0. The shares (L,) add up to 1; if all norms are zero, all shares are.

    >>> shares(np.array([3.0, 4.0])).round(2).tolist()
    [0.36, 0.64]
    """
    largest = norms.max(initial=0.0)
    if largest == 0.0:
        return np.zeros_like(norms)
    squares = np.square(norms / largest)  # divided first: norms beyond 1e154 have no square
    parts: Floats = squares / squares.sum()
    return parts


def participation(norms: Floats) -> float | None:
    """Return how evenly the squared gradient norm is spread over L layers: ``(sum n^2)^2 / (L sum n^4)``, in [1/L, 1].

    1: all layers have the same norm; 1/L: one layer has everything. ``norms`` (L,) are finite and >= 0; None where all
    are zero.

    >>> participation(np.array([1.0, 1.0, 0.0, 0.0]))
    0.5
    """
    parts = shares(norms)
    return None if not parts.any() else float(1.0 / (len(parts) * np.square(parts).sum()))


# Correlation: the layers' gradients rise and fall together, or no longer.

STILL = 1e-9
"""Relative standard deviation below which a norm counts as constant, and is left out of correlations."""


def heterogeneity(norms: NDArray[np.float64]) -> float | None:
    """Return 1 - the mean pairwise Pearson correlation of the layers' gradient norms over W rows.

    0: all layers rise and fall together; 1: they are unrelated; at most 2. Step-wise correlation of layer norms is how
    GradLoc (Tencent Hunyuan 2026) defines layer-wise heterogeneity. The mean over all pairs follows from the norm of
    the sum of the standardised columns, so the cost is O(W L).

    Parameters
    ----------
    norms
        (W, L), NaN where a layer was not measured. Layers with a NaN, and layers with a constant norm, are left out;
        the result is None if fewer than two layers are left, or if W is less than three.
    """
    measured = norms[:, np.isfinite(norms).all(axis=0)]
    measured = measured / measured.max(axis=0, initial=np.finfo(float).tiny)
    deviations = measured - measured.mean(axis=0, keepdims=True) if measured.size else measured
    spread = deviations.std(axis=0) if measured.size else np.zeros(0)
    moving = spread > STILL
    layers = int(moving.sum())
    if layers < 2 or len(norms) < 3:
        return None
    # With standardised columns z_l the correlation of two is <z_l z_m>. Their sum has the mean square sum_lm <z_l z_m>:
    # L ones for l = m, and each pair twice. So the mean over pairs follows without forming them.
    together = (deviations[:, moving] / spread[moving]).sum(axis=1)
    mean = (together @ together / len(norms) - layers) / (layers * (layers - 1))
    return float(np.clip(1.0 - mean, 0.0, 2.0))
