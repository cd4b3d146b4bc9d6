"""Find the step from which two runs differ by more than chance, metric by metric.

The range of chance is estimated from the earlier rows of both runs: the movement of each run over a number of rows,
beyond its trend, and that of their difference. A metric has diverged if the difference leaves this range and stays
outside, or if it is not finite in one run alone. Rows after the divergence are not used for the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlwatch.compare.shift import MOST_ROWS as MOST_SHIFTED
from rlwatch.compare.shift import Shift, lasting_shift
from rlwatch.metrics import metric_of
from rlwatch.stats import GAUSSIAN
from rlwatch.wording import number, step

Floats = NDArray[np.float64]

FEWEST = 8
"""Rows that both runs must have before the range of chance can be estimated."""
HOLD, ALLOWED = 6, 1
"""Number of consecutive rows in which a divergence must show, and how many of them may be exceptions."""
NOISE, WANDERING = 3.0, 4.0
"""Standard deviations that are beyond chance, for the noise of single rows and for the drift of a level. Drift needs
the larger limit, since it returns less often; six consecutive rows beyond 3 standard deviations are no noise.
"""
LEAST = 0.02
"""Smallest difference between two runs that is reported, as a share of the metric's usual size."""
SMALLEST_FRACTION = 0.01
"""Lower bound on the usual size of a metric that is a fraction."""
MOST_ROWS = 2048
"""Most rows that are searched one by one; a longer series is averaged in blocks first, then searched around the
place.
"""
BLOCKS = (1, 4, 16)
"""Numbers of rows whose means are searched."""
GROWTH = 1.5
"""Factor by which the number of rows for the estimate grows from one search to the next."""


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One metric of one run: places ``x`` (N,) on an axis, ascending and distinct, and ``values`` (N,) as measured."""

    x: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of one metric between two runs.

    Attributes
    ----------
    metric
        Canonical name.
    at
        First place (a step, unless aligned otherwise) from which the difference stays beyond chance.
    left, right
        Values of both runs at that place.
    times
        Change of the difference as a multiple of its earlier range; infinite if it was constant before, or if a value
        is not finite.
    together
        Place before ``at``; None if the runs differ from the first rows on.
    until
        Place where the runs come together again; None if they do not.
    before
        Difference before the divergence.
    dated
        False if the rows show a divergence but are too few to date it: ``at`` is then the likeliest place, and the
        values are those of the last rows.
    """

    metric: str
    at: float
    left: float
    right: float
    times: float
    together: float | None = None
    until: float | None = None
    before: float = 0.0
    dated: bool = True

    @property
    def apart_from_start(self) -> bool:
        """True if the runs differ from the first rows on, because of a setting rather than an event."""
        return self.together is None

    @property
    def order(self) -> tuple[bool, bool, float, float]:
        """Sort key: lasting divergences first, then dated ones, then by place, then the stronger first."""
        return self.until is not None, not self.dated, self.at, -self.times

    def text(self, place: Callable[[float], str] = lambda at: step(round(at))) -> str:
        """Return metric, place and values of the divergence as a clause; ``place`` formats a place on the axis."""
        values = f"{number(self.left)} against {number(self.right)}"
        if self.together is None:
            return f"{self.metric} differs from the first rows on: {values}"
        if not self.dated:
            return f"{self.metric} diverged, too few rows to date it: {values} at the end, {self.strength}"
        back = "" if self.until is None else f", until {place(self.until)}"
        return f"{self.metric} diverged at {place(self.at)}{back}: {values}, {self.strength}"

    @property
    def strength(self) -> str:
        """Size of the divergence relative to the difference before it, in words."""
        if not (math.isfinite(self.left) and math.isfinite(self.right)):
            return "both were finite before"
        if math.isinf(self.times) and self.before:
            return f"always {number(abs(self.before))} apart before"
        if math.isinf(self.times):
            return "equal before"
        return f"{number(self.times, 2)} x noise"


def by_place(partings: Iterable[Divergence]) -> list[Divergence]:
    """Return the divergences by the place on the axis where they begin; those that exist from the first rows on come
    last.
    """
    return sorted(partings, key=lambda one: (one.apart_from_start, *one.order))


def divergence_of(metric: str, left: MetricSeries, right: MetricSeries) -> Divergence | None:
    """Return the divergence of ``metric`` between two runs; None if chance explains the difference.

    None also if fewer than :data:`FEWEST` rows match.
    """
    x, a, b = paired(left, right)
    odd = _only_one_finite(a, b)
    finite = np.isfinite(a) & np.isfinite(b)
    if odd is not None:
        finite[odd:] = False
    found = _finite_divergence(metric, x[finite], a[finite], b[finite])
    if odd is None or (found is not None and not found.apart_from_start and found.until is None):
        return found
    return Divergence(metric, float(x[odd]), float(a[odd]), float(b[odd]), math.inf, float(x[odd - 1]) if odd else None)


def _only_one_finite(a: Floats, b: Floats) -> int | None:
    """Return the first row in which only one run is finite; None if both stopped being finite at the same row."""
    strange = np.flatnonzero(~(np.isfinite(a) & np.isfinite(b)))
    if not len(strange):
        return None
    first = int(strange[0])
    return first if np.isfinite(a[first]) != np.isfinite(b[first]) else None


# Rows of two runs that stand for the same place.


def paired(left: MetricSeries, right: MetricSeries) -> tuple[Floats, Floats, Floats]:
    """Return the places that both runs have, and the value of each run there, three arrays of one length.

    If few rows are at common places (other logging intervals, tokens, time) both are averaged in bins as wide as the
    rows of the sparser run are apart. A bin with a value that is not finite has that value.
    """
    if not len(left) or not len(right):
        return np.empty(0), np.empty(0), np.empty(0)
    low, high = max(left.x[0], right.x[0]), min(left.x[-1], right.x[-1])
    one, other = (
        MetricSeries(r.x[inside], r.values[inside])
        for r in (left, right)
        if (inside := _within(r.x, low, high)) is not None
    )
    common, i, j = np.intersect1d(one.x, other.x, assume_unique=True, return_indices=True)
    if 2 * len(common) >= min(len(one), len(other)):
        return common, one.values[i], other.values[j]
    width = max(_cadence(one.x), _cadence(other.x))
    (k, first, a), (m, _, b) = _binned(one, low, width), _binned(other, low, width)
    _, i, j = np.intersect1d(k, m, assume_unique=True, return_indices=True)
    return first[i], a[i], b[j]


def _within(x: Floats, low: float, high: float) -> NDArray[np.bool_]:
    return (x >= low) & (x <= high)


def _cadence(x: Floats) -> float:
    return float(np.median(np.diff(x))) if len(x) > 1 else 1.0


def _binned(rows: MetricSeries, low: float, width: float) -> tuple[Floats, Floats, Floats]:
    """Return the indices of the bins that hold rows, the first place in each, and the mean there."""
    numbers = np.floor((rows.x - low) / width)
    bins, firsts, counts = np.unique(numbers, return_index=True, return_counts=True)
    with np.errstate(invalid="ignore", over="ignore"):
        sums = np.add.reduceat(rows.values, firsts) if len(firsts) else np.empty(0)
    return bins, rows.x[firsts], sums / counts


# What chance does, and what it does not.


def _finite_divergence(metric: str, x: Floats, a: Floats, b: Floats) -> Divergence | None:
    if len(x) < FEWEST or np.array_equal(a, b):
        return None
    place, shift = _place(metric, a, b), _shift(a, b)
    at_once = _different_at_once(metric, x, a, b) if place is None else None
    if at_once is not None:
        return at_once
    if shift is not None and (place is None or place[1] is not None):
        return _by_shift(metric, x, a, b, shift)
    if place is None:
        return None
    at, until = place
    if shift is not None and shift.at is not None and at - shift.at > max(HOLD, 2 * len(x) // MOST_SHIFTED):
        at = shift.at  # what comes over some rows begins before it lies far out
    before = a[:at] - b[:at]
    offset = float(np.median(before))
    usual = max(GAUSSIAN * float(np.median(np.abs(before - offset))), _own_noise(a[:at]), _own_noise(b[:at]))
    apart = abs(float(a[at] - b[at]) - offset)
    return Divergence(
        metric,
        float(x[at]),
        float(a[at]),
        float(b[at]),
        apart / usual if usual > 0 else math.inf,
        float(x[at - 1]),
        None if until is None else float(x[until]),
        offset,
    )


def _shift(a: Floats, b: Floats) -> Shift | None:
    """Return the lasting change of the difference on a scale that is logarithmic for large values; None if none."""
    size = max(float(np.median(np.abs(a))), float(np.median(np.abs(b))))
    return lasting_shift(np.arcsinh(a / size) - np.arcsinh(b / size)) if size > 0.0 else None


def _by_shift(metric: str, x: Floats, a: Floats, b: Floats, shift: Shift) -> Divergence:
    """Return a divergence that only all rows together show."""
    dated = shift.at is not None
    at = min(len(x) - 1, shift.near)
    last = slice(-max(3, len(x) // 8), None)
    one, other = (float(a[at]), float(b[at])) if dated else (float(np.median(a[last])), float(np.median(b[last])))
    offset = float(np.median(a[:at] - b[:at]))
    return Divergence(
        metric, float(x[at]), one, other, abs(shift.size) / shift.noise, float(x[at - 1]), before=offset, dated=dated
    )


def _own_noise(values: Floats) -> float:
    """Return the standard deviation of single rows about a smooth curve, from differences of rows."""
    return _spread(_bend(values, 1)) / math.sqrt(6.0)


def _place(metric: str, a: Floats, b: Floats) -> tuple[int, int | None] | None:
    """Return the row of the divergence, and the row where it ended, None if it lasts; None without divergence."""
    if len(a) <= MOST_ROWS:
        return _search(metric, a, b)
    block = -(-len(a) // MOST_ROWS)
    coarse = _search(metric, *_in_blocks(metric, a, b, block))
    if coarse is None:
        return None
    near = coarse[0] * block
    low, high = max(0, near - MOST_ROWS // 2), min(len(a), near + MOST_ROWS // 4)
    fine = _search(metric, a[low:high], b[low:high])
    at = near if fine is None or abs(low + fine[0] - near) > 2 * HOLD * block else low + fine[0]
    return max(at, 1), None if coarse[1] is None else coarse[1] * block


def _search(metric: str, a: Floats, b: Floats) -> tuple[int, int | None] | None:
    """Search single rows, and means of several rows, which have less noise; return as :func:`_place` does."""
    found = []
    for block in BLOCKS:
        if len(a) < block * FEWEST:
            break
        one, other = _in_blocks(metric, a, b, block)
        place = _search_rows(metric, one, other)
        if place is None:
            continue
        at, until = place
        first = at if block == 1 else _turn(a, b, at * block, block)
        found.append((first, None if until is None else until * block))
    return min(found, key=lambda place: place[0], default=None)


def _in_blocks(metric: str, a: Floats, b: Floats, block: int) -> tuple[Floats, Floats]:
    """Return means of ``block`` rows, on a scale on which an outlier does not dominate."""
    if block == 1 or len(a) < block:
        return a, b
    size = _size(metric, a[: FEWEST * block], b[: FEWEST * block], a, b)
    one, other = (np.arcsinh(v[: len(v) // block * block] / size).reshape(-1, block).mean(axis=1) for v in (a, b))
    return size * np.sinh(one), size * np.sinh(other)


def _turn(a: Floats, b: Floats, near: int, block: int) -> int:
    """Return the row near ``near`` at which the level of the difference most likely changes."""
    low, high = max(0, near - 3 * block), min(len(a), near + HOLD * block)
    d = a[low:high] - b[low:high]
    d = np.clip(d, *np.quantile(d, (0.05, 0.95)))
    n, k = len(d), np.arange(1, len(d))
    shift = np.abs(np.cumsum(d)[:-1] - k * d.mean()) / np.sqrt(k * (n - k))
    return max(1, low + 1 + int(np.argmax(shift)))


def _search_rows(metric: str, a: Floats, b: Floats) -> tuple[int, int | None] | None:
    """Search the rows in growing pieces; the range of chance comes from all rows before the piece."""
    known = FEWEST
    while known < len(a):
        further = max(known + 1, int(known * GROWTH))
        size = _size(metric, a[:known], b[:known], a, b)
        u, v = np.arcsinh(a / size), np.arcsinh(b / size)
        found = _left_range(u, v, known, further)
        if found is not None:
            return found
        known = further
    return None


def _size(metric: str, a: Floats, b: Floats, *whole: Floats) -> float:
    """Return the usual size of the metric: the scale is linear below it, and logarithmic far above."""
    row = metric_of(metric)
    least = SMALLEST_FRACTION if row is not None and (row.low, row.high) == (0.0, 1.0) else 0.0
    both = np.abs(np.concatenate((a, b)))
    return max(float(np.median(both)), least) or float(both.mean()) or max(float(np.abs(v).max()) for v in whole) or 1.0


def _left_range(u: Floats, v: Floats, known: int, further: int) -> tuple[int, int | None] | None:
    """Return the first row from ``known`` to ``further`` from which the difference stays out of its range."""
    d = u - v
    half = max(2, known // 4)
    level = float(np.median(d[known - half : known]))
    rows = np.arange(known, len(d))
    reach = _reach(u[:known], v[:known], (rows - known + 1 + half / 2).astype(np.float64))
    out = (d[known:] - level) / np.maximum(reach, LEAST)
    for sign in (1.0, -1.0):
        beyond = sign * out
        seen = np.flatnonzero(_held(beyond)[: further - known])
        if len(seen):
            first = int(seen[0])
            back = np.flatnonzero(_held(0.6 - beyond[first:], above=0.0, short=False))
            return known + first, known + first + int(back[0]) if len(back) else None
    return None


def _held(beyond: Floats, above: float = 1.0, *, short: bool = True) -> NDArray[np.bool_]:
    """Return rows that are outside with almost all of the next ``HOLD``; at the end fewer, farther ones are enough."""
    hits = beyond > above
    sums = np.concatenate(([0], np.cumsum(hits)))
    n = len(beyond)
    ends = np.minimum(np.arange(n) + HOLD, n)
    left = ends - np.arange(n)
    count = sums[ends] - sums[:n]
    full = hits & (left == HOLD) & (count >= HOLD - ALLOWED)
    if not short:
        return np.asarray(full, dtype=np.bool_)
    farther = 1.0 + (HOLD - left) / 2.0
    lowest = np.minimum.accumulate(beyond[::-1])[::-1]
    return np.asarray(full | ((left < HOLD) & (lowest > farther)), dtype=np.bool_)


def _reach(u: Floats, v: Floats, lags: Floats) -> Floats:
    """Return the largest change of the difference of two runs over each of ``lags`` rows that chance explains.

    It is the sum of the noise of single rows and the drift of the level. The drift is the larger of the observed drift
    of the difference and that of two independent runs that drift like these two. Beyond the observed lags it is
    extrapolated.
    """
    held = 2 ** np.arange(0, max(1, int(math.log2(max(len(u) // 4, 2)))) + 1)
    alone, together = (np.array(column) for column in zip(*(_apart(u, v, lag) for lag in held.tolist()), strict=True))
    noise = max(alone[0] / 6.0, together[0] / 2.0)
    # Levels are means of half the lag, which leaves that much less noise; long lags occur seldom and are less certain.
    left = (1.0 + 0.5 * np.sqrt(held / len(u))) / np.maximum(held // 2, 1)
    wandered = np.maximum((alone - left * alone[0]) / 2.0, together - left * together[0])
    moved = np.maximum.accumulate(np.maximum(wandered, 0.0))
    base = max(0, len(held) - 3)
    slope = (moved[-1] - moved[base]) / max(held[-1] - held[base], 1)
    beyond = np.maximum(lags - held[-1], 0.0)
    far = NOISE**2 * noise + WANDERING**2 * (np.interp(lags, held, moved) + slope * beyond)
    return np.asarray(np.sqrt(far) * (1.0 + 8.0 / len(u)), dtype=np.float64)  # few rows give a poor estimate


def _apart(u: Floats, v: Floats, lag: int) -> tuple[float, float]:
    """Return variances over a lag: of two independent runs, beyond their trends, and of their difference.

    Of white noise the first is 6 times its variance and the second 2, of a random walk it is 2 lag and lag.
    """
    one, other = _levels(u, lag // 2), _levels(v, lag // 2)
    difference = one - other
    alone = _wider(_bend(one, lag)) ** 2 + _wider(_bend(other, lag)) ** 2
    return alone, _wider(difference[lag:] - difference[:-lag]) ** 2


def _levels(values: Floats, rows: int) -> Floats:
    """Return the means of every ``rows`` consecutive values."""
    if rows < 2:
        return values
    sums = np.cumsum(np.concatenate(([0.0], values)))
    return np.asarray((sums[rows:] - sums[:-rows]) / rows, dtype=np.float64)


def _bend(values: Floats, lag: int) -> Floats:
    return values[2 * lag :] - 2.0 * values[lag:-lag] + values[: -2 * lag]


def _wider(values: Floats) -> float:
    """Return the larger of the spreads of all values and of the later half, as noise may grow."""
    return max(_spread(values), _spread(values[len(values) // 2 :]))


def _spread(values: Floats) -> float:
    """Standard deviation about 0 that single rows cannot move, and that tails do."""
    if not len(values):
        return 0.0
    middle, tail = _quantiles(np.abs(values), (0.5, 0.9))
    return max(GAUSSIAN * middle, tail / 1.6449)


def _quantiles(values: Floats, shares: tuple[float, ...]) -> list[float]:
    """Return the quantiles of ``values`` at ``shares`` as ``np.quantile`` does, ten times as fast for few rows."""
    last = len(values) - 1
    places = [divmod(share * last, 1.0) for share in shares]
    lows = [int(low) for low, _ in places]
    ordered = np.partition(values, sorted({place for low in lows for place in (low, min(low + 1, last))}))
    ends = [(float(ordered[low]), float(ordered[min(low + 1, last)])) for low in lows]
    return [low + (high - low) * part for (low, high), (_, part) in zip(ends, places, strict=True)]


def _different_at_once(metric: str, x: Floats, a: Floats, b: Floats) -> Divergence | None:
    """Return a difference that exists from the first rows to the end; None if there is none."""
    size = _size(metric, a[:FEWEST], b[:FEWEST], a, b)
    u, v = np.arcsinh(a / size), np.arcsinh(b / size)
    d = u - v
    sign = math.copysign(1.0, float(np.median(d[:FEWEST])))
    level = max(float(_reach(u[:FEWEST], v[:FEWEST], np.ones(1))[0]), LEAST)
    if not ((sign * d[:FEWEST] > level).all() and np.median(sign * d) > level):
        return None
    noise = max(_own_noise(a), _own_noise(b))
    apart = abs(float(a[0] - b[0]))
    return Divergence(metric, float(x[0]), float(a[0]), float(b[0]), apart / noise if noise > 0 else math.inf)
