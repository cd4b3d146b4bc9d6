"""The only door from the pages to the store: reads, cached by how far a run has come.

A run's series are read again only when the run moved on (:func:`version`); commands, alerts and messages
are small and are read afresh. Everything returned is a snapshot. All may raise ``StoreError``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import streamlit as st

from rlwatch.errors import StoreError
from rlwatch.metrics import canonicalise
from rlwatch.ports import Series, Store
from rlwatch.records import Alert, Command, Event, Finding, OutboxMessage, RunInfo
from rlwatch.store.url import open_store

from .buckets import attempt_starts, sparkline, trend

DEFAULT_STORE = "./rlwatch-runs"
TAIL = 64
"""So many of the newest rows tell a run's usual step time."""

Version = tuple[str, int, int, float, str]


def store_url() -> str:
    """The store this app shows: ``RLWATCH_STORE``, set by ``rlwatch ui``."""
    return os.environ.get("RLWATCH_STORE") or DEFAULT_STORE


def store() -> Store:
    """The open store (one for all sessions). Raises ``StoreError`` where it cannot be opened."""
    return _opened(store_url())


@st.cache_resource(show_spinner=False)
def _opened(url: str) -> Store:
    return open_store(url)


def version(run: RunInfo) -> Version:
    """Changes whenever the run has new rows or another state."""
    return (run.run_id, run.attempt, run.last_step or 0, run.last_ts or 0.0, run.state.value)


@dataclass(frozen=True, slots=True)
class Glance:
    """What the list of runs shows of one metric. ``points`` and ``bad``: see :func:`buckets.sparkline`."""

    value: float | None = None
    trend: str = ""
    points: tuple[tuple[float, float], ...] = ()
    bad: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Vitals:
    """A run at a glance; ``step_s`` is its median step time in seconds."""

    step_s: float | None
    reward: Glance
    entropy: Glance


@dataclass(frozen=True, slots=True)
class Fleet:
    """All runs with their vitals, the alerts of each, and why the unreadable ones cannot be read."""

    runs: tuple[RunInfo, ...]
    vitals: Mapping[str, Vitals]
    alerts: Mapping[str, Sequence[Alert]]
    unreadable: Mapping[str, str]


def fleet() -> Fleet:
    """Everything the list of runs needs."""
    source = store()
    runs, vitals_of, broken = [], {}, dict(source.unreadable())
    for run in source.runs():
        try:
            vitals_of[run.run_id] = vitals(run)
        except StoreError as error:
            broken[run.run_id] = str(error)
        else:
            runs.append(run)
    return Fleet(tuple(runs), vitals_of, alerts_by_run(), broken)


def vitals(run: RunInfo) -> Vitals:
    """The vitals of ``run``, cached until it moves on."""
    return _vitals(store_url(), version(run), run.source)


@st.cache_data(show_spinner=False, max_entries=2000)
def _vitals(url: str, version: Version, source: str) -> Vitals:  # noqa: ARG001  (url and version are the key)
    names = canonical_names(store().metric_names(version[0]), source)
    wanted = {c: names[c] for c in ("reward/mean", "policy/entropy", "time/step") if c in names}
    series = store().series(version[0], list(wanted.values())) if wanted else {}
    starts = attempt_starts(list(series.values()))
    by_name: dict[str, Series] = {canonical: series[name] for canonical, name in wanted.items()}
    return Vitals(
        step_s=_step_seconds(version[0], by_name),
        reward=_glance(by_name.get("reward/mean"), starts),
        entropy=_glance(by_name.get("policy/entropy"), starts),
    )


def canonical_names(names: Sequence[str], source: str) -> dict[str, str]:
    """Canonical name -> the source name it is best read from."""
    return canonicalise(dict.fromkeys(names, 0.0), source)[1]


def _glance(series: Series | None, starts: Mapping[int, int]) -> Glance:
    if series is None or not len(series.values):
        return Glance()
    drawn, bad = sparkline(series, dict(starts))
    points = tuple((x, y) for x, y in drawn)
    return Glance(float(series.values[-1]), trend(series.values), points, tuple(bad))


def _step_seconds(run_id: str, by_name: Mapping[str, Series]) -> float | None:
    """Median seconds a step, from the newest rows' times, else from what the trainer measured."""
    last = max((int(s.seqs[-1]) for s in by_name.values() if len(s.seqs)), default=0)
    rows = store().records(run_id, after_seq=max(0, last - TAIL))
    measured = [
        (b.ts - a.ts) / (b.step - a.step)
        for a, b in pairwise(rows)
        if b.step > a.step and b.ts > a.ts and a.attempt == b.attempt
    ]
    if not measured and "time/step" in by_name:
        measured = [v for v in by_name["time/step"].values[-TAIL:].tolist() if np.isfinite(v)]
    return float(np.median(measured)) if measured else None


def run(run_id: str) -> RunInfo:
    """One run. Raises ``RunNotFoundError``."""
    return store().run(run_id)


def runs_by_id() -> dict[str, RunInfo]:
    """Run id -> run, of all that can be read."""
    return {run.run_id: run for run in store().runs()}


def metric_names(run: RunInfo) -> list[str]:
    """Every metric name of the run, sorted."""
    return _metric_names(store_url(), version(run))


@st.cache_data(show_spinner=False, max_entries=200)
def _metric_names(url: str, version: Version) -> list[str]:  # noqa: ARG001
    return store().metric_names(version[0])


def series(run: RunInfo, names: Sequence[str]) -> dict[str, Series]:
    """Whole series of ``names``, cached until the run moves on."""
    return _series(store_url(), version(run), tuple(names))


@st.cache_data(show_spinner=False, max_entries=64)
def _series(url: str, version: Version, names: tuple[str, ...]) -> dict[str, Series]:  # noqa: ARG001
    return store().series(version[0], names)


def known_series(run: RunInfo) -> dict[str, Series]:
    """The series the metric table knows, by source name."""
    return series(run, sorted(canonical_names(metric_names(run), run.source).values()))


def extent(run: RunInfo) -> tuple[int, int]:
    """First and last step of all attempts: a resumed run may not have come as far as the one before."""
    spans = [(int(s.steps.min()), int(s.steps.max())) for s in known_series(run).values() if len(s.steps)]
    last = max((high for _, high in spans), default=0)
    return min((low for low, _ in spans), default=0), max(last, run.last_step or 0)


def findings(run_id: str) -> list[Finding]:
    """Published findings, in order."""
    return store().findings(run_id)


def events(run_id: str) -> list[Event]:
    """Events, in order."""
    return store().events(run_id)


def commands(run_id: str) -> list[Command]:
    """Commands, oldest first."""
    return store().commands(run_id)


def alerts(run_id: str | None = None) -> list[Alert]:
    """Alerts of one run or of all, newest first."""
    return store().alerts(run_id)


def alerts_by_run() -> dict[str, list[Alert]]:
    """Run id -> its alerts, newest first."""
    grouped: dict[str, list[Alert]] = {}
    for alert in store().alerts():
        grouped.setdefault(alert.run_id, []).append(alert)
    return grouped


def outbox() -> list[OutboxMessage]:
    """Messages to the outside, oldest first."""
    return store().outbox()
