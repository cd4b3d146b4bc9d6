"""Find a lasting change in the difference of two runs, a step or a ramp, by a fit to all rows at once.

A search row by row needs rows that lie far out. In short or noisy runs none does, although all rows after some place
lie on one side. Here a level that changes once, at once or over some rows, is fitted to the whole difference, and the
change is measured in its own standard error. The noise is estimated from the residuals. Rows that resemble their
neighbours count as fewer, so that a drifting level, as two healthy runs have it, gives a larger standard error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_ROWS = 12
"""Fewest rows of a series in which a change of level is searched."""
MOST_ROWS = 256
"""Most rows of a series that are searched for a change; longer ones are averaged in blocks."""
RAMPS = (0.0, 0.06, 0.12, 0.25, 0.5)
"""Lengths that a change may take, as shares of the series; 0 is a jump."""
EDGE = 4
"""Least number of rows before a change, and after its beginning."""
CLEAR = 6.0
"""Smallest change of level that is reported, in standard errors.

With white noise, drifting levels and heavy tails, one in some hundred pairs of healthy runs with ten metrics exceeds
it.
"""
EIGHTH = 8
LARGE, SMALL = 0.6, 0.35
"""Least change of the logarithm that is reported: healthy runs drift apart by less. ``SMALL`` applies if the noise of
single rows explains all changes between the levels of eighths.
"""
FAR, FARTHER, FARTHEST = 4.0, 7.0, 10.0
"""Least ratio of a change to the other differences between neighbouring eighths: if noise explains those, if the levels
drift, and if the change is small.
"""
STILL = 1.3
"""If levels differ by up to this many times the difference explained by noise, they do not drift."""
WIDE = 0.24
"""Share of the series within which the beginning of a change must be known to be dated."""
KEPT = 0.5
"""Share of a change of level that the last quarter of the rows must still show."""
PLAUSIBLE = 9.0
"""Twice the loss of log-likelihood, against the likeliest place of a change, up to which another place is plausible."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A lasting change of the level of a series.

    ``at``: row at which it began, None if the rows do not date it; ``near``: the likeliest row in any case; ``size``:
    how far the level moved; ``errors``: the same in standard errors; ``noise``: standard deviation of single rows.
    """

    at: int | None
    near: int
    size: float
    errors: float
    noise: float


def lasting_shift(d: Floats) -> Shift | None:
    """Return the lasting change in ``d`` (N,), the finite difference of two runs; None if noise and drift explain
    it.
    """
    block = -(-len(d) // MOST_ROWS)
    if len(d) // block < LEAST_ROWS:
        return None
    level = _clipped(d)[: len(d) // block * block].reshape(-1, block).mean(axis=1)
    n = len(level)
    begins, shapes, width = _shapes(n)
    centred = level - level.mean()
    size = shapes @ centred / width
    left = float(centred @ centred) - size**2 * width
    best = int(np.argmin(left))
    rest = centred - size[best] * shapes[best]
    noise = float(rest @ rest) / max(n - 3, 1)
    if noise <= 0.0:
        noise = 1e-24
    error = np.sqrt(noise * _memory(rest) / width[best])
    errors = abs(float(size[best])) / error
    if errors <= CLEAR * (1.0 + LEAST_ROWS / (2.0 * n)) or not _kept(level, shapes[best], float(size[best])):
        return None
    if not _beyond_wandering(rest, abs(float(size[best]))):
        return None
    allowed = begins[left - left[best] <= PLAUSIBLE * noise * _memory(rest)]
    dated = float(np.ptp(allowed)) <= WIDE * n
    near = int(begins[best]) * block
    return Shift(near if dated else None, near, float(size[best]), errors, noise**0.5)


def _clipped(d: Floats) -> Floats:
    """Limit outliers to the range of other rows; a change that half of the rows show is kept."""
    low, middle, high = np.quantile(d, (0.05, 0.5, 0.95))
    return np.clip(d, middle - 1.5 * (middle - low), middle + 1.5 * (high - middle))


@lru_cache(maxsize=16)
def _shapes(n: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the row at which each change begins, its course (shapes, n) about its mean, and the sum of its squares."""
    rows = np.arange(n)
    begins, courses = [], []
    for ramp in dict.fromkeys(int(share * n) for share in RAMPS):
        for begin in range(EDGE, n - EDGE - ramp // 2 + 1):
            course = np.clip((rows - begin + 1) / (ramp + 1), 0.0, 1.0)
            begins.append(begin)
            courses.append(course - course.mean())
    shapes = np.array(courses)
    return np.array(begins), shapes, np.einsum("ij,ij->i", shapes, shapes)


def _memory(rest: Floats) -> float:
    """Return the factor, at least 1, by which autocorrelation raises the variance of a mean.

    The largest estimate over a few lags of an AR(1) process (Bartlett), corrected for few rows.
    """
    n, power = len(rest), float(rest @ rest)
    if power <= 0.0:
        return 1.0
    found = 1.0
    for lag in (1, 2, 4):
        like = float(rest[lag:] @ rest[:-lag]) / power
        like = min(max(like + (1.0 + 3.0 * max(like, 0.0)) / n, 0.0), 0.995) ** (1.0 / lag) if like > 0.0 else 0.0
        if like > 2.0 / n**0.5 or lag == 1:
            found = max(found, (1.0 + like) / (1.0 - min(like, 0.99)))
    return found


def _beyond_wandering(rest: Floats, change: float) -> bool:
    """True if the change is far larger than the drift between the levels of eighths of the run."""
    rows = max(2, len(rest) // EIGHTH)
    levels = rest[: len(rest) // rows * rows].reshape(-1, rows).mean(axis=1)
    apart = float(np.sqrt(np.mean(np.diff(levels) ** 2)))
    by_noise = float(np.sqrt(np.mean(np.diff(rest) ** 2) / rows))
    if change < LARGE:
        return apart <= by_noise and change >= max(SMALL, FARTHEST * apart)
    return change >= (FAR if apart <= STILL * by_noise else FARTHER) * apart


def _kept(level: Floats, shape: Floats, size: float) -> bool:
    """True if the last quarter of the rows is still at the level after the change."""
    before = level[shape <= shape[0]]
    quarter = level[-max(3, len(level) // 4) :]
    return bool(np.sign(size) * (np.median(quarter) - np.median(before)) >= KEPT * abs(size))
