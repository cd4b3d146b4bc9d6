"""A metric that is beyond a bound, whatever the run's history: often since its first row."""

from __future__ import annotations

import math

from rlwatch.detectors.base import CARRY_ROWS
from rlwatch.detectors.rise import Limit
from rlwatch.stats import Baseline, Hold, Window


class Standing:
    """Median of the last rows beyond ``limit.floor``, on the limit's scale, for ``rows`` rows."""

    def __init__(self, limit: Limit, rows: int = 5) -> None:
        self.limit = limit
        self.bound = limit.scale(limit.floor)
        """The bound on the limit's scale."""
        self.rows = rows
        self._base = Baseline()
        self._now = Window(rows=10, steps=10)
        self._raw = Window(rows=10, steps=10)
        self._row = Hold(forgive=3)
        self._hold = Hold(forgive=1)
        self._blank = 0

    def update(self, step: int, value: float | None) -> None:
        """Take a row; None where it was not measured."""
        if value is None:
            self._blank += 1
            if self._blank > CARRY_ROWS:
                self._hold.clear()
            return
        self._blank = 0
        scaled = self.limit.scale(value)
        for part in (self._base, self._now):
            part.update(step, scaled)
        self._raw.update(step, value)
        self._row.update(step, scaled >= self.bound)
        self._hold.update(step, self.score >= 1.0)

    @property
    def score(self) -> float:
        """The level of the last rows over the bound."""
        now = self._now.get()
        return 0.0 if now is None else now / self.bound

    @property
    def level(self) -> float | None:
        """Median of the last rows, in the metric's own unit."""
        return self._raw.get()

    @property
    def lasted(self) -> bool:
        """Whether it has been beyond the bound for long enough."""
        return self._hold.lasted(self.rows)

    @property
    def since(self) -> int | None:
        """Since when single rows, or else their median, have been beyond it."""
        return self._hold.since if self._row.since is None else self._row.since

    @property
    def always(self) -> bool:
        """Whether it was so, or nearly so, when the run began: a matter of set-up, not of training."""
        return self._began >= self.bound / 2.0

    @property
    def began_beyond(self) -> bool:
        """Whether it was beyond the bound when the run began."""
        return self._began >= self.bound

    @property
    def _began(self) -> float:
        return -math.inf if self._base.first is None else self._base.first
