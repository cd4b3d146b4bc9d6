"""The features of one run, step by step: causal, relative to its own start, and the same code live and in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlwatch.forecast.history import WARM_UNTIL, Floats, History
from rlwatch.forecast.limits import LIMIT_FEATURES, Reach, Standing, TakeOff, breaking, goals, reaches
from rlwatch.forecast.shapes import QUIET, SHAPES, Extremes, jitter, median, shapes, spread
from rlwatch.forecast.signals import SIGNALS

BROKEN = "broken"
"""Share of the last 25 steps' rows in which some signal was no longer finite."""
FEATURES: tuple[str, ...] = (
    *(f"{signal.name}:{shape}" for shape in SHAPES for signal in SIGNALS),
    *LIMIT_FEATURES,
    BROKEN,
)
"""Names, in the order of the vector: ``signal:shape``, ``limit:type:signal:share|steps``, ``broken``."""


@dataclass(frozen=True, slots=True)
class Features:
    """``values`` in the order of :data:`FEATURES` (NaN: not measured), and where each limit stands."""

    step: int
    values: Floats
    reaches: tuple[Reach, ...]


class FeatureStream:
    """Takes a run's rows in order and gives the features of the newest one.

    Steps may be irregular or several apart (windows are in steps, with a least number of rows); a step that comes
    again takes back what came after it.
    """

    def __init__(self) -> None:
        self.history = History()
        self._extremes = Extremes(len(SIGNALS))
        self._noise: Floats | None = None
        self._restless: Floats | None = None
        self._goals: tuple[float, ...] = ()
        self._take_off = TakeOff()

    def forget_reference(self) -> None:
        """The reference was reset."""
        self.history.forget_reference()

    def waiting(self) -> str:
        """What is still missing before there can be features; empty when nothing is."""
        history = self.history
        if history.baseline is not None:
            return ""
        if not len(history.steps):
            return "no step has closed yet"
        since = history.since_start(int(history.steps[-1]))
        return f"it needs the first {WARM_UNTIL} steps as a baseline, and has {since} ({history.warm_rows} rows)"

    def update(self, step: int, metrics: Mapping[str, float]) -> Features | None:
        """Add a row; None while the baseline is incomplete.

        Parameters
        ----------
        step
            The trainer's step, >= 0.
        metrics
            Canonical metrics of the step; NaN and infinities are counted and otherwise left out.
        """
        history = self.history
        history.update(step, metrics)
        if history.baseline is None:
            return None
        if self._noise is None or self._restless is None:
            self._noise, self._restless = _spreads(history)
            self._goals = goals(history)
        noise = np.fmax(self._noise, jitter(history))
        found = shapes(history, self._extremes, noise, self._restless)
        found.values[:, np.isnan(history.baseline)] = np.nan
        standing = Standing(history.start, found.now, found.fallen, found.slope, noise)
        reached = reaches(self._goals, standing, self._take_off.update(standing))
        pairs = [value for reach in reached for value in (reach.share, reach.steps)]
        broken = history.broken[history.steps > step - 25].mean()
        values = np.concatenate((found.values.ravel(), np.clip(pairs, -5.0, 200.0), [broken]))
        return Features(step, values, (*reached, breaking(history)))


def _spreads(history: History) -> tuple[Floats, Floats]:
    """Noise of each signal in its baseline: of its changes (robust), and of their differences."""
    warm = history.warm_changes()
    noise = 1.4826 * median(np.abs(warm - median(warm)))
    return np.fmax(noise, QUIET), np.fmax(spread(np.diff(warm, axis=0)), 0.0)
