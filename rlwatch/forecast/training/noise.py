"""The same run as a trainer with a small batch would have logged it.

Many runs put eight responses into a step: their rewards jump, their KL and gradient norms scatter over a factor of
ten, and nothing is wrong. A model that has only seen quiet logs takes that for trouble.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.signals import SIGNALS, SPREAD_METRICS, Scale, Signal

LEAST, MOST = 4, 32
"""Responses in a step."""
SCATTER = 1.2
"""Log standard deviation of one response's KL, gradient norm and the like."""
TAIL = 4.0
"""Degrees of freedom: some rows are far off."""
SWAY, APART = 0.5, 60
"""How much the noise itself comes and goes (log standard deviation), and in how many rows."""
FULL = 48
"""Responses in a step of the runs that the noise is added to."""
_BY_METRIC: dict[str, Signal] = {name: signal for signal in SIGNALS for name in signal.metrics}
Row = tuple[int, Mapping[str, float]]


def noisy(rows: Iterable[Row], seed: int) -> list[Row]:
    """Rows with the noise of a batch of 4 to 32 responses; NaN and infinities stay.

    Means scatter as those of so few responses do, beyond what they scatter already; lengths and entropies, which
    responses share, by a quarter of that. How much they do comes and goes: a task that is learnt, or prompts that get
    harder, spread the responses of a group in another way than those of the first steps.
    """
    draw = np.random.default_rng(seed)
    count = int(np.exp(draw.uniform(math.log(LEAST), math.log(MOST))))
    size = math.sqrt(max(1.0 / count - 1.0 / FULL, 0.0))
    rows = list(rows)
    sizes = size * np.exp(SWAY * _course(len(rows), draw))
    return [(step, _Batch(metrics, by, draw).noisy(metrics)) for (step, metrics), by in zip(rows, sizes, strict=True)]


def _course(rows: int, draw: np.random.Generator) -> npt.NDArray[np.float64]:
    """A smooth random course of spread 1, (rows,): normal draws every :data:`APART` rows, joined by straight lines."""
    knots = draw.standard_normal(rows // APART + 2)
    return np.interp(np.arange(rows) / APART, np.arange(len(knots)), knots)


class _Batch:
    """The noise of one step: rewards of the same responses scatter together."""

    def __init__(self, metrics: Mapping[str, float], size: float, draw: np.random.Generator) -> None:
        spread = next((metrics[name] for name in SPREAD_METRICS if name in metrics), 0.0)
        self._size = size
        self._reward = size * (spread if math.isfinite(spread) else 0.0) * float(draw.standard_normal())
        self._draw = draw

    def noisy(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """All values, as that batch would have had them."""
        return {name: self._value(_BY_METRIC.get(name), value) for name, value in metrics.items()}

    def _value(self, signal: Signal | None, value: float) -> float:
        if signal is None or not math.isfinite(value):
            return value
        odd = self._size * float(self._draw.standard_t(TAIL))
        if signal.scale is Scale.SPREAD:
            return value + self._reward
        if signal.scale is Scale.SHARE:
            return min(max(value + odd * math.sqrt(max(value * (1.0 - value), 0.01)), 0.0), 1.0)
        if signal.scale is Scale.NATS:
            return value + odd * signal.floor
        calm = 0.25 if signal.name.startswith(("length", "entropy", "reward_std")) else 1.0
        scattered = (1.0 - value if signal.complement else value) * math.exp(calm * SCATTER * odd)
        return 1.0 - min(scattered, 1.0) if signal.complement else scattered
