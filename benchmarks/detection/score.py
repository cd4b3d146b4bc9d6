"""How alarms are judged: counts first, rates beside them, and what a mere clock would have got."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from detection.methods import Alarm
from detection.runs import Labelled
from forecast.scoring.alarms import at_least

BEFORE, AFTER_STEPS, AFTER_ROWS = 100, 10, 10
"""An event is found in time by an alarm from 100 steps before its onset to 10 steps (or 10 logged rows) after it, or to
the step by which a person would be sure, where that was written down."""
QUIET_ROWS = 25
"""Alarms closer than this are one episode."""


@dataclass(frozen=True)
class Score:
    """Of one method on one set of runs."""

    events: int
    found: int
    found_late: int
    delays: tuple[float, ...]
    placebo: float
    p: float
    healthy: int
    healthy_any: int
    healthy_critical: int
    transients_critical: int
    rows: int
    episodes: int
    critical_episodes: int

    @property
    def per_thousand(self) -> float:
        """False alarm episodes in 1000 healthy rows."""
        return 1000 * self.episodes / max(1, self.rows)

    @property
    def critical_per_thousand(self) -> float:
        """The same of critical ones."""
        return 1000 * self.critical_episodes / max(1, self.rows)

    @property
    def delay(self) -> float | None:
        """Median steps from onset to the first alarm, of the events found; negative is early."""
        return statistics.median(self.delays) if self.delays else None


def score(runs: Sequence[Labelled], alarms: Sequence[Sequence[Alarm]]) -> Score:
    """Judge ``alarms`` of each of ``runs``."""
    pairs = list(zip(runs, alarms, strict=True))
    healthy = [(run, told) for run, told in pairs if run.severity == "healthy"]
    events = [(run, told) for run, told in pairs if run.event]
    hits = [_found(run, told, late=False) for run, told in events]
    late = [_found(run, told, late=True) for run, told in events]
    placebos = [_placebo(run, healthy) for run, _ in events]
    count = sum(hit is not None for hit in hits)
    return Score(
        events=len(events),
        found=count,
        found_late=sum(hit is not None for hit in late),
        delays=tuple(hit for hit in late if hit is not None),
        placebo=sum(placebos),
        p=at_least(count, placebos),
        healthy=len(healthy),
        healthy_any=sum(bool(told) for _, told in healthy),
        healthy_critical=sum(any(alarm.critical for alarm in told) for _, told in healthy),
        transients_critical=sum(any(a.critical for a in told) for run, told in pairs if run.severity == "transient"),
        rows=sum(len(run.rows) for run, _ in healthy),
        episodes=sum(_episodes(run, told) for run, told in healthy),
        critical_episodes=sum(_episodes(run, [a for a in told if a.critical]) for run, told in healthy),
    )


def _window(run: Labelled) -> tuple[float, float]:
    """Steps within which an alarm counts as in time."""
    assert run.onset is not None
    after = [step for step, _ in run.rows if step >= run.onset]
    rows = after[min(AFTER_ROWS, len(after) - 1)] if after else run.onset
    return run.onset - BEFORE, max(run.onset + AFTER_STEPS, rows) if run.by is None else run.by


def _found(run: Labelled, told: Sequence[Alarm], *, late: bool) -> float | None:
    first, last = _window(run)
    steps = [alarm.step for alarm in told if alarm.step >= first and (late or alarm.step <= last)]
    return min(steps) - run.onset if steps and run.onset is not None else None


def _placebo(event: Labelled, healthy: Sequence[tuple[Labelled, Sequence[Alarm]]]) -> float:
    """Share of healthy runs that alarm in the same window, of those that reach it."""
    first, last = _window(event)
    reach = [told for run, told in healthy if run.rows and run.rows[-1][0] >= first]
    return sum(any(first <= a.step <= last for a in told) for told in reach) / len(reach) if reach else 0.0


def _episodes(run: Labelled, told: Sequence[Alarm]) -> int:
    places = {step: i for i, (step, _) in enumerate(run.rows)}
    rows = sorted(places.get(alarm.step, 0) for alarm in told)
    return sum(i == 0 or row - rows[i - 1] > QUIET_ROWS for i, row in enumerate(rows))
