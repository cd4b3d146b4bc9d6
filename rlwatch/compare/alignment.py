"""Hold compared runs, and place their rows on an axis: step, tokens, time, or distance to the crash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

import numpy as np

from rlwatch.compare.parting import Floats, MetricSeries
from rlwatch.metrics import LAYER_PREFIX, NOT_LEARNING, Family, canonicalise, family_of, metric_of, resolve, unjudged
from rlwatch.ports import Series, Store
from rlwatch.records import JSON, RunInfo, RunState, Severity, StepRecord
from rlwatch.view import stored_verdict
from rlwatch.wording import THIN, duration, number, step

TOKENS = "tokens/total"
HOUR_S = 3600.0
READ_AT_ONCE = 8
"""Number of metrics whose whole series are in memory at a time."""


class Axis(StrEnum):
    """Axis along which rows of different runs are matched."""

    STEP = "step"
    TOKENS = "tokens"
    TIME = "time"
    CRASH = "crash"

    def place(self, at: float) -> str:
        r"""Return a place ``at`` on the axis in words; seconds for time.

        >>> Axis.STEP.place(1710), Axis.TIME.place(5400), Axis.TOKENS.place(2.5e6), Axis.CRASH.place(-20)
        ('step 1\u202f710', '1.5\u202fh', '2.5M tokens', '20 steps before the crash')
        """
        if self is Axis.TIME:
            return duration(at) if at < HOUR_S else f"{number(at / HOUR_S, 4)}{THIN}h"
        if self is Axis.TOKENS:
            return f"{number(at)} tokens"
        if self is Axis.CRASH:
            return f"{step(abs(round(at)))} steps {'before' if at < 0 else 'after'} the crash"
        return f"step {step(round(at))}"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run that is compared with others, from a store or a log.

    Attributes
    ----------
    names
        Canonical name (or the run's own, if unknown) -> recorded name.
    read
        Returns whole series by recorded name.
    moments
        Returns the Unix seconds of all records.
    config
        Settings of the run.
    crash
        Step at which the run failed; None if it did not.
    """

    name: str
    source: str
    names: Mapping[str, str]
    read: Callable[[Sequence[str]], Mapping[str, Series]]
    moments: Callable[[], Series]
    config: Mapping[str, JSON] = field(default_factory=dict)
    crash: int | None = None

    def series(self, metrics: Iterable[str]) -> dict[str, Series]:
        """Return canonical name -> series, without metrics that the run lacks."""
        held = {metric: self.names[metric] for metric in metrics if metric in self.names}
        read = self.read(sorted(set(held.values()))) if held else {}
        return {metric: read[name] for metric, name in held.items()}


def names_of(recorded: Iterable[str], source: str) -> dict[str, str]:
    """Return canonical name -> recorded name of a run's metrics; unknown names map to themselves.

    ``source``: the run's trainer.
    """
    every = sorted(recorded)
    canonical = canonicalise(dict.fromkeys(every, 0.0), source)[1]
    read = set(canonical.values())
    return canonical | {name: name for name in every if name not in read and name not in canonical}


def subject_of_run(store: Store, run: RunInfo) -> ComparedRun:
    """Return a run of a store, prepared for comparison; its series are read from the store when they are needed."""
    return ComparedRun(
        name=run.name or run.run_id,
        source=run.source,
        names=names_of(store.metric_names(run.run_id), run.source),
        read=lambda names: store.series(run.run_id, names),
        moments=lambda: store.moments(run.run_id),
        config=run.config,
        crash=crash_step(store, run),
    )


def held(store: Store, run: RunInfo) -> ComparedRun:
    """Return a run of a store, prepared for comparison, with its series in memory, so that the store may be closed."""
    one = subject_of_run(store, run)
    whole, moments = store.series(run.run_id, sorted(set(one.names.values()))), store.moments(run.run_id)
    return replace(one, read=lambda names: {name: whole[name] for name in names}, moments=lambda: moments)


def crash_step(store: Store, run: RunInfo) -> int | None:
    """Return the step at which a run failed; None if it did not.

    It is the step of failure in the run's verdict, else the last step if the process crashed.
    """
    verdict = stored_verdict(store, run)
    if verdict.at is not None and verdict.urgency is Severity.CRITICAL:
        return verdict.at
    return run.last_step if run.state is RunState.CRASHED else None


def subject_of_records(
    name: str, source: str, records: Sequence[StepRecord], config: Mapping[str, JSON], crash: int | None = None
) -> ComparedRun:
    """Return a run from a log, prepared for comparison. ``crash``: step at which it failed; None if it did not."""
    columns = _columns(records)
    return ComparedRun(
        name=name,
        source=source,
        names=names_of(columns, source),
        read=lambda names: {name: columns[name] for name in names},
        moments=lambda: _series("ts", records, [record.ts for record in records]),
        config=config,
        crash=crash,
    )


def _columns(records: Sequence[StepRecord]) -> dict[str, Series]:
    held: dict[str, list[StepRecord]] = {}
    for record in records:
        for name in record.metrics:
            held.setdefault(name, []).append(record)
    return {name: _series(name, rows, [row.metrics[name] for row in rows]) for name, rows in held.items()}


def _series(name: str, records: Sequence[StepRecord], values: Sequence[float]) -> Series:
    steps, attempts, seqs = (
        np.array(column, dtype=np.int64)
        for column in ([r.step for r in records], [r.attempt for r in records], [r.seq for r in records])
    )
    return Series(name, steps, np.array(values, dtype=np.float64), attempts, seqs)


# The branch that counts: what a later attempt ran again is left out.


def attempt_starts(series: Iterable[Series]) -> dict[int, int]:
    """Return attempt -> its first step, over all ``series`` of a run."""
    starts: dict[int, int] = {}
    for one in series:
        left = np.ones(len(one.attempts), dtype=bool)
        while left.any():  # once an attempt
            attempt = int(one.attempts[left.argmax()])
            own = one.attempts == attempt
            first = int(one.steps[own].min())
            starts[attempt] = min(first, starts.get(attempt, first))
            left &= ~own
    return starts


def counts(one: Series, starts: Mapping[int, int]) -> np.ndarray:
    """Return a mask (N,) of the rows of a series that no later attempt replaced. ``starts``: attempt -> its first
    step.
    """
    mask = np.ones(len(one.steps), dtype=bool)
    last = max(starts, default=0)
    for attempt in starts:
        if attempt != last:
            limit = min(first for later, first in starts.items() if later > attempt)
            mask &= (one.attempts != attempt) | (one.steps < limit)
    return mask


def rows_that_count(one: Series, starts: Mapping[int, int]) -> MetricSeries:
    """Return the rows of a series that no later attempt replaced, by step, with the last value of each step.

    ``starts``: attempt -> its first step.
    """
    kept = counts(one, starts)
    steps, values = one.steps[kept][::-1], one.values[kept][::-1]  # newest first: of a step the first is kept
    distinct, first = np.unique(steps, return_index=True)
    return MetricSeries(distinct.astype(np.float64), values[first])


# From steps to places on an axis.


@dataclass(frozen=True, slots=True)
class Ruler:
    """Map from the ``steps`` (N,) of a run to ``places`` (N,) on an axis such as time or tokens, linear in between."""

    steps: Floats
    places: Floats

    def laid(self, rows: MetricSeries) -> MetricSeries:
        """Return rows, given by step, by place on the axis, without rows outside of the ruler."""
        inside = (rows.x >= self.steps[0]) & (rows.x <= self.steps[-1])
        places, first = np.unique(np.interp(rows.x[inside], self.steps, self.places), return_index=True)
        return MetricSeries(places, rows.values[inside][first])


def ruler(subject: ComparedRun, axis: Axis, last: int, starts: Mapping[int, int]) -> Ruler | None:
    """Return the map from a run's steps to places on ``axis``; None if the run lacks the values that the axis needs.

    ``last``: last step of the run. ``starts``: attempt -> its first step. Seconds begin at the first record. The
    distance to the crash is in steps and negative before it; for a run that did not crash, the distance to its end is
    used.
    """
    if axis in (Axis.STEP, Axis.CRASH):
        shift = 0 if axis is Axis.STEP else last if subject.crash is None else subject.crash
        far = max(1e12, 2.0 * last)  # no further than need be: places between two ends are rounded by their distance
        ends = np.array([-far, far])
        return Ruler(ends, ends - shift)
    one = subject.moments() if axis is Axis.TIME else subject.series([TOKENS]).get(TOKENS)
    if one is None:
        return None
    rows = rows_that_count(one, starts)
    usable = np.isfinite(rows.values) & (rows.values > 0)
    x, values = rows.x[usable], rows.values[usable]
    if len(x) < 2:
        return None
    if axis is Axis.TIME:
        values = values - values.min()
    elif _per_step(subject):
        values = np.cumsum(values)
    return Ruler(x, np.maximum.accumulate(values))


def _per_step(subject: ComparedRun) -> bool:
    reading = resolve(subject.names[TOKENS], subject.source)
    return reading is not None and reading.alias is not None and reading.alias.aggregator == "per step"


# The parts of a run that are compared: its metrics of learning, and their rows along an axis.


def judged_metrics(subject: ComparedRun) -> list[str]:
    """Return the metrics of learning of a run, without clocks, counters, machines and single layers, sorted."""
    return sorted(name for name in subject.names if _of_learning(name))


def _of_learning(metric: str) -> bool:
    if metric_of(metric) is not None:
        return metric != TOKENS and family_of(metric) not in (Family.SYSTEM, Family.ENGINE)
    return not metric.startswith(LAYER_PREFIX) and unjudged(metric) not in NOT_LEARNING


@dataclass(frozen=True, slots=True)
class Side:
    """A run that is placed along an axis (step, tokens, time or distance to the crash) for comparison.

    ``starts``: attempt -> its first step. ``ruler`` maps steps to places on the axis; None if the run lacks the values
    that the axis needs.
    """

    subject: ComparedRun
    starts: Mapping[int, int]
    ruler: Ruler | None

    @classmethod
    def of(cls, subject: ComparedRun, axis: Axis) -> Self:
        """Return the run's series placed along ``axis``, as one of the two sides of a comparison."""
        rows = subject.moments()
        starts = attempt_starts([rows])
        last = int(rows.steps.max()) if len(rows.steps) else 0
        return cls(subject, starts, ruler(subject, axis, last, starts) if len(rows.steps) else None)

    def rows(self, metrics: Sequence[str]) -> dict[str, MetricSeries]:
        """Return metric -> its current rows by place on the axis, without metrics that the run lacks.

        Rows that a later attempt repeated are left out.
        """
        if self.ruler is None:
            return {}
        return {
            name: self.ruler.laid(rows_that_count(series, self.starts))
            for name, series in self.subject.series(metrics).items()
        }
