"""What alarms at given thresholds found, when, and at what price: counts first, rates beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlwatch.forecast.evaluation.episodes import Episodes
from rlwatch.forecast.evaluation.placebo import at_least, expected
from rlwatch.forecast.evaluation.run_table import Bools, Floats, Ints
from rlwatch.forecast.evaluation.timeline import AFTER, AFTER_ROWS, BEFORE, BUILT_UP, EARLY_LEAD, LEAD, Timeline


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
    def _told(self) -> Ints:
        """How many monitored rows before each row have an alarm."""
        alarm = (self.score >= self.threshold[self.timeline.table.run_of]) & self.timeline.monitored
        return np.concatenate([[0], np.cumsum(alarm)])

    @cached_property
    def _next(self) -> Ints:
        """Of each row, the first row from it on that has an alarm."""
        alarm, size = np.diff(self._told) > 0, len(self._told) - 1
        return np.minimum.accumulate(np.where(alarm, np.arange(size), size)[::-1])[::-1]

    def within(self, runs: Ints, first: Ints, last: Ints) -> Bools:
        """Whether each of ``runs`` has an alarm at a step of [first, last]; broadcasts."""
        find = self.timeline.table.find
        hit: Bools = self._told[find(runs, last + 1)] > self._told[find(runs, first)]
        return hit

    def ever(self, runs: Ints) -> Bools:
        """Whether each of ``runs`` has any alarm."""
        starts = self.timeline.table.starts
        return self._told[starts[runs + 1]] > self._told[starts[runs]]

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
