"""The features of one run, step by step: causal, relative to its own start, and the same code live and in training.

Three kinds: the shape of each signal's last rows, the way that one signal has gone to a limit of ``labels-v1`` (where a
straight line would get there), and the share of rows in which something was no longer finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlwatch.forecast.signals import SIGNALS, WARM_UNTIL, Floats, History, Scale

SHAPES = ("low", "high", "z", "slope25", "slope60", "turn", "restless", "fallen", "risen")
"""Kinds of features, of every signal."""
FAR = 30.0
"""Where a feature is cut off: nothing is learnt beyond."""
QUIET = 0.02
"""Least spread a signal is taken to have, in the scale of its changes."""


class Extremes:
    """The highest and the lowest level of every signal since its baseline was complete."""

    def __init__(self, signals: int) -> None:
        self._high: Floats = np.full(signals, math.nan)
        self._low: Floats = np.full(signals, math.nan)

    def update(self, now: Floats) -> tuple[Floats, Floats]:
        """Distances of the newest level from both: <= 0 from the highest, >= 0 from the lowest."""
        self._high, self._low = np.fmax(self._high, now), np.fmin(self._low, now)
        return now - self._high, now - self._low


@dataclass(frozen=True, slots=True)
class Shaped:
    """``values``: all :data:`SHAPES` of all signals, (shapes, signals); of each signal (signals,): ``now``, the change
    against the baseline, ``fallen``, that against the best level so far, and ``slope``, over 25 steps, per 10 steps.

    NaN where a signal has too few rows.
    """

    values: Floats
    now: Floats
    fallen: Floats
    slope: Floats


def shapes(history: History, extremes: Extremes, noise: Floats, restless: Floats) -> Shaped:
    """The newest row of a run in its history.

    ``noise``: spread of each signal's rows about their course (:func:`jitter`); ``restless``: spread of their
    differences in the baseline.
    """
    changes = history.changes()
    now = median(changes[_last(history.steps, 5, 2)])
    ten = changes[_last(history.steps, 10, 2)]
    moves = spread(np.diff(changes[_last(history.steps, 25, 6)], axis=0))
    slope = _slope(history.steps, changes, 25, 5)
    fallen, risen = extremes.update(now)
    parts = [
        np.fmin.reduce(ten) / noise,
        np.fmax.reduce(ten) / noise,
        now / noise,
        slope / noise,
        _slope(history.steps, changes, 60, 6) / noise,
        (now - median(changes[_before(history.steps, 15, 45)])) / noise,
        np.log((moves + QUIET / 4) / (restless + QUIET / 4)),
        fallen / noise,
        risen / noise,
    ]
    return Shaped(np.asarray(np.clip(np.stack(parts), -FAR, FAR)), now, fallen, slope)


def jitter(history: History) -> Floats:
    """Spread of each signal's rows of the last 60 steps about their course, (signals,).

    What scatters more than it did at the start, as rewards of a small batch do once it learns, has not moved by that.
    """
    return spread(np.diff(history.changes()[_last(history.steps, 60, 8)], axis=0)) / math.sqrt(2.0)


def median(rows: Floats) -> Floats:
    """Median of each column, missing values left out; NaN where there is none (rows, n) -> (n,)."""
    ordered = np.sort(rows, axis=0)  # NaN last
    count = np.isfinite(rows).sum(0)
    columns = np.arange(rows.shape[1])
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(rows) - 1)
    return np.where(count > 0, (ordered[low, columns] + ordered[high, columns]) / 2, math.nan)


def spread(rows: Floats) -> Floats:
    """Standard deviation of each column, missing values left out; NaN where there is none (rows, n) -> (n,)."""
    seen = np.isfinite(rows)
    count = seen.sum(0)
    filled = np.where(seen, rows, 0.0)
    mean = filled.sum(0) / np.maximum(count, 1)
    square = np.where(seen, (filled - mean) ** 2, 0.0).sum(0) / np.maximum(count, 1)
    return np.where(count > 0, np.sqrt(square), math.nan)


def _last(steps: Floats, span: int, least: int) -> slice:
    """Rows of the last ``span`` steps, and at least so many."""
    inside = int((steps > steps[-1] - span).sum())
    return slice(-max(inside, least), None)


def _before(steps: Floats, near: int, far: int) -> slice:
    """Rows from ``far`` to ``near`` steps ago, and at least one: what was usual shortly before."""
    first, after = (int((steps <= steps[-1] - ago).sum()) for ago in (far, near))
    return slice(max(min(first, after - 1), 0), max(after, 1))


def _slope(steps: Floats, changes: Floats, span: int, least: int) -> Floats:
    """Least-squares slope of each signal, per 10 steps; NaN with fewer than 3 values."""
    rows = _last(steps, span, least)
    y, x = changes[rows], steps[rows, None]
    seen = np.isfinite(y)
    count = np.maximum(seen.sum(0), 1)
    dx = np.where(seen, x - np.where(seen, x, 0.0).sum(0) / count, 0.0)
    filled = np.where(seen, y, 0.0)
    width = (dx**2).sum(0)
    slope = 10.0 * (dx * filled).sum(0) / np.where(width > 0.0, width, math.nan)
    return np.where(seen.sum(0) >= 3, slope, math.nan)


# How far a run is from each limit of ``labels-v1``, and when a straight line would get there.
#
# One signal is enough here: this is what covers the failures of a single metric, and what no model has to have seen.

FAR_AHEAD = 200.0
"""Steps beyond which a straight line says nothing."""
CLEAR = 4.0
"""Spreads (:attr:`Standing.noise`) that a signal must have moved before its way to a limit means anything."""
RISEN = 2.0
"""The same of the reward, whose level is a median of rows: 3.4 standard errors of the difference to its baseline."""
SPENT = "ent_low"
"""The type of limit that is no danger while it buys reward: R = -a exp(H) + b (arXiv 2505.22617)."""
LIFTED = "grad"
"""The signal whose level at the start says little of a run that had next to nothing to learn from then."""
TAKING_OFF = 1.0
"""Spreads of the rewards that a run gains in 25 steps as it takes off; one that goes on learning gains a tenth."""
_PLACE = {each.name: i for i, each in enumerate(SIGNALS)}


@dataclass(frozen=True, slots=True)
class Limit:
    """A signal's change, in its own scale, at which a failure of that type begins.

    ``change``: against the baseline (negative: downwards). ``level``: value that must be reached as well, where the
    limit has an absolute part (then the farther of the two counts). ``from_best``: against the best level so far.
    """

    type: str
    signal: str
    change: float
    level: float | None = None
    from_best: bool = False


LIMITS_V1: tuple[Limit, ...] = (
    Limit("ent_low", "entropy", math.log(0.2)),
    Limit("ent_high", "entropy", math.log(1.5)),
    Limit("mismatch", "mismatch", math.log(5.0), 0.1),
    Limit("ref_kl", "kl_ref", 0.0, 1.5),
    Limit("length", "cut_off", 0.4),
    Limit("length", "repetition", 0.35),
    Limit("grad", "grad", math.log(6.0)),
    Limit("reward", "reward", -0.5, from_best=True),  # and 40 % of the best so far, and what noise does to a best
)
"""Relative where the label is; a reward has no unit, so half a spread of the rewards is the least its limit can be."""
BROKEN_ROWS, BROKEN_STEPS = 5, 25
"""Rows with something that is not finite, among those of the last steps, at which a run counts as broken: the fifth
skipped update in a row is a failure (labels-v1), and a loop of skips has gaps before it closes."""
LOST = 0.4
"""Share of the best level that a failure loses (labels-v1)."""
OF_A_BEST = 6.0
"""Spreads by which the best of many rows lies above what follows, though nothing has happened."""
LIMIT_FEATURES = tuple(
    f"limit:{limit.type}:{limit.signal}:{kind}" for limit in LIMITS_V1 for kind in ("share", "steps")
)


@dataclass(frozen=True, slots=True)
class Reach:
    """``share`` of the way to a limit (1: reached; NaN: not measured); ``steps`` a straight line needs for the rest.

    ``clear``: the signal has moved by more than noise, and the move means danger: entropy that falls while the reward
    clearly rises is what learning costs.
    """

    limit: Limit
    share: float
    steps: float
    clear: bool = False


def goals(history: History) -> tuple[float, ...]:
    """The change at which each limit is reached, once the baseline is known."""
    return tuple(_goal(limit, history, _PLACE[limit.signal]) for limit in LIMITS_V1)


@dataclass(frozen=True, slots=True)
class Standing:
    """Levels and trends of all signals, each of shape (signals,).

    ``start``: the baseline in the unit of the changes; ``now``: the change against it; ``fallen``: against the best
    level so far; ``slope``: per 10 steps; ``noise``: spread of the baseline or of the last rows,
    whichever is larger: small batches make both large.
    """

    start: Floats
    now: Floats
    fallen: Floats
    slope: Floats
    noise: Floats


class TakeOff:
    """Size that gradients reached while the reward took off: few groups taught anything before, most do since.

    What comes after is held against that (labels-v3 hold it against the level while the accuracy doubled).
    """

    def __init__(self) -> None:
        self._lift = 0.0

    def update(self, at: Standing) -> float:
        """The change of the gradient, against the baseline, from which its way to a limit begins; at least 0."""
        reward, grad = _PLACE["reward"], _PLACE[LIFTED]
        gained = 2.5 * float(at.slope[reward])
        if gained >= max(TAKING_OFF, RISEN * float(at.noise[reward])) and math.isfinite(at.now[grad]):
            self._lift = max(self._lift, float(at.now[grad]))
        return self._lift


def reaches(goal: tuple[float, ...], at: Standing, lift: float = 0.0) -> tuple[Reach, ...]:
    """Ways gone to each limit. ``goal``: of each limit, as :func:`goals` gives them; ``lift``: of :class:`TakeOff`."""
    rising = _rising(at)
    return tuple(
        _reach(limit, end, at, lift if limit.signal == LIFTED else 0.0, meant=not (rising and limit.type == SPENT))
        for limit, end in zip(LIMITS_V1, goal, strict=True)
    )


def _rising(at: Standing) -> bool:
    """True where the reward has clearly risen since the baseline, and not clearly fallen from its best."""
    i = _PLACE["reward"]
    noise = float(at.noise[i])
    return bool(at.now[i] >= RISEN * noise and at.fallen[i] > -CLEAR * noise)


def breaking(history: History) -> Reach:
    """Way gone to being broken for good: one bad batch that was skipped is none, several within 25 steps are.

    A log of every 5 or 10 steps is judged by its last five rows.
    """
    rows = max(int((history.steps > history.steps[-1] - BROKEN_STEPS).sum()), BROKEN_ROWS)
    count = float(history.broken[-rows:].sum())
    share = count / BROKEN_ROWS
    return Reach(
        Limit("nan", history.broken_metric, BROKEN_ROWS), share, 0.0 if share >= 1.0 else FAR_AHEAD, count >= 2
    )


def nearest(reached: tuple[Reach, ...]) -> Reach | None:
    """The limit that is closest, of those a signal has clearly moved towards; None where there is none."""
    moving = [reach for reach in reached if reach.clear and reach.share > 0.0]
    return max(moving, key=lambda reach: reach.share, default=None)


def _reach(limit: Limit, goal: float, at: Standing, lift: float, *, meant: bool) -> Reach:
    """``lift``: where the way to the limit begins; ``meant``: whether a clear move towards it means danger."""
    i = _PLACE[limit.signal]
    moved = float((at.fallen if limit.from_best else at.now)[i]) - lift
    if not math.isfinite(moved):
        return Reach(limit, math.nan, math.nan)
    if limit.from_best:
        best = float(at.start[i] + at.now[i] - at.fallen[i])
        goal = -max(-goal, LOST * abs(best), OF_A_BEST * float(at.noise[i]))
    share = moved / goal if goal else math.nan
    pace = float(at.slope[i]) / 10.0
    steps = (goal - moved) / pace if math.isfinite(pace) and pace * goal > 0.0 else FAR_AHEAD
    ahead = 0.0 if share >= 1.0 else min(max(steps, 0.0), FAR_AHEAD)
    return Reach(limit, share, ahead, meant and abs(moved) >= CLEAR * float(at.noise[i]))


def _goal(limit: Limit, history: History, i: int) -> float:
    """The change at which the limit is reached."""
    base = history.baseline
    if base is None or SIGNALS[i].scale is not Scale.RATIO:
        return limit.change
    row = np.full((2, len(SIGNALS)), math.nan)
    row[:, i] = base[i] * math.exp(limit.change), -math.inf if limit.level is None else limit.level
    relative, absolute = history.changes(row)[:, i]
    return float(relative if limit.level is None else max(relative, absolute))


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
        """Rows still missing before there can be features, in words; empty when none is."""
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
