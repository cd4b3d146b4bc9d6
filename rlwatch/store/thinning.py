"""Thin a metric's series that was read whole, for stores that keep no precomputed extremes of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlwatch.ports import Series

if TYPE_CHECKING:
    import numpy as np

LEAST = 64
"""Fewest rows that are summarised by one point of a chart; a series with fewer rows a point is not thinned."""


def bounds_of(spans: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return, for each attempt but the last, the step from which later attempts may have replaced its rows.

    ``spans``: for each attempt (one process of a resumed run) its lowest and its highest recorded step. The bound of an
    attempt is the lowest step of any later one. Empty if the run was never resumed.

    >>> bounds_of({1: (0, 9), 2: (5, 20), 3: (4, 30)})
    {1: 4, 2: 4}
    """
    last = max(spans, default=0)
    return {a: min(low for later, (low, _) in spans.items() if later > a) for a in spans if a != last}


def thinned(one: Series, points: int, bounds: Mapping[int, int]) -> Series:
    """Return ``one`` series with only the extremes of each stretch of rows, for a chart that is ``points`` wide.

    The series is returned as it is if it has fewer than ``LEAST`` rows for each two points. ``bounds``: for each
    resumed attempt the step from which later attempts replaced its rows (see :func:`bounds_of`). Rows that still count
    and rows that were replaced are thinned separately. Each stretch keeps its smallest and largest finite value and its
    first NaN, +Inf and -Inf.
    """
    import numpy as np

    width = 2 * len(one.values) // max(1, points)
    if width < LEAST:
        return one
    counted = np.ones(len(one.values), dtype=bool)
    for attempt, bound in bounds.items():
        counted &= (one.attempts != attempt) | (one.steps < bound)
    places = [_standing_out(one.values, np.flatnonzero(group), width) for group in (counted, ~counted)]
    left = np.unique(np.concatenate(places))
    return Series(one.name, one.steps[left], one.values[left], one.attempts[left], one.seqs[left])


def _standing_out(values: np.ndarray, places: np.ndarray, width: int) -> np.ndarray:
    """Return which of the row numbers ``places`` are kept: extremes of each ``width`` rows, and all of the last
    stretch.
    """
    import numpy as np

    whole = max(0, len(places) - 1) // width * width
    stretches = values[places[:whole]].reshape(-1, width)
    starts = np.arange(len(stretches)) * width
    finite = np.isfinite(stretches)
    picks = [(finite, np.where(finite, stretches, np.inf).argmin(axis=1))]
    picks.append((finite, width - 1 - np.where(finite, stretches, -np.inf)[:, ::-1].argmax(axis=1)))
    picks += [(hit, hit.argmax(axis=1)) for hit in (np.isnan(stretches), stretches == np.inf, stretches == -np.inf)]
    left = [(starts + at)[hit.any(axis=1)] for hit, at in picks]
    found: np.ndarray = places[np.concatenate([*left, np.arange(whole, len(places))])]
    return found
