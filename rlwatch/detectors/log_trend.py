"""A steady rise of a positive quantity, as mismatch that feeds on itself grows: by a factor per step."""

from __future__ import annotations

import math

from rlwatch.stats import Window, mad, theil_sen

LEAST = math.log(1.25)
"""Rise over the window, of the logarithm, below which it may be anything."""
SURE = 4.0
"""Standard errors of that rise that make it one; neighbouring rows go together, so 2 would be few."""

STEADY = 0.35
"""Share of the slope that both halves must show: a step up is a shift, and CUSUM's matter."""


class LogTrend:
    """Theil-Sen slope of the logarithm over the last rows, if both halves of them rise."""

    def __init__(self) -> None:
        self._window = Window(rows=40, steps=400, least=12)

    def update(self, step: int, log: float) -> None:
        """Take the logarithm of a row."""
        self._window.update(step, log)

    def doubling(self) -> float | None:
        """Steps in which it doubles; None where no rise is sure. Costs a few hundred microseconds."""
        steps, values = self._window.at, self._window.values
        if len(steps) < self._window.least or steps[-1] == steps[0]:
            return None
        slope = theil_sen(steps, values)
        rise = slope * (steps[-1] - steps[0])
        if rise <= LEAST:
            return None
        noise = mad([value - slope * step for step, value in zip(steps, values, strict=True)])
        if rise <= SURE * noise * math.sqrt(12.0 / len(steps)):
            return None
        half = len(steps) // 2
        halves = (theil_sen(steps[:half], values[:half]), theil_sen(steps[half:], values[half:]))
        return math.log(2.0) / slope if min(halves) >= STEADY * slope else None
