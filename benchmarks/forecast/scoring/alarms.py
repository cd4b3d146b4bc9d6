"""Alarms of a tool: which rows count for what, what alarms at given thresholds found, when, and at what price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlwatch.forecast.labels import Label, Labels, RunOutcome, limits_of
from rlwatch.forecast.tables import Bools, Floats, Ints, RunTable

BEFORE = 100
"""An alarm earlier than so many steps before an onset is false."""
LEAD, EARLY_LEAD = 5, 10
"""Steps before the onset by which an alarm forecasts; by which it forecasts early."""
AFTER, AFTER_ROWS = 10, 10
"""Steps (or logged rows) after the onset by which an alarm still detects."""

TIME_TO_WARN = 20
"""Steps from fault to onset below which nobody could have warned in time: there was nothing to be seen."""
BUILT_UP = f"built up over {TIME_TO_WARN} steps or more"
SUDDEN = f"fault less than {TIME_TO_WARN} steps before"
AT_ONCE = "of a kind that comes at once"


@dataclass(frozen=True)
class Timeline:
    """A table and its labels, as arrays. Monitoring starts at step 40; nothing before counts for or against a tool."""

    table: RunTable
    labels: Sequence[Label]

    @classmethod
    def of(cls, table: RunTable, labels: Labels) -> Timeline:
        """The labels in the order of the table's runs."""
        return cls(table, labels.of(table))

    def are(self, *outcomes: RunOutcome) -> Bools:
        """Of each run, whether it came out so."""
        return np.array([label.outcome in outcomes for label in self.labels], dtype=bool)

    @cached_property
    def onset(self) -> Floats:
        """Of each run; infinite without one."""
        return np.array([np.inf if each.onset is None else each.onset for each in self.labels], dtype=np.float64)

    @cached_property
    def start(self) -> int:
        """The step at which monitoring starts."""
        return limits_of().windows.monitored

    @cached_property
    def monitored(self) -> Bools:
        """Rows from there on."""
        return self.table.step >= self.start

    @cached_property
    def clean(self) -> Ints:
        """Places of the clean runs that are monitored at all."""
        return np.flatnonzero(self.are(RunOutcome.CLEAN) & (self.table.last >= self.start))

    @cached_property
    def untouched(self) -> Ints:
        """Those of them with no fault, not even one that stayed small or was over in time; none where nobody knows."""
        faults = self.table.faults
        known = any(fault is not None for fault in faults)
        return np.array([i for i in self.clean.tolist() if known and faults[i] is None], dtype=np.int64)

    @cached_property
    def events(self) -> Ints:
        """Places of the runs that failed, but not early."""
        return np.flatnonzero(self.are(RunOutcome.EVENT))

    @cached_property
    def early(self) -> Ints:
        """Places of the runs that failed early and have monitored rows."""
        return np.flatnonzero(self.are(RunOutcome.EARLY) & (self.table.last >= self.start))

    @cached_property
    def warning(self) -> tuple[str, ...]:
        """Of each event, what there was to be seen before it; "" of other runs, and where no fault is known of."""
        found = [""] * len(self.labels)
        for i in self.events.tolist() if self.table.faults else ():
            fault = self.table.faults[i]
            if fault is not None:
                late = self.onset[i] - fault < TIME_TO_WARN
                at_once = bool(self.table.at_once) and self.table.at_once[i]
                found[i] = AT_ONCE if at_once else SUDDEN if late else BUILT_UP
        return tuple(found)

    def healthy(self, *, strict: bool = False) -> Bools:
        """Rows where an alarm is false: of clean runs, of faulty ones before their fault, and of events more than 100
        steps before the onset.

        ``strict``: also all those of ambiguous and of faulty runs.
        """
        kinds = (RunOutcome.CLEAN, RunOutcome.AMBIGUOUS, RunOutcome.FAULTY) if strict else (RunOutcome.CLEAN,)
        until = np.where(self.are(*kinds), np.inf, -np.inf)
        until = np.where(self.are(RunOutcome.EVENT), self.onset - BEFORE, until)
        if not strict:
            until = np.where(self.are(RunOutcome.FAULTY), self.table.sound_until, until)
        return self.monitored & (self.table.step < until[self.table.run_of])

    @cached_property
    def at_risk(self) -> Bools:
        """Monitored rows before an onset, of runs that did not fail early."""
        return self.monitored & (self.table.step < self.onset[self.table.run_of]) & ~self._early_rows

    @cached_property
    def _early_rows(self) -> Bools:
        return self.are(RunOutcome.EARLY)[self.table.run_of]

    @cached_property
    def weight(self) -> Floats:
        """Steps that each row stands for, none of them before monitoring starts."""
        return np.minimum(self.table.span, np.maximum(self.table.step - self.start + 1, 0)).astype(np.float64)

    def outcome_within(self, horizon: int) -> tuple[Bools, Bools]:
        """(rows to judge at, whether the run fails within ``horizon`` steps of them).

        Rows so near the end of a run without an onset that nobody knows are left out.
        """
        onset = self.onset[self.table.run_of]
        seen = np.isfinite(onset) | (self.table.step + horizon <= self.table.last[self.table.run_of])
        return self.at_risk & seen, onset - self.table.step <= horizon

    def window(self, runs: Ints, first: int, last: int) -> tuple[Ints, Ints]:
        """Monitored steps from onset + ``first`` to onset + ``last``, both included, of runs with an onset."""
        onset = self.onset[runs].astype(np.int64)
        return np.maximum(onset + first, self.start), onset + last

    def rows_after(self, runs: Ints, steps: Ints, count: int) -> Ints:
        """The step of the ``count``-th logged row after each of ``steps``, or of the run's last row."""
        rows = self.table.find(runs, steps) + count
        return self.table.step[np.minimum(rows, self.table.starts[runs + 1] - 1)]


# Alarm episodes at every threshold at once, and the threshold that keeps to a budget of them.
#
# Alarms are one episode until 25 quiet steps. A row whose score is s, where the highest of the 25 steps before is m,
# begins an episode at exactly the thresholds in (m, s]: counting needs no grid of thresholds.

QUIET = 25
"""Quiet steps that end an episode; alarms in rows next to each other are one however far their steps are apart."""
MOST_OCCUPIED = 0.25
"""A tool that alarms on more than this share of healthy steps meets no budget, however few its episodes are."""


@dataclass(frozen=True)
class Episodes:
    """Of one tool on some rows: each begins at thresholds in (``low``, ``high``], in run ``run``.

    ``score``, ``weight``, ``place``: of the rows themselves, their steps and their run.
    """

    low: Floats
    high: Floats
    run: Ints
    score: Floats
    weight: Floats
    place: Ints

    def begun(self, threshold: Floats) -> Ints:
        """Number that begin in each run, at each run's ``threshold``."""
        at = threshold[self.run]
        return np.bincount(self.run[(self.low < at) & (at <= self.high)], minlength=len(threshold))

    def occupied(self, threshold: Floats) -> Floats:
        """Steps under alarm in each run, at each run's ``threshold``."""
        alarm = self.score >= threshold[self.place]
        occupied = np.bincount(self.place[alarm], weights=self.weight[alarm], minlength=len(threshold))
        return occupied.astype(np.float64)


def heard(score: Floats) -> Floats:
    """Scores with minus infinity for no forecast: below every threshold."""
    return np.where(np.isnan(score), -np.inf, score)


def episodes(timeline: Timeline, score: Floats, rows: Bools) -> Episodes:
    """Episodes among ``rows``."""
    score = np.where(rows, heard(score), -np.inf)
    low = _highest_before(timeline, score)
    begins = np.flatnonzero(score > low)
    kept = np.flatnonzero(rows)
    run = timeline.table.run_of
    return Episodes(low[begins], score[begins], run[begins], score[kept], timeline.weight[kept], run[kept])


def _highest_before(timeline: Timeline, score: Floats) -> Floats:
    """Of each row, the highest score of the ``QUIET`` steps before it in its run, and of the row before."""
    table, highest = timeline.table, np.full(len(score), -np.inf)
    for back in range(1, min(QUIET, len(score) - 1) + 1):
        near = table.run_of[back:] == table.run_of[:-back]
        near &= (table.step[back:] - table.step[:-back] <= QUIET) | (back == 1)
        np.maximum(highest[back:], np.where(near, score[:-back], -np.inf), out=highest[back:])
    return highest


def thresholds_for(found: Episodes, runs: Bools, candidates: Floats, budgets: Sequence[float]) -> list[float]:
    """For each budget the lowest threshold at which, as at every higher one, episodes in ``runs`` stay within it.

    ``budgets``: episodes per 1000 steps. ``candidates``: scores to choose from. NaN, which no score reaches, where even
    the highest is too much. The way down stops at the first threshold beyond the budget: further down, episodes melt
    into few.
    """
    tried = np.unique(candidates[np.isfinite(candidates)])[::-1]
    if np.isposinf(candidates).any():
        tried = np.concatenate([[np.inf], tried])
    mine, rows = runs[found.run], runs[found.place]
    steps = float(found.weight[rows].sum())
    count = _at_least(found.high[mine], tried) - _at_least(found.low[mine], tried)
    under = _weight_at_least(found.score[rows], found.weight[rows], tried)
    latched = under > MOST_OCCUPIED * steps
    return [_lowest(tried, latched | (1000.0 * count > budget * steps)) for budget in budgets]


def _lowest(tried: Floats, over: Bools) -> float:
    kept = int(np.argmax(over)) if over.any() else len(tried)
    return float(tried[kept - 1]) if kept else float("nan")


def _at_least(values: Floats, thresholds: Floats) -> Ints:
    """Number of ``values`` that reach each threshold."""
    return len(values) - np.searchsorted(np.sort(values), thresholds, side="left")


def _weight_at_least(values: Floats, weights: Floats, thresholds: Floats) -> Floats:
    order = np.argsort(values)
    ahead = np.concatenate([[0.0], np.cumsum(weights[order])])
    reached: Floats = ahead[-1] - ahead[np.searchsorted(values[order], thresholds, side="left")]
    return reached


# What a mere clock would have hit: alarms of clean runs over the same steps.


def expected(alarmed: Bools, reached: Bools) -> Floats:
    """Of each event (row), the share of clean runs (columns) that alarmed, of those that reached its window."""
    count = reached.sum(axis=1)
    return np.where(count > 0, alarmed.sum(axis=1) / np.maximum(count, 1), 0.0)


def at_least(count: int, chances: Sequence[float]) -> float:
    """Chance of ``count`` or more hits among independent ``chances`` (Poisson-binomial).

    >>> at_least(2, [0.5, 0.5])
    0.25
    """
    spread = np.zeros(len(chances) + 1)
    spread[0] = 1.0
    for chance in chances:
        spread[1:] = spread[1:] * (1.0 - chance) + spread[:-1] * chance
        spread[0] *= 1.0 - chance
    return float(min(1.0, spread[count:].sum()))


# What alarms at given thresholds found, when, and at what price: counts first, rates beside them.


@dataclass(frozen=True)
class Point:
    """A tool at one setting of its dial.

    Of ``events``: ``forecast`` had an alarm 100 to 5 steps before, ``early`` 100 to 10 before, ``detected`` by 10
    steps after, ``detected_rows`` by 10 logged rows after. ``placebo`` and ``placebo_early``: how many it would have
    hit if it alarmed in them as it does in clean runs over the same steps; ``p``: chance of as many hits or more then.
    ``built_up`` events, ``built_up_forecast`` of them forecast, are those whose fault could be seen.
    ``lead``: quartiles of steps from the first alarm of the window to the onset (None without a hit).
    ``faults``, ``faults_detected``: runs that failed before step 55. ``episodes``: false ones, in ``steps`` steps and
    ``rows`` rows, of which ``occupied`` steps were under alarm. ``clean_alarmed`` of ``clean`` runs had any alarm,
    ``untouched_alarmed`` of ``untouched`` ones, into which nothing was put that they had to get over.
    """

    events: int
    forecast: int
    early: int
    detected: int
    detected_rows: int
    placebo: float
    p: float
    placebo_early: float
    p_early: float
    lead: tuple[float, float, float] | None
    faults: int
    faults_detected: int
    episodes: int
    steps: float
    rows: int
    occupied: float
    clean: int
    clean_alarmed: int
    untouched: int
    untouched_alarmed: int
    built_up: int
    built_up_forecast: int

    @property
    def recall(self) -> float | None:
        """Share of events forecast; None without events."""
        return share(self.forecast, self.events)

    @property
    def detection(self) -> float | None:
        """Share of events detected."""
        return share(self.detected, self.events)

    @property
    def per_1000(self) -> float | None:
        """False alarm episodes in 1000 healthy steps."""
        return share(1000.0 * self.episodes, self.steps)

    @property
    def per_1000_rows(self) -> float | None:
        """The same in 1000 healthy rows."""
        return share(1000.0 * self.episodes, self.rows)

    @property
    def occupancy(self) -> float | None:
        """Share of healthy steps under alarm."""
        return share(self.occupied, self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates."""
        rates = ("recall", "detection", "per_1000", "per_1000_rows", "occupancy")
        return asdict(self) | {name: getattr(self, name) for name in rates}


def share(part: float, whole: float) -> float | None:
    """``part / whole``; None of nothing."""
    return part / whole if whole else None


@dataclass(frozen=True)
class Alarms:
    """Alarms of one tool, at a threshold for each run."""

    timeline: Timeline
    found: Episodes
    score: Floats
    threshold: Floats

    @cached_property
    def _alarmed_before(self) -> Ints:
        """Number of monitored rows before each row that have an alarm."""
        alarm = (self.score >= self.threshold[self.timeline.table.run_of]) & self.timeline.monitored
        return np.concatenate([[0], np.cumsum(alarm)])

    @cached_property
    def _next(self) -> Ints:
        """Of each row, the first row from it on that has an alarm."""
        alarm, size = np.diff(self._alarmed_before) > 0, len(self._alarmed_before) - 1
        return np.minimum.accumulate(np.where(alarm, np.arange(size), size)[::-1])[::-1]

    def within(self, runs: Ints, first: Ints, last: Ints) -> Bools:
        """True for each of ``runs`` with an alarm at a step of [first, last]; broadcasts."""
        find = self.timeline.table.find
        hit: Bools = self._alarmed_before[find(runs, last + 1)] > self._alarmed_before[find(runs, first)]
        return hit

    def ever(self, runs: Ints) -> Bools:
        """True for each of ``runs`` with any alarm."""
        starts = self.timeline.table.starts
        return self._alarmed_before[starts[runs + 1]] > self._alarmed_before[starts[runs]]

    def hits(self, last: int) -> Bools:
        """Of each event, whether it has an alarm from 100 steps before its onset to ``last`` steps after it."""
        events = self.timeline.events
        return self.within(events, *self.timeline.window(events, -BEFORE, last))

    @cached_property
    def leads(self) -> Ints:
        """Steps from the first alarm in the window to the onset, of the events forecast."""
        events = self.timeline.events[self.hits(-LEAD)]
        first, _ = self.timeline.window(events, -BEFORE, -LEAD)
        rows = self._next[self.timeline.table.find(events, first)] if len(events) else events
        return (self.timeline.onset[events] - self.timeline.table.step[rows]).astype(np.int64)

    @cached_property
    def late_hits(self) -> Bools:
        """Of each event, whether an alarm comes by 10 rows (or 10 steps, if that is later) after its onset."""
        events = self.timeline.events
        first, last = self.timeline.window(events, -BEFORE, AFTER)
        rows = self.timeline.rows_after(events, last - AFTER, AFTER_ROWS)
        return self.within(events, first, np.maximum(last, rows))

    def faults_found(self) -> int:
        """Early failures with an alarm by 10 steps after the onset, or after monitoring starts."""
        runs = self.timeline.early
        first, last = self.timeline.window(runs, -BEFORE, AFTER)
        return int(self.within(runs, first, np.maximum(last, self.timeline.start + AFTER)).sum())

    def chances(self, last: int) -> Floats:
        """Of each event, the share of clean runs that alarm in its window, of those that reach it."""
        clean, events = self.timeline.clean, self.timeline.events
        first, last_step = (edge[:, None] for edge in self.timeline.window(events, -BEFORE, last))
        reached = self.timeline.table.last[clean][None, :] >= first
        alarmed = self.within(np.broadcast_to(clean, reached.shape), first, last_step) & reached
        return expected(alarmed, reached)

    def point(self) -> Point:
        """All of it, counted."""
        line = self.timeline
        hits, early, detected = (self.hits(last) for last in (-LEAD, -EARLY_LEAD, AFTER))
        chances, chances_early = self.chances(-LEAD), self.chances(-EARLY_LEAD)
        slow = np.array([line.warning[i] == BUILT_UP for i in line.events.tolist()], dtype=bool)
        quartiles = np.percentile(self.leads, (25, 50, 75)) if len(self.leads) else None
        return Point(
            events=len(hits),
            forecast=int(hits.sum()),
            early=int(early.sum()),
            detected=int(detected.sum()),
            detected_rows=int(self.late_hits.sum()),
            placebo=float(chances.sum()),
            p=at_least(int(hits.sum()), chances.tolist()),
            placebo_early=float(chances_early.sum()),
            p_early=at_least(int(early.sum()), chances_early.tolist()),
            lead=None if quartiles is None else (float(quartiles[0]), float(quartiles[1]), float(quartiles[2])),
            faults=len(line.early),
            faults_detected=self.faults_found(),
            episodes=int(self.found.begun(self.threshold).sum()),
            steps=float(self.found.weight.sum()),
            rows=len(self.found.weight),
            occupied=float(self.found.occupied(self.threshold).sum()),
            clean=len(line.clean),
            clean_alarmed=int(self.ever(line.clean).sum()),
            untouched=len(line.untouched),
            untouched_alarmed=int(self.ever(line.untouched).sum()),
            built_up=int(slow.sum()),
            built_up_forecast=int((slow & hits).sum()),
        )
