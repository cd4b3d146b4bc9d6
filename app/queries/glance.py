"""All runs at a glance: state, pace, reward, entropy, alerts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import streamlit as st

from rlwatch.control.liveness import TAIL, Pace, pace_of
from rlwatch.errors import StoreError
from rlwatch.forecast import Forecast
from rlwatch.ports import Series
from rlwatch.records import Alert, RunInfo, RunState

from ..buckets import attempt_starts, sparkline, trend
from ..pauses import Pause, pause_of
from .curves import canonical_names
from .door import Version, store, store_url, version
from .foretold import newest_forecast
from .rows import alerts_by_run, commands

STILL_S = 5.0
"""Seconds without a step from which a run may be paused."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What the list of runs shows of one metric. ``points`` and ``bad``: see :func:`buckets.sparkline`."""

    value: float | None = None
    trend: str = ""
    points: tuple[tuple[float, float], ...] = ()
    bad: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Vitals:
    """A run at a glance."""

    pace: Pace
    reward: Glance
    entropy: Glance
    forecast: Forecast | None = None

    @property
    def step_s(self) -> float | None:
        """Median seconds a step."""
        return self.pace.step_s


@dataclass(frozen=True, slots=True)
class Fleet:
    """All runs with their vitals, the alerts and the pause of each, and why the unreadable ones cannot be read."""

    runs: tuple[RunInfo, ...]
    vitals: Mapping[str, Vitals]
    alerts: Mapping[str, Sequence[Alert]]
    unreadable: Mapping[str, str]
    pauses: Mapping[str, Pause] = field(default_factory=dict)


def fleet() -> Fleet:
    """Everything the list of runs needs."""
    source, now = store(), time.time()
    runs, vitals_of, broken = [], {}, dict(source.unreadable())
    paused: dict[str, Pause] = {}
    for run in source.runs():
        try:
            vitals_of[run.run_id] = vitals(run)
            pause = _pause(run, now)
        except StoreError as error:
            broken[run.run_id] = str(error)
        else:
            runs.append(run)
            if pause is not None:
                paused[run.run_id] = pause
    return Fleet(tuple(runs), vitals_of, alerts_by_run(), broken, paused)


def _pause(run: RunInfo, now: float) -> Pause | None:
    """Commands are read only of a live run that has been still for a while."""
    still = run.state is RunState.RUNNING and now - (run.last_ts or run.created_at) > STILL_S
    return pause_of(run, commands(run.run_id), now) if still else None


def vitals(run: RunInfo) -> Vitals:
    """The vitals of ``run``, cached until it moves on."""
    return _vitals(store_url(), version(run), run.source)


@st.cache_data(show_spinner=False, max_entries=2000)
def _vitals(url: str, version: Version, source: str) -> Vitals:  # noqa: ARG001  (url and version are the key)
    names = canonical_names(store().metric_names(version[0]), source)
    wanted = {c: names[c] for c in ("reward/mean", "policy/entropy") if c in names}
    series = store().series(version[0], list(wanted.values())) if wanted else {}
    starts = attempt_starts(list(series.values()))
    by_name: dict[str, Series] = {canonical: series[name] for canonical, name in wanted.items()}
    return Vitals(
        pace=pace_of(store().records(version[0], last=TAIL), source),
        reward=_glance(by_name.get("reward/mean"), starts),
        entropy=_glance(by_name.get("policy/entropy"), starts),
        forecast=newest_forecast(version[0]),
    )


def _glance(series: Series | None, starts: Mapping[int, int]) -> Glance:
    if series is None or not len(series.values):
        return Glance()
    drawn, bad = sparkline(series, dict(starts))
    points = tuple((x, y) for x, y in drawn)
    return Glance(float(series.values[-1]), trend(series.values), points, tuple(bad))
