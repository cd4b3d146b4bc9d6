"""Where each limit is passed, over all rows of a table at once; retrospective: "sustained" reads the rows after.

Everything is counted in steps: windows hold as many rows as there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlwatch.forecast.evaluation.limits import Limit, Limits
from rlwatch.forecast.evaluation.run_table import Bools, Floats, Ints, RunTable


@dataclass
class Judge:
    """Judges the rows of one table by one version of the limits; levels and baselines are kept."""

    table: RunTable
    limits: Limits
    _levels: dict[str, Floats] = field(default_factory=dict)

    def metric_of(self, limit: Limit) -> str | None:
        """The first of the limit's metrics that the table has; None if it has none, or not what else is needed."""
        needed = [limit.unless[0]] if limit.unless else []
        if any(name not in self.table.columns for name in needed):
            return None
        return next((name for name in limit.metrics if name in self.table.columns), None)

    def level(self, metric: str) -> Floats:
        """Median of the rows of the last steps; the last one again where none of them was measured."""
        if metric not in self._levels:
            self._levels[metric] = level(self.table, metric, self.limits.windows.median)
        return self._levels[metric]

    def baseline(self, metric: str) -> Floats:
        """Of each run, the median over the baseline's steps; NaN without a row."""
        first, last = self.limits.windows.baseline
        values = self.table.columns[metric].values
        inside = (self.table.step >= first) & (self.table.step <= last) & ~np.isnan(values)
        found = np.full(len(self.table.runs), np.nan)
        for i in range(len(found)):
            rows = self.table.rows(i)
            kept = values[rows][inside[rows]]
            found[i] = np.median(kept) if len(kept) else np.nan
        return found

    def judged(self, limit: Limit) -> Bools:
        """Of each run, whether the limit can be judged: measured at all, with a baseline where one is needed."""
        metric = self.metric_of(limit)
        if metric is None:
            return np.zeros(len(self.table.runs), dtype=bool)
        there = self._measured(metric) & (self._measured(limit.unless[0]) if limit.unless else True)
        if not limit.relative:
            return there
        base = self.baseline(metric)
        alone = limit.level is None and limit.plus is None  # then a baseline of 0 gives no limit
        usable = (base > 0) if alone else ~np.isnan(base)
        return there & usable & np.isfinite(base)

    def _measured(self, metric: str) -> Bools:
        return np.add.reduceat(self.table.columns[metric].measured, self.table.starts[:-1]) > 0

    def passed(self, limit: Limit) -> Bools:
        """Of each row, whether the limit is passed there."""
        metric = self.metric_of(limit)
        if metric is None:
            return np.zeros(len(self.table), dtype=bool)
        kinds = {"bound": self._beyond, "drop": self._dropped, "broken": self._broken}
        return kinds[limit.kind](limit, metric) & self.judged(limit)[self.table.run_of]

    def _beyond(self, limit: Limit, metric: str) -> Bools:
        now = self.level(metric)
        base = self._raised(limit, self.baseline(metric)[self.table.run_of], now)
        passed = np.ones(len(now), dtype=bool)
        for bound in bounds(limit, base):
            passed &= now >= bound if limit.side == "above" else now <= bound
        if limit.unless:
            passed &= self.level(limit.unless[0]) < limit.unless[1]
        return passed & (self.table.step >= self.limits.windows.monitored) if limit.relative else passed

    def _raised(self, limit: Limit, base: Floats, now: Floats) -> Floats:
        """Baselines of all rows, at least the level of each row before at which the run was taking off."""
        rise = self.limits.taking_off
        if rise is None or limit.type not in rise.types or rise.metric not in self.table.columns:
            return base
        gauge = self.level(rise.metric)
        before = gauge[earlier(self.table, rise.within)]
        since = self.table.step - self.table.first[self.table.run_of]
        rising = (gauge >= rise.times * before) & (gauge >= before + rise.plus) & (since >= rise.within)
        return np.maximum(base, running(self.table, np.where(rising & ~np.isnan(now), now, -np.inf)))

    def _dropped(self, limit: Limit, metric: str) -> Bools:
        now = self.level(metric)
        best = best_so_far(self.table, now, limit.best_from)
        return (now <= float(limit.times or 0.0) * best) & (best - now >= limit.fall)

    def _broken(self, limit: Limit, metric: str) -> Bools:
        broken = (self.table.columns[metric].values > 0) & self.table.columns[metric].measured
        skips = self.table.columns.get(limit.skipped)
        if skips is None:
            return broken
        skipped = skips.values >= 0.5
        return (broken & ~skipped) | (streak(self.table, skipped) >= limit.skips)

    def onset(self, limit: Limit) -> dict[int, int]:
        """Run (its place) -> first step at which the limit is passed for good."""
        passed = self.passed(limit)
        kept = passed if limit.kind == "broken" else sustained(self.table, passed, self.limits)
        rows = np.flatnonzero(kept)
        runs, at = np.unique(self.table.run_of[rows], return_index=True)
        return {int(run): int(self.table.step[rows[i]]) for run, i in zip(runs, at, strict=True)}

    def touched(self, limit: Limit) -> Floats:
        """Of each run, on how many steps the limit is passed (rows times the run's usual steps a row)."""
        count = np.add.reduceat(self.passed(limit).astype(np.float64), self.table.starts[:-1])
        return count * cadence(self.table)


def bounds(limit: Limit, base: Floats) -> list[Floats]:
    """What the level is held against, for baselines ``base``."""
    level = [] if limit.level is None else [np.full_like(base, limit.level)]
    times = [] if limit.times is None else [limit.times * base]
    plus = [] if limit.plus is None else [base + limit.plus]
    return level + times + plus


def cadence(table: RunTable) -> Floats:
    """Median steps from row to row, of each run; 1 for a run of one row."""
    spans = [table.span[table.rows(i)][1:] for i in range(len(table.runs))]
    return np.array([float(np.median(span)) if len(span) else 1.0 for span in spans])


def level(table: RunTable, metric: str, window: int) -> Floats:
    """Median of what was measured in the last ``window`` steps, each row's own included; NaN are left out."""
    values = table.columns[metric].values
    lags = np.full((len(values), window), np.nan)
    for back in range(min(window, len(values))):
        near = np.zeros(len(values), dtype=bool)
        near[back:] = (table.step[back:] - table.step[: len(values) - back] < window) & (
            table.run_of[back:] == table.run_of[: len(values) - back]
        )
        lags[near, back] = values[np.flatnonzero(near) - back]
    ordered = np.sort(lags, axis=1)  # NaN last
    count = window - np.isnan(ordered).sum(axis=1)
    rows = np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, window - 1)]
    with np.errstate(invalid="ignore"):  # of two infinities
        middle = np.where(low == high, low, low + (high - low) / 2.0)
    return carried(table, np.where(count > 0, middle, np.nan))


def carried(table: RunTable, values: Floats) -> Floats:
    """``values`` with the last one before in the place of a NaN, within a run."""
    there = np.where(np.isnan(values), -1, np.arange(len(values)))
    last = np.maximum.accumulate(there)
    known = last >= table.starts[:-1][table.run_of]
    return np.where(known, values[np.maximum(last, 0)], np.nan)


def best_so_far(table: RunTable, values: Floats, since: int) -> Floats:
    """Running maximum within each run, over the rows from step ``since`` on; 0 before."""
    return running(table, np.where((table.step >= since) & ~np.isnan(values), values, 0.0))


def running(table: RunTable, values: Floats) -> Floats:
    """Running maximum within each run."""
    best = [np.maximum.accumulate(values[table.rows(i)]) for i in range(len(table.runs))]
    return np.concatenate(best) if best else values


def earlier(table: RunTable, steps: int) -> Ints:
    """Of each row, the last row of its run that is at least ``steps`` before; its run's first where none is."""
    return np.maximum(np.searchsorted(table.key, table.key - steps, side="right") - 1, table.starts[table.run_of])


def streak(table: RunTable, flags: Bools) -> Ints:
    """Steps since the first row of the unbroken series of flagged rows that each row is in; 0 in none."""
    fresh = np.ones(len(flags), dtype=bool)
    fresh[1:] = ~flags[:-1] | (table.run_of[1:] != table.run_of[:-1])
    began = np.maximum.accumulate(np.where(fresh, np.arange(len(flags)), 0))
    return np.where(flags, table.step - table.step[began] + 1, 0)


def sustained(table: RunTable, passed: Bools, limits: Limits) -> Bools:
    """Rows where ``passed`` holds and goes on for the share of the next steps that the limits ask for."""
    windows = limits.windows
    key = table.key
    counts = np.concatenate([[0], np.cumsum(passed)])
    here, end = np.arange(len(key)), np.searchsorted(key, key + windows.sustained)
    share = (counts[end] - counts[here]) / np.maximum(end - here, 1)
    left = table.last[table.run_of] - table.step + 1
    kept: Bools = passed & (share >= windows.share) & (left >= windows.least)
    return kept


def earliest(found: Mapping[str, int], order: tuple[str, ...]) -> tuple[int, str] | None:
    """The first onset and its type; None without one."""
    if not found:
        return None
    first = min(found.values())
    return first, next(name for name in order if found.get(name) == first)
