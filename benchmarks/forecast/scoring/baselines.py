"""Simple tools to compare a forecaster with: luck, clocks, control charts, straight lines, and one that cheats."""

from __future__ import annotations

import math
import random
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from forecast.scoring.skill import ToolScores

from rlwatch.forecast.forecast import HORIZONS
from rlwatch.forecast.labels import LabelLimit, Labels, RunOutcome, limits_of
from rlwatch.forecast.tables import Floats, RunTable
from rlwatch.stats import GAUSSIAN, median

__all__ = ["BASELINES", "Tool", "run_baselines", "run_tool"]


class Never:
    """Silence."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """Nothing."""
        return None


class Always:
    """An alarm at every row."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """An alarm."""
        return 1.0


class Random:
    """A score drawn anew for every row, evenly from [0, 1)."""

    def __init__(self, seed: int) -> None:
        self._drawn = random.Random(seed)

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """The draw."""
        return self._drawn.random()


class StepIndex:
    """A clock: the later, the worse."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """The step."""
        return float(step)


# The first steps of a run as simple tools use them.

WATCHED = (
    *("reward/mean", "reward/std", "reward/zero_std_frac", "policy/entropy", "policy/logp_mean", "policy/logp_min"),
    *("loss/policy", "optim/grad_norm", "ratio/mean", "ratio/max", "ratio/ess", "ratio/clipfrac", "policy/kl_old"),
    *("policy/kl_ref_k3", "mismatch/k3", "mismatch/log_ppl_absdiff", "mismatch/prob_absdiff_max"),
    *("mismatch/weight_max", "mismatch/ess", "len/mean", "len/clipped", "text/repetition"),
)
"""Metrics that tools without a limit look at: 22, over all families."""
LEAST_ROWS = 5
"""A baseline has at least so many rows, also where there is a row every 10 steps."""


def watched(metrics: Mapping[str, float], names: Sequence[str] = WATCHED) -> Floats:
    """Values of the row, of shape (names,); NaN where not measured or not finite."""
    row = np.array([metrics.get(name, np.nan) for name in names], dtype=np.float64)
    row[~np.isfinite(row)] = np.nan
    return row


class Start:
    """Collects the rows of the baseline's steps (10 to 39, or until there are enough), then knows centre and spread."""

    def __init__(self) -> None:
        self._first, self._last = limits_of().windows.baseline
        self._rows: list[Floats] = []
        self._known: tuple[Floats, Floats] | None = None

    def add(self, step: int, row: Floats) -> tuple[Floats, Floats] | None:
        """Median and robust standard deviation, where known before this row (which then is no part of them)."""
        if self._known is None and step > self._last and len(self._rows) >= LEAST_ROWS:
            self._known = _center_and_spread(np.array(self._rows))
        elif self._known is None and step >= self._first:
            self._rows.append(row)
        return self._known


def _center_and_spread(rows: Floats) -> tuple[Floats, Floats]:
    """Of each column; the spread is at least 2 % of the centre, for what hardly moves."""
    center = middle(rows)
    return center, np.maximum(GAUSSIAN * middle(np.abs(rows - center)), 0.02 * np.abs(center) + 1e-6)


def middle(rows: Floats) -> Floats:
    """Median of each column without its NaN; NaN where there is nothing else."""
    ordered = np.sort(rows, axis=0)
    count = np.count_nonzero(~np.isnan(ordered), axis=0)
    columns = np.arange(rows.shape[1])
    low, high = ordered[np.maximum(count - 1, 0) // 2, columns], ordered[np.minimum(count // 2, len(rows) - 1), columns]
    return np.where(count > 0, (low + high) / 2.0, np.nan)


# Tools that know no limit: control charts, and the statistics said to rise before a tipping point.

ALPHA = 0.05
"""Weight of a new row in the moving mean and variance."""
SLACK = 0.5
"""Of the CUSUM, in standard deviations: half the shift it is made for."""
WINDOW = 40
"""Rows of the moving variance and autocorrelation."""
STRONGEST = 5
"""Early-warning statistics average so many metrics: a tipping point shows in several."""


def _worst(row: Floats) -> float | None:
    return None if np.isnan(row).all() else float(np.nanmax(row))


class EwmaZ:
    """Largest |value - moving mean| over the moving standard deviation; the moving values come before the row."""

    def __init__(self) -> None:
        self._start = Start()
        self._moving: tuple[Floats, Floats] | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """In standard deviations."""
        row = watched(metrics)
        known = self._start.add(step, row)
        if known is None:
            return None
        center, spread = known
        mean, variance = self._moving or (center, spread**2)
        away = row - mean
        z = np.abs(away) / np.maximum(np.sqrt(variance), spread / 10.0)
        kept = np.where(np.isnan(away), 0.0, away)
        fresh = np.where(np.isnan(away), variance, (1 - ALPHA) * (variance + ALPHA * kept * kept))
        self._moving = (mean + ALPHA * kept, fresh)
        return _worst(z)


class Cusum:
    """Two-sided cumulative sums of standard deviations from the run's own baseline beyond the slack (Page 1954)."""

    def __init__(self) -> None:
        self._start = Start()
        self._up: Floats | float = 0.0
        self._down: Floats | float = 0.0

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """The largest sum."""
        row = watched(metrics)
        known = self._start.add(step, row)
        if known is None:
            return None
        z = (row - known[0]) / known[1]
        z = np.where(np.isnan(z), 0.0, z)
        self._up = np.maximum(0.0, self._up + z - SLACK)
        self._down = np.maximum(0.0, self._down - z - SLACK)
        return float(np.max(np.maximum(self._up, self._down)))


class EarlyWarning:
    """Rising variance and lag-1 autocorrelation of the detrended last rows, against the run's own start.

    Critical slowing down, as in Scheffer et al. 2009: log of the variance's ratio to the baseline's, plus twice the
    autocorrelation, averaged over the metrics where that is largest.
    """

    def __init__(self) -> None:
        self._start = Start()
        self._rows: deque[Floats] = deque(maxlen=WINDOW)

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """The mean of the strongest; None until the window is full."""
        row = watched(metrics)
        known = self._start.add(step, row)
        self._rows.append(row)
        if known is None or len(self._rows) < WINDOW:
            return None
        rows = np.array(self._rows)
        there = ~np.isnan(rows).any(axis=0)
        if not there.any():
            return None
        residual = _detrended(rows[:, there])
        variance = (residual * residual).mean(axis=0) + 1e-12
        echo = (residual[1:] * residual[:-1]).mean(axis=0) / variance
        told = np.log(variance / known[1][there] ** 2) + 2.0 * echo
        return float(np.sort(told)[-STRONGEST:].mean())


_TIME = np.arange(WINDOW) - (WINDOW - 1) / 2.0


def _detrended(rows: Floats) -> Floats:
    """Less the straight line through each column."""
    away = rows - rows.mean(axis=0)
    line = _TIME[:, None] * (_TIME @ away / (_TIME @ _TIME))
    left: Floats = away - line
    return left


# Tools that know the limits of the labels, and read what a forecaster may read: how far, and how long, to each.

MEDIAN_ROWS = 5
FIT_STEPS = 60
"""A straight line is fitted to so many steps, and to at least :data:`LEAST` rows."""
LEAST = 4
PACE = 50.0
"""Steps to a limit at which its score is 1/2."""
BROKEN = ("loss/policy", "loss/raw", "optim/grad_norm", "policy/entropy")
"""Metrics that are not finite where the run is broken."""
Place = tuple[float, float, float]
"""The level, where it comes from, where the limit is."""


@dataclass
class Track:
    """One limit on one run: the level (NaN where this row has none), the run's own baseline, the best so far."""

    limit: LabelLimit
    level: float = math.nan
    _start: list[float] = field(default_factory=list)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_ROWS))
    _best: float = -math.inf
    _base: float | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics it reads: the stand-in of a hidden one."""
        return (self.limit.stand_in,) if self.limit.stand_in else self.limit.metrics

    def add(self, step: int, metrics: Mapping[str, float]) -> Place | None:
        """Place of the run; None where the level or the limit is not known."""
        value = next((metrics[name] for name in self.metrics if name in metrics), math.nan)
        self.level = math.nan
        if not math.isfinite(value):
            return None
        self._recent.append(value)
        self.level = median(self._recent)
        windows = limits_of().windows
        if windows.baseline[0] <= step <= windows.baseline[1]:
            self._start.append(value)
        if step >= self.limit.best_from:
            self._best = max(self._best, self.level)
        return self._placed() if step >= windows.monitored and self._start else None

    def _placed(self) -> Place:
        if self._base is None:
            self._base = median(self._start)
        if self.limit.kind == "drop":
            share = float(self.limit.times or 0.0)
            return self.level, self._best, min(share * self._best, self._best - self.limit.fall)
        limit, base = self.limit, self._base
        times = None if limit.times is None else limit.times * base
        plus = None if limit.plus is None else base + limit.plus
        bounds = [bound for bound in (limit.level, times, plus) if bound is not None]
        return self.level, base, max(bounds) if limit.side == "above" else min(bounds)


class _Reach(ABC):
    """Both tools: every limit's track, and what is not finite at once."""

    def __init__(self) -> None:
        self._tracks = [Track(limit) for limit in limits_of().rows if limit.kind != "broken"]

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """The worst over the limits; infinite where a value is not finite."""
        places = [track.add(step, metrics) for track in self._tracks]
        scores = self._scores(step, places)
        if any(not math.isfinite(metrics[name]) for name in BROKEN if name in metrics):
            return math.inf
        return max(scores, default=None)

    @abstractmethod
    def _scores(self, step: int, places: Sequence[Place | None]) -> list[float]: ...


class Static(_Reach):
    """Share of the way from its own baseline to the limit that is gone: 0 at the baseline, 1 at the limit."""

    def _scores(self, step: int, places: Sequence[Place | None]) -> list[float]:  # noqa: ARG002
        found = [place for place in places if place is not None]
        return [(level - base) / (limit - base) if limit != base else 1.0 for level, base, limit in found]


class Extrapolation(_Reach):
    """Nearness in time of the limit on a straight line through the last 60 steps: 1 now, 1/2 in 50 steps, 0 never.

    Beyond the limit, the share of the way from the baseline that is gone: 1 and more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: deque[int] = deque()
        self._levels: deque[list[float]] = deque()

    def _scores(self, step: int, places: Sequence[Place | None]) -> list[float]:
        self._steps.append(step)
        self._levels.append([track.level for track in self._tracks])
        while self._steps[0] <= step - FIT_STEPS:
            self._steps.popleft()
            self._levels.popleft()
        if all(place is None for place in places):
            return []
        paces = slopes(np.array(self._steps, dtype=np.float64), np.array(self._levels)).tolist()
        return [_soon(*place, pace) for place, pace in zip(places, paces, strict=True) if place is not None]


def _soon(level: float, base: float, limit: float, pace: float) -> float:
    sign = 1.0 if limit >= base else -1.0
    ahead = sign * (limit - level)
    if ahead <= 0.0:
        return 1.0 - ahead / abs(limit - base) if limit != base else 1.0
    return 1.0 / (1.0 + ahead / (sign * pace) / PACE) if sign * pace > 0.0 else 0.0


def slopes(x: Floats, columns: Floats) -> Floats:
    """Per step, by least squares, of each column over its rows that are no NaN; 0 of too few."""
    there = ~np.isnan(columns)
    count = there.sum(axis=0)
    away = np.where(there, x[:, None], 0.0)
    away = np.where(there, x[:, None] - away.sum(axis=0) / np.maximum(count, 1), 0.0)
    spread = (away * away).sum(axis=0)
    lean = (away * np.where(there, columns, 0.0)).sum(axis=0)
    return np.where((count >= LEAST) & (spread > 0.0), lean / np.maximum(spread, 1e-9), 0.0)


# Simple tools that every leaderboard holds: what a forecaster has to beat.
#
# Each is a small object that is given the rows of one run, one at a time, and says how bad it looks: the future is
# out of reach by the interface. The higher the worse; None: no forecast.


class Tool(Protocol):
    """One run's watcher."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Score of the run after this row, the higher the worse; ``metrics``: as measured, NaN where that was NaN."""
        ...


BASELINES: Mapping[str, Callable[[int], Tool]] = {
    "never": lambda _seed: Never(),
    "always": lambda _seed: Always(),
    "random score": Random,
    "step index": lambda _seed: StepIndex(),
    "static limits": lambda _seed: Static(),
    "EWMA z": lambda _seed: EwmaZ(),
    "CUSUM": lambda _seed: Cusum(),
    "linear extrapolation": lambda _seed: Extrapolation(),
    "early-warning statistics": lambda _seed: EarlyWarning(),
}
"""By name: what makes a fresh one for a run; the seed is the run's own."""
_WITHOUT_A_DIAL = ("never", "always")


def run_tool(name: str, make: Callable[[int], Tool], table: RunTable) -> ToolScores:
    """One tool on every run of a table, row by row."""
    return _run({name: make}, table)[0]


def run_baselines(
    table: RunTable, progress: Callable[[Sequence[int]], Iterable[int]] | None = None
) -> list[ToolScores]:
    """All of them. ``progress`` wraps the places of the runs, to show how far it is."""
    return _run(BASELINES, table, progress)


def _run(
    makers: Mapping[str, Callable[[int], Tool]],
    table: RunTable,
    progress: Callable[[Sequence[int]], Iterable[int]] | None = None,
) -> list[ToolScores]:
    scores = {name: np.full(len(table), np.nan) for name in makers}
    places = range(len(table.runs))
    for i in places if progress is None else progress(places):
        seed = zlib.crc32(table.runs[i].encode())
        tools = [(scores[name], make(seed)) for name, make in makers.items()]
        for row, (step, metrics) in enumerate(table.stream(i), start=int(table.starts[i])):
            for score, tool in tools:
                told = tool.update(step, metrics)
                if told is not None:
                    score[row] = told
    return [ToolScores(name, score, alarms_only=name in _WITHOUT_A_DIAL) for name, score in scores.items()]


# How far a forecast can go on runs whose faults are known: what is not there yet cannot be seen.
#
# Many faults of a made corpus begin at a random step, and some a few steps before they break the run. The ceiling is
# a tool that cheats: from the step on at which a fault begins it knows the onset. What it misses, nobody can know.
# Told five steps later it is the bound of a tool that must see something of a fault first.

CEILING, LATER = "told of the fault (ceiling)", "told of it 5 steps later"
"""Names of the rows."""
TO_LOOK = 5
"""Steps of the second: a median of five rows needs three of them to move."""


def ceilings(table: RunTable, labels: Labels) -> list[ToolScores]:
    """Scores of that tool: the nearer the onset, the higher, in the last 100 steps and once the fault is there.

    Told at once, and told five steps later. A failing run of which no fault is recorded is known from its first step.
    Empty where the table records no faults.
    """
    if not any(fault is not None for fault in table.faults):
        return []
    return [_told(table, labels, CEILING, 0), _told(table, labels, LATER, TO_LOOK)]


def _told(table: RunTable, labels: Labels, name: str, later: int) -> ToolScores:
    score = np.zeros(len(table))
    for i, label in enumerate(labels.of(table)):
        if label.outcome is not RunOutcome.EVENT or label.onset is None:
            continue
        rows = table.rows(i)
        steps = table.step[rows]
        ahead = label.onset - steps
        fault = table.faults[i]
        known = (ahead <= HORIZONS[-1]) & (steps >= (0 if fault is None else fault + later))
        score[rows] = np.where(known, 1.0 + HORIZONS[-1] - np.maximum(ahead, 0), 0.0)
    return ToolScores(name, score)
