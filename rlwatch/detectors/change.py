"""A level of a noisy metric now, against its own start and its own best."""

from __future__ import annotations

import math

from rlwatch.detectors.reward import MEDIAN_ERROR, SURE, noise_of
from rlwatch.stats import Baseline, Window


class Change:
    """Median of the last rows against the median of the first, and against the best such median since.

    Noise is that of one row, from first differences: a trend is no noise.
    """

    def __init__(self, rows: int = 15, steps: int = 30) -> None:
        self._base = Baseline()
        self._now = Window(rows=rows, steps=steps, least=5)
        self._recent = Window(rows=60, steps=10**9, least=6)
        self._best: float | None = None

    def update(self, step: int, value: float) -> None:
        """Take the next finite value."""
        self._base.update(step, value)
        self._now.update(step, value)
        self._recent.update(step, value)
        now = self.now
        if now is not None and self._base.done:
            self._best = now if self._best is None else max(self._best, now)

    @property
    def now(self) -> float | None:
        """Median of the last rows."""
        return self._now.get()

    @property
    def start(self) -> float | None:
        """Median of the first rows; None until all of them are known."""
        return self._base.get() if self._base.done else None

    @property
    def best(self) -> float | None:
        """Highest level since the start."""
        start = self.start
        return None if start is None else start if self._best is None else max(start, self._best)

    @property
    def fallen(self) -> float:
        """How far it lies below its best; 0 if unknown."""
        now, best = self.now, self.best
        return 0.0 if now is None or best is None else max(best - now, 0.0)

    @property
    def gain(self) -> float:
        """How far it lies above its start (negative: below); 0 if unknown."""
        now, start = self.now, self.start
        return 0.0 if now is None or start is None else now - start

    @property
    def share(self) -> float:
        """Of its start; 1 if unknown, or where it began at nothing."""
        now, start = self.now, self.start
        return 1.0 if now is None or start is None or start <= 0.0 else now / start

    @property
    def moved(self) -> bool:
        """Whether the distance from its start is more than noise explains."""
        return abs(self.gain) > self._error

    @property
    def dropped(self) -> bool:
        """The same of the distance below its best."""
        return self.fallen > self._error

    @property
    def _error(self) -> float:
        return SURE * MEDIAN_ERROR * noise_of(self._recent.values) / math.sqrt(max(len(self._now), 1))
