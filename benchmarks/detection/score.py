"""How alarms are judged: the definitions, the counts, and what each would be worth by chance.

**Event**: a run that crashed or became unstable, with the onset step of its failure. **Hit**: an alarm at or above the
level from 100 steps before the onset to 10 steps (or two rows, if that is more) after it. **Early**: one from 100 to 10
steps before. **Lead**: steps from the first alarm of the window to the onset.

**Placebo**: the share of healthy runs that alarm in the same steps: twins (of the same project, with the same steps
between rows) where there are five that reach the onset, else all healthy runs of the set that reach it. *p* is the
chance of as many hits or more among events that are hit as often as their twins are alarmed, (k + .5) / (n + 1) each.

**False alarms**: on healthy runs, and earlier than 100 steps before the onset of events; those within 20 rows of an
episode's first belong to it. A *transient* recovered by itself: what is still critical at its end is wrong. A *dead*
run never learns: it is to be said, once.

Every rate has two intervals of 95 %: one that takes runs (of false alarms: episodes) for independent, Wilson's or
Poisson's, and one by drawing whole projects.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from forecast.scoring.alarms import at_least
from scipy.stats import chi2

BEFORE, EARLY = 100, 10
AFTER_STEPS, AFTER_ROWS = 10, 2
JOINED_ROWS = 20
TWINS = 5
"""Fewer healthy runs of the event's own project and row spacing are no measure of it."""
EVENTS = ("crash", "instability")
FORECAST = "crash_forecast"
DRAWS = 2000
Z = 1.959964


@dataclass(frozen=True)
class Run:
    """What is judged of a run besides its alarms.

    ``severity``: healthy, transient, instability, crash, dead, or unlabelled (in no count). ``onset``: first step of
    the trouble. ``steps``: those that were logged, ascending. ``doubt``: whoever labelled it was not sure.
    """

    name: str
    project: str
    severity: str
    onset: float | None
    steps: tuple[int, ...]
    doubt: bool = False

    @property
    def event(self) -> bool:
        """Whether it is to be found."""
        return self.severity in EVENTS and self.onset is not None

    @cached_property
    def spacing(self) -> float:
        """Steps from row to row, in the median; 1 where there is one row."""
        return statistics.median([b - a for a, b in zip(self.steps, self.steps[1:], strict=False)] or [1])

    @property
    def window(self) -> tuple[float, float]:
        """First and last step of an alarm that counts as a hit. Of events only."""
        assert self.onset is not None
        return self.onset - BEFORE, self.onset + max(AFTER_STEPS, AFTER_ROWS * self.spacing)

    @property
    def quiet_before(self) -> float:
        """The step before which an alarm is a false one: any of a healthy run, none where nobody can say."""
        if self.severity == "healthy":
            return math.inf
        return self.window[0] if self.event else -math.inf


@dataclass(frozen=True)
class Alarm:
    """Somebody is told at ``step``: by an alert that fires or worsens."""

    step: int
    critical: bool = True
    kind: str = ""
    onset: int | None = None


@dataclass(frozen=True)
class Told:
    """Of one run: the alarms in order, and whether a critical one still stands at the run's end.

    ``findings``: the same before the alert rules' wait, where the method has such. ``verdict``: what it says became of
    the run, in a word; empty where it says none.
    """

    alarms: tuple[Alarm, ...] = ()
    critical_at_end: bool = False
    findings: tuple[Alarm, ...] = ()
    verdict: str = ""


Level = Callable[[Alarm], bool]
LEVELS: dict[str, Level] = {
    "critical": lambda alarm: alarm.critical,
    "any": lambda alarm: True,  # noqa: ARG005
    "any but forecasts": lambda alarm: alarm.kind != FORECAST,
    "forecasts": lambda alarm: alarm.kind == FORECAST,
}


@dataclass(frozen=True)
class Rate:
    """``count`` of ``total``, times ``scale``; its intervals of 95 %, None of nothing.

    ``exact``: Wilson's of a share, Poisson's of a rate. ``drawn``: over projects, where these can tell.
    """

    count: float
    total: float
    scale: float = 1.0
    exact: tuple[float, float] | None = None
    drawn: tuple[float, float] | None = None

    @property
    def value(self) -> float | None:
        """The rate itself; None of nothing."""
        return self.scale * self.count / self.total if self.total else None


@dataclass(frozen=True)
class Score:
    """Of one method, at one level, on one set of runs; see the module for what each means.

    ``leads``: of the events hit. ``ever``: events with an alarm at 100 steps before the onset or at any time later.
    ``placebo``, ``placebo_early``: mean over the events that have healthy runs beside them. ``twinned``: events judged
    by twins. ``projects``: with events.
    """

    events: int
    projects: int
    hits: Rate
    early: Rate
    ever: Rate
    crashes: Rate
    leads: tuple[float, ...]
    placebo: float | None
    p: float
    placebo_early: float | None
    p_early: float
    twinned: int
    per_1000_rows: Rate
    per_1000_steps: Rate
    healthy: Rate
    transients: Rate
    dead: Rate
    dead_repeated: int

    @property
    def lead(self) -> float | None:
        """Median lead in steps; negative is late."""
        return statistics.median(self.leads) if self.leads else None


@dataclass(frozen=True)
class _Heard:
    run: Run
    steps: tuple[int, ...]
    stands: bool = False
    rows: list[int] = field(default_factory=list)

    def within(self, first: float, last: float) -> bool:
        return bisect_left(self.steps, first) < bisect_right(self.steps, last)


def score(runs: Sequence[Run], told: Sequence[Told], level: Level, *, findings: bool = False) -> Score:
    """Judge what was ``told`` of each of ``runs`` at ``level``; with ``findings`` what was found before any wait."""
    heard = [_heard(run, each, level, findings) for run, each in zip(runs, told, strict=True)]
    healthy = [each for each in heard if each.run.severity == "healthy"]
    events = [each for each in heard if each.run.event]
    crashes = [each for each in events if each.run.severity == "crash"]
    dead = [each for each in heard if each.run.severity == "dead"]
    transients = [each for each in heard if each.run.severity == "transient"]
    hit = {each.run.name: each.within(*each.run.window) for each in events}
    early = {each.run.name: each.within(each.run.window[0], _onset(each.run) - EARLY) for each in events}
    chances = [_alarmed(each.run, healthy, each.run.window[1]) for each in events]
    chances_early = [_alarmed(each.run, healthy, _onset(each.run) - EARLY) for each in events]
    judged = [each for each in heard if each.run.severity == "healthy" or each.run.event]
    false = [_episodes(each) for each in judged]
    return Score(
        events=len(events),
        projects=len({each.run.project for each in events}),
        hits=_share(events, [hit[each.run.name] for each in events]),
        early=_share(events, [early[each.run.name] for each in events]),
        ever=_share(events, [each.within(each.run.window[0], math.inf) for each in events]),
        crashes=_share(crashes, [hit[each.run.name] for each in crashes]),
        leads=tuple(_onset(each.run) - _first(each) for each in events if hit[each.run.name]),
        placebo=_mean(chances),
        p=at_least(sum(hit.values()), [_smoothed(k, n) for k, n, _ in chances]),
        placebo_early=_mean(chances_early),
        p_early=at_least(sum(early.values()), [_smoothed(k, n) for k, n, _ in chances_early]),
        twinned=sum(twins for _, _, twins in chances),
        per_1000_rows=_false(judged, false, [_quiet_rows(each.run) for each in judged]),
        per_1000_steps=_false(judged, false, [_quiet_steps(each.run) for each in judged]),
        healthy=_share(healthy, [bool(each.steps) for each in healthy]),
        transients=_share(transients, [each.stands for each in transients]),
        dead=_share(dead, [bool(each.steps) for each in dead]),
        dead_repeated=sum(len(each.steps) > 1 for each in dead),
    )


def _heard(run: Run, told: Told, level: Level, findings: bool) -> _Heard:
    given = told.findings if findings else told.alarms
    return _Heard(run, tuple(sorted(alarm.step for alarm in given if level(alarm))), told.critical_at_end)


def _onset(run: Run) -> float:
    assert run.onset is not None
    return run.onset


def _first(heard: _Heard) -> int:
    """The first alarm of the window of an event that was hit."""
    return heard.steps[bisect_left(heard.steps, heard.run.window[0])]


# What chance would have hit.


def _alarmed(event: Run, healthy: Sequence[_Heard], last: float) -> tuple[int, int, bool]:
    """Healthy runs that alarm from the beginning of the event's window to ``last``, of how many, and if of twins."""
    onset = _onset(event)
    reach = [each for each in healthy if each.run.steps and each.run.steps[-1] >= onset]
    twins = [each for each in reach if each.run.project == event.project and each.run.spacing == event.spacing]
    beside = twins if len(twins) >= TWINS else reach
    return sum(each.within(event.window[0], last) for each in beside), len(beside), len(twins) >= TWINS


def _smoothed(alarmed: int, of: int) -> float:
    return (alarmed + 0.5) / (of + 1)


def _mean(chances: Iterable[tuple[int, int, bool]]) -> float | None:
    """Mean share over the events that have any healthy run beside them."""
    shares = [k / n for k, n, _ in chances if n]
    return statistics.fmean(shares) if shares else None


# False alarms.


def _episodes(heard: _Heard) -> int:
    """Episodes of false alarms: an alarm up to 20 rows after an episode's first belongs to it."""
    last, count = -math.inf, 0
    for step in heard.steps:
        if step >= heard.run.quiet_before:
            break
        row = bisect_left(heard.run.steps, step)
        if row - last > JOINED_ROWS:
            last, count = row, count + 1
    return count


def _quiet_rows(run: Run) -> int:
    return bisect_left(run.steps, run.quiet_before)


def _quiet_steps(run: Run) -> float:
    """Steps of those rows: each row stands for the steps since the one before."""
    rows = _quiet_rows(run)
    return run.steps[rows - 1] - run.steps[0] + run.spacing if rows else 0.0


# Rates and their intervals.


def wilson(count: float, total: float) -> tuple[float, float]:
    """Interval of 95 % of a share of independent trials.

    >>> [round(edge, 3) for edge in wilson(0, 39)]
    [0.0, 0.09]
    """
    share, squared = count / total, Z * Z
    middle = (share + squared / (2 * total)) / (1 + squared / total)
    half = Z / (1 + squared / total) * math.sqrt(share * (1 - share) / total + squared / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def poisson(count: float, total: float, scale: float) -> tuple[float, float]:
    """Interval of 95 % of a rate of independent events (Garwood's).

    >>> [round(edge, 2) for edge in poisson(0, 1000, 1000.0)]
    [0.0, 3.69]
    """
    low = chi2.ppf(0.025, 2 * count) / 2 if count else 0.0
    return scale * float(low) / total, scale * float(chi2.ppf(0.975, 2 * count + 2)) / 2 / total


def share(projects: Sequence[str], counted: Sequence[bool]) -> Rate:
    """The share of runs, of these projects, that are counted."""
    count, total = sum(counted), len(counted)
    drawn = _drawn(projects, counted, [1] * total, 1.0)
    return Rate(count, total, 1.0, wilson(count, total) if total else None, drawn)


def _share(of: Sequence[_Heard], counted: Sequence[bool]) -> Rate:
    return share([each.run.project for each in of], counted)


def _false(of: Sequence[_Heard], counts: Sequence[float], totals: Sequence[float]) -> Rate:
    """Counts in 1000 of ``totals``."""
    count, total = sum(counts), sum(totals)
    drawn = _drawn([each.run.project for each in of], counts, totals, 1000.0)
    return Rate(count, total, 1000.0, poisson(count, total, 1000.0) if total else None, drawn)


def _drawn(
    projects: Sequence[str], counts: Sequence[float], totals: Sequence[float], scale: float
) -> tuple[float, float] | None:
    """Interval of 95 % of a rate over sets of as many projects, drawn with replacement.

    None with fewer than three projects, and where none or all are counted: draws of these know no other. The draws are
    the same every time.
    """
    names, count = sorted(set(projects)), sum(counts)
    if len(names) < 3 or count == 0 or (scale == 1.0 and count == sum(totals)):
        return None
    place = {name: i for i, name in enumerate(names)}
    sums = np.zeros((2, len(names)))
    for project, count, total in zip(projects, counts, totals, strict=True):
        sums[:, place[project]] += count, total
    drawn = sums[:, np.random.default_rng(0).integers(len(names), size=(DRAWS, len(names)))].sum(axis=2)
    rates = scale * drawn[0][drawn[1] > 0] / drawn[1][drawn[1] > 0]
    if not len(rates):
        return None
    low, high = np.percentile(rates, (2.5, 97.5))
    return float(low), float(high)
