"""Straight lines to the limits of a run, and their errors in steps on this run so far."""

from __future__ import annotations

import math
from collections import deque
from itertools import takewhile

import numpy as np

from rlwatch.forecast.features import FAR_AHEAD, LIMIT_FEATURES, LIMITS_V1, ChangeLimit
from rlwatch.forecast.signals import Floats
from rlwatch.stats import median

CHECKED_AFTER = 20
"""Steps after which a line is compared with the run."""
ROWS, CHECKS = 64, 20
"""Rows whose lines are stored, and newest checks that count."""
LEAST = 3
"""Checks from which a line is hidden if earlier lines erred by more than the time it gives."""
_FIRST = -1 - len(LIMIT_FEATURES)


class StraightLines:
    """Check each line once the run is :data:`CHECKED_AFTER` steps further; one a row and limit."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, Floats, Floats]] = deque(maxlen=ROWS)
        self._out: list[deque[float]] = [deque(maxlen=CHECKS) for _ in LIMITS_V1]
        self._pace: Floats = np.zeros(len(LIMITS_V1))

    def update(self, step: int, values: Floats) -> None:
        """Take the next row. ``values``: its vector of features."""
        pairs = values[_FIRST:-1]
        share, steps = pairs[::2], pairs[1::2]
        with np.errstate(all="ignore"):
            pace = np.where((steps > 0.0) & (steps < FAR_AHEAD), (1.0 - share) / steps, 0.0)
        while self._rows and self._rows[-1][0] >= step:
            self._rows.pop()  # steps that are run again
        due = len(list(takewhile(lambda row: row[0] <= step - CHECKED_AFTER, self._rows)))
        for _ in range(due):
            before = self._rows.popleft()
        if due:
            self._check(step, share, *before)
        self._rows.append((step, share, pace))
        self._pace = pace

    def _check(self, step: int, share: Floats, before: int, at: Floats, pace: Floats) -> None:
        """Compare the newest line that is due with the run."""
        meant = at + pace * (step - before)
        for i, speed in enumerate(pace.tolist()):
            out = abs(float(meant[i] - share[i]))
            if speed > 0.0 and math.isfinite(out):
                self._out[i].append(out / speed)

    def error(self, limit: ChangeLimit) -> tuple[float | None, int]:
        """Return the median error in steps of lines to a limit, and the number of checks."""
        places = [i for i, each in enumerate(LIMITS_V1) if each == limit]
        out = self._out[places[0]] if places else ()
        return (float(median(list(out))), len(out)) if out else (None, 0)


def falsified(steps_to: float, error: float | None, checks: int) -> bool:
    """Return whether earlier lines erred by more than the time that this one gives."""
    return error is not None and checks >= LEAST and error > max(steps_to, CHECKED_AFTER / 2)


def recedes(type_: str, values: Floats) -> bool:
    """Return whether no logged signal of this type of limit has moved towards it."""
    shares = [
        share for share, limit in zip(values[_FIRST:-1:2].tolist(), LIMITS_V1, strict=True) if limit.type == type_
    ]
    known = [share for share in shares if math.isfinite(share)]
    return bool(known) and max(known) <= 0.0
