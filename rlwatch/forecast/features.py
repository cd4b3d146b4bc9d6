"""Features of a run at each step, computed only from rows up to that step and relative to the run's own start.

There are three kinds: the shape of each signal over the last rows; progress of a signal to a limit of ``labels-v1``,
with the steps that a straight line needs for the rest; and the share of rows with a value that is not finite. Live runs
and training use this code.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.signals import ROWS, SIGNALS, WARM_UNTIL, ChangeScale, Floats, SignalHistory, SignalNames

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SHAPES = ("low", "high", "z", "slope25", "slope60", "turn", "restless", "fallen", "risen")
"""Kinds of features that every signal has."""
FAR = 30.0
"""Bound to which features are clipped."""
QUIET = 0.02
"""Least spread that a signal is assumed to have, in the unit of its changes."""


BROKEN_ROWS, BROKEN_STEPS = 5, 25
"""Number of rows with a non-finite value, among those of the last steps, at which a run counts as broken, and the
number of steps: the fifth skipped update in a row is a failure (labels-v1), and a loop of skips has gaps before it
closes.
"""


class Extremes:
    """The highest and the lowest level of every signal since its baseline was complete."""

    def __init__(self, signals: int) -> None:
        self._high: Floats = np.full(signals, math.nan)
        self._low: Floats = np.full(signals, math.nan)

    def update(self, now: Floats) -> tuple[Floats, Floats]:
        """Take the next levels ``now`` (rows, signals); return their distances from the highest and the lowest level
        so far.

        Distances are <= 0 from the highest level and >= 0 from the lowest.
        """
        if len(now) == 1:
            self._high, self._low = np.fmax(self._high, now[0]), np.fmin(self._low, now[0])
            return now - self._high, now - self._low
        high = np.fmax.accumulate(np.concatenate((self._high[None], now)), axis=0)[1:]
        low = np.fmin.accumulate(np.concatenate((self._low[None], now)), axis=0)[1:]
        self._high, self._low = high[-1], low[-1]
        return now - high, now - low


SPANS = ((5, 2), (10, 2), (25, 6), (25, 5), (60, 6), (60, 8), (BROKEN_STEPS, 1), (BROKEN_STEPS, BROKEN_ROWS))
"""Windows used by the features: number of steps, and fewest rows."""
NEAR, FAR_BACK = 15, 45
"""Bounds, in steps before a row, of the window that gives the recent level."""


class HistoryWindows:
    """The newest rows of a signal history, and the start of each window that ends at one of them."""

    def __init__(self, at: Floats) -> None:
        """``at``: steps of :data:`ROWS` rows before the newest ones (-inf: none), and of those."""
        self.at = at
        self.one = len(at) == ROWS + 1
        """True of a single newest row, as a live run has them: what it looks at are slices, found without arrays."""
        if self.one:
            self._of_one(at.tolist())
            return
        self.ends = np.arange(ROWS, len(at)) + 1
        spans = np.array([*(span for span, _ in SPANS), FAR_BACK, NEAR], dtype=np.float64)
        found = np.searchsorted(at, at[ROWS:] - spans[:, None], side="right")
        least = np.array([rows for _, rows in SPANS])
        oldest = self.ends - ROWS
        starts = np.maximum(np.minimum(found[:-2], self.ends - least[:, None]), oldest)
        self.starts = dict(zip(SPANS, starts, strict=True))
        # What was usual shortly before is at least one row, if need be the first that there is.
        oldest = np.maximum(oldest, np.searchsorted(at, -math.inf, side="right"))
        first, after = found[-2:]
        self.before = np.maximum(np.minimum(first, after - 1), oldest), np.maximum(after, oldest + 1)

    def _of_one(self, at: list[float]) -> None:
        newest, end = at[-1], ROWS + 1
        self._starts = {(span, rows): max(min(bisect_right(at, newest - span), end - rows), 1) for span, rows in SPANS}
        first, after = (bisect_right(at, newest - back) for back in (FAR_BACK, NEAR))
        oldest = max(1, bisect_right(at, -math.inf))
        self._before = max(min(first, after - 1), oldest), max(after, oldest + 1)

    def rows(self, values: Floats, window: tuple[int, int], later: int = 0) -> Floats:
        """Return the rows of ``values`` (all rows, n) in each window, as (windows, longest, n); shorter windows start
        with NaN.

        ``later``: number of rows by which the windows start later.
        """
        if self.one:
            return values[None, self._starts[window] + later :]
        return windows(values, self.starts[window] + later, self.ends)

    def rows_before(self, values: Floats) -> Floats:
        """Return the rows of ``values`` in the window shortly before each newest row, in the form of :meth:`rows`."""
        if self.one:
            first, after = self._before
            return values[None, first:after]
        return windows(values, *self.before)

    def sums(self, values: Floats, window: tuple[int, int]) -> tuple[Floats, Floats]:
        """Return the sum of ``values`` (whole numbers, one for each row) over each window, and the windows' numbers of
        rows.
        """
        if self.one:
            start = self._starts[window]
            return np.array([math.fsum(values[start:].tolist())]), np.array([float(ROWS + 1 - start)])
        count, starts = np.append(0.0, np.cumsum(values)), self.starts[window]
        return count[self.ends] - count[starts], np.asarray(self.ends - starts, dtype=np.float64)


def windows(values: Floats, starts: Ints, ends: Ints) -> Floats:
    """Return the rows ``starts`` to ``ends`` of ``values`` (all rows, n) as (windows, longest, n); shorter ones start
    with NaN.
    """
    lengths = ends - starts
    longest = int(lengths.max())
    if len(ends) == 1:
        return np.asarray(values[ends[0] - longest : ends[0]][None])
    places = ends[:, None] + np.arange(-longest, 0)
    found = values[places]
    short = lengths < longest
    if short.any():
        found[places < starts[:, None]] = math.nan
    return np.asarray(found)


class SignalSnapshot(NamedTuple):
    """Levels and trends of some signals at the newest rows, each (rows, signals), NaN if there are too few rows.

    ``now``: change against the baseline; ``fallen`` and ``risen``: change against the highest and the lowest level so
    far; ``slope``: change per 10 steps, over 25 steps; ``noise``: spread of the baseline's rows or of the last rows,
    the larger one, since small batches increase both.
    """

    now: Floats
    fallen: Floats
    risen: Floats
    slope: Floats
    noise: Floats


def standing(look: HistoryWindows, changes: Floats, jumps: Floats, extremes: Extremes, noise: Floats) -> SignalSnapshot:
    """Return levels and trends of the signals at the newest rows.

    Parameters
    ----------
    look
        Windows that end at the newest rows.
    changes
        Changes of the signals against the baseline (all rows, signals).
    jumps
        Differences of ``changes`` from row to row.
    extremes
        Highest and lowest levels so far; updated.
    noise
        Spread of each signal's rows in its baseline.
    """
    now = median(look.rows(changes, (5, 2)))
    fallen, risen = extremes.update(now)
    # What scatters more than it did at the start, as rewards of a small batch do once it learns, has not moved by that.
    jitter = spread(look.rows(jumps, (60, 8), later=1)) / math.sqrt(2.0)
    return SignalSnapshot(now, fallen, risen, _slope(look, changes, (25, 5)), np.fmax(noise, jitter))


def shapes(look: HistoryWindows, changes: Floats, jumps: Floats, at: SignalSnapshot, restless: Floats) -> Floats:
    """Return all features of :data:`SHAPES` of all signals at the newest rows, as (rows, shapes, signals).

    They are NaN if there are too few rows. ``changes`` and ``jumps`` are those of :func:`standing`, ``at`` is its
    result, and ``restless`` is the spread of ``jumps`` in the baseline.
    """
    ten = look.rows(changes, (10, 2))
    moves = spread(look.rows(jumps, (25, 6), later=1))
    before = median(look.rows_before(changes))
    found = np.empty((len(at.now), len(SHAPES), changes.shape[1]))
    found[:, 0] = np.fmin.reduce(ten, axis=1)
    found[:, 1] = np.fmax.reduce(ten, axis=1)
    found[:, 2] = at.now
    found[:, 3] = at.slope
    found[:, 4] = _slope(look, changes, (60, 6))
    found[:, 5] = at.now - before
    found[:, 6] = moves
    found[:, 7] = at.fallen
    found[:, 8] = at.risen
    np.divide(found, at.noise[:, None], out=found)
    np.log((moves + QUIET / 4) / (restless + QUIET / 4), out=found[:, _RESTLESS])
    np.maximum(found, -FAR, out=found)
    return np.minimum(found, FAR, out=found)


_RESTLESS = SHAPES.index("restless")


def median(rows: Floats) -> Floats:
    """Return the median of each column without NaN, (..., rows, n) -> (..., n); NaN if a column has no value."""
    ordered = np.sort(rows, axis=-2)  # NaN last
    seen, longest = np.isfinite(rows), rows.shape[-2]
    if np.logical_and.reduce(seen, axis=None):
        return np.asarray((ordered[..., (longest - 1) // 2, :] + ordered[..., longest // 2, :]) / 2)
    count = np.add.reduce(seen, axis=-2)
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, longest - 1)
    below, above = (np.take_along_axis(ordered, at[..., None, :], axis=-2)[..., 0, :] for at in (low, high))
    return np.where(count > 0, (below + above) / 2, math.nan)


def spread(rows: Floats) -> Floats:
    """Return the standard deviation of each column without NaN, (..., rows, n) -> (..., n); NaN if a column has no
    value.
    """
    seen = np.isfinite(rows)
    if rows.shape[-2] and np.logical_and.reduce(seen, axis=None):
        mean = np.add.reduce(rows, axis=-2) / rows.shape[-2]
        return np.asarray(np.sqrt(np.add.reduce((rows - mean[..., None, :]) ** 2, axis=-2) / rows.shape[-2]))
    count = np.add.reduce(seen, axis=-2)
    filled, some = np.where(seen, rows, 0.0), np.maximum(count, 1)
    mean = np.add.reduce(filled, axis=-2) / some
    square = np.add.reduce(np.where(seen, (filled - mean[..., None, :]) ** 2, 0.0), axis=-2) / some
    return np.where(count > 0, np.sqrt(square), math.nan)


def _differences(changes: Floats) -> Floats:
    """Return the difference of each row to the row before it."""
    found = np.empty_like(changes)
    found[0] = math.nan
    np.subtract(changes[1:], changes[:-1], out=found[1:])
    return found


def _slope(look: HistoryWindows, changes: Floats, window: tuple[int, int]) -> Floats:
    """Least-squares slope of each signal, per 10 steps; NaN with fewer than 3 values."""
    y, x = look.rows(changes, window), look.rows(look.at[:, None], window)
    seen = np.isfinite(y)
    whole = np.logical_and.reduce(seen, axis=None)
    if whole and look.one:
        rows = x.shape[1]
        dx = x - np.add.reduce(x, axis=1) / rows
        wide = float(np.add.accumulate(dx * dx, axis=1)[0, -1, 0])
        if rows < 3 or not wide > 0.0:
            return np.full((1, y.shape[2]), math.nan)
        return np.asarray(10.0 * np.add.reduce(dx * y, axis=1) / wide)
    if whole:
        seen = seen[:, :, :1]  # the same steps for all
    else:
        y = np.where(seen, y, 0.0)
    count = np.add.reduce(seen, axis=1)
    mean = np.add.reduce(np.where(seen, x, 0.0), axis=1) / np.maximum(count, 1)
    dx = np.where(seen, x - mean[:, None], 0.0)
    width = np.add.accumulate(dx**2, axis=1)[:, -1]  # row by row, as the other sums are
    slope = 10.0 * np.add.reduce(dx * y, axis=1) / np.where(width > 0.0, width, math.nan)
    return np.where(count >= 3, slope, math.nan)


# How far a run is from each limit of ``labels-v1``, and when a straight line would get there.
#
# One signal is enough here: this is what covers the failures of a single metric, and what no model has to have seen.

FAR_AHEAD = 200.0
"""Most steps ahead for which a straight line is extrapolated."""
CLEAR = 4.0
"""Least movement of a signal, in spreads (:attr:`SignalSnapshot.noise`), for its progress to a limit to count."""
RISEN = 2.0
"""Least rise of the reward, in spreads, that counts; it is 3.4 standard errors of the difference to the baseline,
since the level is a median of rows.
"""
SPENT = "ent_low"
"""Type of limit that is no danger while the reward rises: lower entropy buys reward, R = -a exp(H) + b (arXiv
2505.22617).
"""
LIFTED = "grad"
"""Signal whose level at the start is no baseline if the run had no learning signal then."""
TAKING_OFF = 1.0
"""Least gain of the reward in 25 steps, in spreads of the rewards, that counts as taking off; steady learning gains a
tenth.
"""
_PLACE = {each.name: i for i, each in enumerate(SIGNALS)}


@dataclass(frozen=True, slots=True)
class ChangeLimit:
    """Change of a signal, in the unit of its changes, at which a failure of type ``type`` begins.

    ``change``: against the baseline (negative: downwards). ``level``: value that must be reached as well, if the limit
    has an absolute part. ``from_best``: True if the change is counted from the best level so far.
    """

    type: str
    signal: str
    change: float
    level: float | None = None
    from_best: bool = False


LIMITS_V1: tuple[ChangeLimit, ...] = (
    ChangeLimit("ent_low", "entropy", math.log(0.2)),
    ChangeLimit("ent_high", "entropy", math.log(1.5)),
    ChangeLimit("mismatch", "mismatch", math.log(5.0), 0.1),
    ChangeLimit("ref_kl", "kl_ref", 0.0, 1.5),
    ChangeLimit("length", "cut_off", 0.4),
    ChangeLimit("length", "repetition", 0.35),
    ChangeLimit("grad", "grad", math.log(6.0)),
    ChangeLimit("reward", "reward", -0.5, from_best=True),  # and 40 % of the best so far, and what noise does to a best
)
"""Limits of labels-v1 as changes of signals; a reward has no unit, so its limit is at least half a spread of the
rewards.
"""
LOST = 0.4
"""Share of the best level whose loss is a failure (labels-v1)."""
OF_A_BEST = 6.0
"""Spreads by which the best of many rows lies above later rows by chance alone."""
LIMIT_FEATURES = tuple(
    f"limit:{limit.type}:{limit.signal}:{kind}" for limit in LIMITS_V1 for kind in ("share", "steps")
)


@dataclass(frozen=True, slots=True)
class LimitProgress:
    """Progress of a run to a limit: ``share`` of the way (1: reached), and the ``steps`` a straight line needs for the
    rest.
    """

    limit: ChangeLimit
    share: float
    steps: float


def goals_of(history: SignalHistory) -> Floats:
    """Return for each limit the change of its signal at which it is reached; the baseline must be known."""
    return np.array([_goal(limit, history, _PLACE[limit.signal]) for limit in LIMITS_V1])


def _goal(limit: ChangeLimit, history: SignalHistory, i: int) -> float:
    """Return the change at which the limit is reached."""
    base = history.baseline
    if base is None or SIGNALS[i].scale is not ChangeScale.RATIO:
        return limit.change
    row = np.full((2, len(SIGNALS)), math.nan)
    row[:, i] = base[i] * math.exp(limit.change), -math.inf if limit.level is None else limit.level
    relative, absolute = history.change(row)[:, i]
    return float(relative if limit.level is None else max(relative, absolute))


class TakeOff:
    """Largest gradient norm that a run reached while its reward took off, as a change against the baseline.

    Before, few groups of responses taught anything. Later gradient norms are compared with this level (labels-v3
    compare with the level while the accuracy doubled).
    """

    def __init__(self) -> None:
        self._lift = 0.0

    def update(self, at: SignalSnapshot) -> Floats:
        """Return, for each of the newest rows, the change of the gradient norm that counts as its starting level; at
        least 0.

        ``at``: snapshot of :data:`LIMIT_SIGNALS`.
        """
        gained, grad = 2.5 * at.slope[:, _REWARD], at.now[:, _GRAD]
        takes_off = (gained >= np.fmax(TAKING_OFF, RISEN * at.noise[:, _REWARD])) & np.isfinite(grad)
        lifts = np.maximum.accumulate(np.append(self._lift, np.where(takes_off, grad, -math.inf)))[1:]
        self._lift = float(lifts[-1])
        return lifts


LIMIT_SIGNALS = tuple(limit.signal for limit in LIMITS_V1)
"""Names of the signals of the limits, one for each limit."""
_REWARD, _GRAD = LIMIT_SIGNALS.index("reward"), LIMIT_SIGNALS.index(LIFTED)
_FROM_BEST = np.array([limit.from_best for limit in LIMITS_V1])
_LIFTED = np.array([limit.signal == LIFTED for limit in LIMITS_V1])
_SPENT = np.array([limit.type == SPENT for limit in LIMITS_V1])


class ProgressToLimits(NamedTuple):
    """Progress to each limit, (rows, limits): ``share`` of the way (1: reached; NaN: not measured), ``steps`` for the
    rest.

    ``clear``: True if the signal has moved to the limit by more than noise and the movement means danger. Entropy that
    falls while the reward clearly rises is the normal cost of learning.
    """

    share: Floats
    steps: Floats
    clear: Bools


def ways(goals: Floats, start: Floats, at: SignalSnapshot, lift: Floats) -> ProgressToLimits:
    """Return the progress to each limit at the newest rows.

    Parameters
    ----------
    goals
        Change at which each limit is reached, from :func:`goals_of`.
    start
        Baseline in the unit of the changes (limits,).
    at
        Snapshot of :data:`LIMIT_SIGNALS`.
    lift
        Starting level of the gradient norm at each row, from :class:`TakeOff`.
    """
    moved = np.where(_FROM_BEST, at.fallen, at.now) - _LIFTED * lift[:, None]
    best = start + at.now - at.fallen
    own = -np.fmax(np.fmax(-goals, LOST * np.abs(best)), OF_A_BEST * at.noise)
    goal = np.where(_FROM_BEST, own, goals)
    share = np.where(goal == 0.0, math.nan, moved / goal)
    pace = at.slope / 10.0
    ahead = np.minimum(np.maximum((goal - moved) / pace, 0.0), FAR_AHEAD)
    steps = np.where(np.isfinite(pace) & (pace * goal > 0.0), ahead, FAR_AHEAD)
    steps[share >= 1.0] = 0.0
    unknown = ~np.isfinite(moved)
    share[unknown] = steps[unknown] = math.nan
    # The reward has clearly risen since the baseline, and not clearly fallen from its best.
    unsure = at.noise[:, _REWARD]
    rising = (at.now[:, _REWARD] >= RISEN * unsure) & (at.fallen[:, _REWARD] > -CLEAR * unsure)
    clear = (np.abs(moved) >= CLEAR * at.noise) & (share > 0.0) & ~(rising[:, None] & _SPENT)
    return ProgressToLimits(share, steps, clear)


def breaking(broken: float, metric: str) -> LimitProgress | None:
    """Return the progress to a failure by values that are not finite; None if fewer than two rows are affected.

    One bad batch that was skipped is no danger; several within 25 steps are. ``broken``: number of rows with such a
    value in the last 25 steps (in a coarse log, in its last five rows); ``metric``: the metric that last had one.
    """
    share = float(broken) / BROKEN_ROWS
    ahead = 0.0 if share >= 1.0 else FAR_AHEAD
    return LimitProgress(ChangeLimit("nan", metric, BROKEN_ROWS), share, ahead) if broken >= 2.0 else None


def nearest(reached: tuple[LimitProgress, ...]) -> LimitProgress | None:
    """Return the limit that the run is closest to; None if no signal has clearly moved to one."""
    return max(reached, key=lambda reach: reach.share, default=None)


BROKEN = "broken"
"""Feature: share of the rows of the last 25 steps in which some signal was no longer finite."""
FEATURES: tuple[str, ...] = (
    *(f"{signal.name}:{shape}" for shape in SHAPES for signal in SIGNALS),
    *LIMIT_FEATURES,
    BROKEN,
)
"""Names of the features in the order of the vector: ``signal:shape``, ``limit:type:signal:share|steps``, ``broken``."""


class Features(NamedTuple):
    """Features of a run at one step: ``values`` in the order of :data:`FEATURES` (NaN: not measured).

    ``reaches``: limits that signals have clearly moved to; ``read``: names of the metrics read; ``unsure``: spread of
    the reward's rows in spreads of the rewards (:attr:`SignalSnapshot.noise`), which is about one over the square root
    of the responses in a step, and more if the data change; NaN without a reward. ``shape``: computes the shapes of
    signals in ``values``, which are NaN before, for all rows that were added together.
    """

    step: int
    values: Floats
    reaches: tuple[LimitProgress, ...]
    read: SignalNames
    unsure: float
    shape: Callable[[], None]


AT_ONCE = 64
"""Most rows whose features are computed together, chosen so that their data fit in a processor's cache."""


class FeatureStream:
    """Takes the rows of a run in order and returns the features of the newest ones.

    Steps may be irregular or several apart, since windows are in steps with a least number of rows. A step that comes
    again discards all rows from that step on.
    """

    def __init__(self) -> None:
        self.history = SignalHistory()
        self._known: _Known | None = None
        self._take_off = TakeOff()

    def forget_reference(self) -> None:
        """Forget the KL to the reference model after that model was reset."""
        self.history.forget_reference()

    def waiting(self) -> str:
        """Return a sentence on the rows that are missing before there are features; "" if none is."""
        history = self.history
        if history.baseline is not None:
            return ""
        if not len(history.steps):
            return "no step has closed yet"
        since = history.since_start(int(history.steps[-1]))
        return f"it needs the first {WARM_UNTIL} steps as a baseline, and has {since} ({history.warm_rows} rows)"

    def update(self, step: int, metrics: Mapping[str, float]) -> Features | None:
        """Add the row of a step; return its features, or None while the baseline is incomplete.

        Parameters
        ----------
        step
            The trainer's step, >= 0.
        metrics
            Canonical metrics of the step; NaN and infinities are counted and otherwise left out.
        """
        return self.extend([step], [metrics])[0]

    def extend(self, steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> list[Features | None]:
        """Add several rows; return for each the result of :meth:`update`, in a tenth of the time."""
        found = self.without_shapes(steps, rows)
        for each in found:
            if each is not None:
                each.shape()
        return found

    def without_shapes(self, steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> list[Features | None]:
        """Add several rows, as :meth:`extend` does, for a caller that may not need the shapes of signals.

        :attr:`Features.shape` computes those of a row.
        """
        found: list[Features | None] = []
        while len(found) < len(steps):
            first = len(found)
            part = slice(first, first + self._together(steps[first : first + AT_ONCE]))
            found += self._extend(steps[part], rows[part])
        return found

    def _together(self, steps: Sequence[int]) -> int:
        """Rows that can be taken at once: one before the baseline is complete, else all of ascending steps."""
        if self.history.baseline is None:
            return 1
        return next((i for i in range(1, len(steps)) if steps[i] <= steps[i - 1]), len(steps))

    def _extend(self, steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> Sequence[Features | None]:
        history = self.history
        read = history.extend(steps, rows)
        if history.baseline is None:
            return [None]
        if self._known is None:
            self._known = _Known(history)
        known, look = self._known, HistoryWindows(history.at)
        with np.errstate(all="ignore"):
            changes = history.changes.take(known.logged, axis=1)
            jumps = _differences(changes)
            at = standing(look, changes, jumps, known.extremes, known.noise)
            limited = known.of_limit_signals(at)
            gone = ways(known.goals, known.start, limited, self._take_off.update(limited))
        values = np.full((len(steps), len(FEATURES)), math.nan)
        shape = _Shaping(values, known, look, changes, jumps, at)
        pairs = values[:, -1 - len(LIMIT_FEATURES) : -1]
        pairs[:, ::2], pairs[:, 1::2] = gone.share, gone.steps
        np.minimum(np.maximum(pairs, -5.0), 200.0, out=pairs)
        within, rows_within = look.sums(history.broken, (BROKEN_STEPS, 1))
        least, _ = look.sums(history.broken, (BROKEN_STEPS, BROKEN_ROWS))
        values[:, -1] = within / rows_within
        moving: list[bool] = np.logical_or.reduce(gone.clear, axis=1).tolist()
        reaches = [
            _reaches(gone, i, moving[i], breaking(least[i], read[i].broken)) if moving[i] or least[i] >= 2.0 else ()
            for i in range(len(steps))
        ]
        unsure: list[float] = limited.noise[:, _REWARD].tolist()
        return [Features(*each, shape) for each in zip(steps, values, reaches, read, unsure, strict=True)]


@dataclass(slots=True)
class _Shaping:
    """The shapes of signals at rows that were added together, computed at the first call.

    ``values``: features of the rows, to which the shapes are written. The others are those of :func:`shapes`.
    """

    values: Floats
    known: _Known
    look: HistoryWindows
    changes: Floats
    jumps: Floats
    at: SignalSnapshot
    done: bool = False

    def __call__(self) -> None:
        """Write the shapes."""
        if self.done:
            return
        self.done = True
        with np.errstate(all="ignore"):
            shaped = shapes(self.look, self.changes, self.jumps, self.at, self.known.restless)
        self.values[:, self.known.places] = shaped.reshape(len(self.values), -1)


def _reaches(gone: ProgressToLimits, row: int, moving: bool, broken: LimitProgress | None) -> tuple[LimitProgress, ...]:
    """Return the limits that one row is moving towards."""
    found = () if broken is None else (broken,)
    if not moving:
        return found
    share, steps = gone.share[row].tolist(), gone.steps[row].tolist()
    return *(LimitProgress(LIMITS_V1[i], share[i], steps[i]) for i in gone.clear[row].nonzero()[0]), *found


class _Known:
    """Facts of a run that are fixed once its baseline is.

    ``logged``: the signals that have one; ``places``: of their shapes in the vector of features; ``noise`` and
    ``restless``: their spread in the baseline, of the changes (robust) and of their differences; ``goals`` and
    ``start``: of the limits, as :func:`ways` takes them.
    """

    def __init__(self, history: SignalHistory) -> None:
        base = np.full(len(SIGNALS), math.nan) if history.baseline is None else history.baseline
        self.logged = np.flatnonzero(~np.isnan(base))
        self.places = (np.arange(len(SHAPES))[:, None] * len(SIGNALS) + self.logged).ravel()
        self.goals = goals_of(history)
        of_limits = [_PLACE[signal] for signal in LIMIT_SIGNALS]
        self.start = history.start[of_limits]
        where = {place: i for i, place in enumerate(self.logged.tolist())}
        self._limit_columns = np.array([where.get(place, 0) for place in of_limits])
        self._unlogged = np.flatnonzero([place not in where for place in of_limits])
        warm = history.warm_changes().take(self.logged, axis=1)
        noise = 1.4826 * median(np.abs(warm - median(warm)))
        self.noise = np.fmax(noise, QUIET)
        self.restless = np.fmax(spread(np.diff(warm, axis=0)), 0.0)
        self.extremes = Extremes(len(self.logged))

    def of_limit_signals(self, at: SignalSnapshot) -> SignalSnapshot:
        """Return the snapshot of :data:`LIMIT_SIGNALS`, with NaN for those that are not logged."""
        if not len(self.logged):
            return SignalSnapshot(*np.full((5, len(at.now), len(self._limit_columns)), math.nan))
        parts = [part.take(self._limit_columns, axis=1) for part in (at.now, at.fallen, at.risen, at.slope, at.noise)]
        if self._unlogged.size:
            for part in parts:
                part[:, self._unlogged] = math.nan
        return SignalSnapshot(*parts)
