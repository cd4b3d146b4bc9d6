"""All reads of the store for the pages.

All functions return snapshots and may raise ``StoreError``. Series and results computed from them are read again only
when a run has new rows (:func:`version`); small rows are read on every call.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock

import numpy as np
import streamlit as st

from rlwatch.alerts import incidents
from rlwatch.alerts.config import load_config
from rlwatch.alerts.incidents import IncidentRecord
from rlwatch.alerts.rules import AlertingConfig
from rlwatch.control.liveness import TAIL, Pace, dead_since, pace_of
from rlwatch.diagnosis import Diagnosis
from rlwatch.errors import ConfigError, StoreError
from rlwatch.forecast import Forecast
from rlwatch.forecast.forecast import forecast_of
from rlwatch.forecast.record import Record, RunRecord, gathered, record_of_run
from rlwatch.metrics import canonicalise
from rlwatch.ports import Series, Store
from rlwatch.records import (
    CULPRITS,
    FAR_OUT,
    LOCALISED,
    NON_FINITE,
    Alert,
    Command,
    CompletionBatch,
    Event,
    Finding,
    RunInfo,
    RunState,
    Silence,
    SpikeBatch,
)
from rlwatch.rollouts import Row, completion_rows
from rlwatch.state import Verdict, arrival, forecast_allowed, headline_of, verdict_of
from rlwatch.step_notes import StepNote, step_notes
from rlwatch.store.url import open_store
from rlwatch.view import stored_diagnosis, stored_verdict

from .thinning import Branches, branches

__all__ = [
    "Extent",
    "Outline",
    "RunForecasts",
    "Vitals",
    "alerts",
    "alerts_by_run",
    "canonical_names",
    "commands",
    "completions",
    "culprits",
    "diagnosis",
    "events",
    "extents",
    "far_out",
    "findings",
    "forecast_of_run",
    "forecast_record",
    "incident_records",
    "last_values",
    "localised",
    "metric_names",
    "newest_completions",
    "notes",
    "of_step",
    "outline",
    "policy",
    "report",
    "run",
    "run_forecasts",
    "runs_by_id",
    "silences",
    "store",
    "store_url",
    "traces",
    "usual_norm",
    "vitals",
]


# The open store, and the version of a run, which is the key of every cached read.

DEFAULT_STORE = "./rlwatch-runs"

Version = tuple[str, int, int, float, str]
"""Key for a state of a run: run id, attempt, last step, time of that, state."""


def store_url() -> str:
    """Return the URL of the dashboard's store: ``RLWATCH_STORE``, which ``rlwatch ui`` sets."""
    return os.environ.get("RLWATCH_STORE") or DEFAULT_STORE


def store() -> Store:
    """Return the open store, shared by all sessions. Raises ``StoreError`` if it cannot be opened."""
    return _opened(store_url())


@lru_cache(maxsize=16)
def _opened(url: str) -> Store:
    """Open the store, cached by ``lru_cache``: Streamlit's own caches would take longer than many reads."""
    return open_store(url)


def version(run: RunInfo) -> Version:
    """Return a key that changes whenever the run has new rows or another state."""
    return (run.run_id, run.attempt, run.last_step or 0, run.last_ts or 0.0, run.state.value)


# Small rows, read on every call: runs, findings, events, commands, alerts, messages.


def run(run_id: str) -> RunInfo:
    """Return the description of one run. Raises ``RunNotFoundError``."""
    return store().run(run_id)


def runs_by_id() -> dict[str, RunInfo]:
    """Return all readable runs that are not deleted, by run id."""
    return {run.run_id: run for run in store().runs()}


def findings(run_id: str) -> list[Finding]:
    """Return the published findings of a run, in order."""
    return store().findings(run_id)


def findings_and_updates(run_id: str) -> list[Finding]:
    """Return the findings of a run and their updates (eased, resolved), in order of arrival."""
    return sorted((*findings(run_id), *store().recoveries(run_id)), key=arrival)


def events(run_id: str) -> list[Event]:
    """Return the events of a run, in order."""
    return store().events(run_id)


def commands(run_id: str) -> list[Command]:
    """Return the commands sent to a run, oldest first."""
    return store().commands(run_id)


def notes(run_id: str) -> list[StepNote]:
    """Return users' notes at steps of a run, in order of step."""
    return step_notes(store(), run_id)


def last_values(run_id: str) -> dict[str, tuple[int, float]]:
    """Return the last step and value of each metric of a run."""
    return store().last_values(run_id)


def alerts(run_id: str | None = None) -> list[Alert]:
    """Return the alerts of one run, or of all runs if ``run_id`` is None, newest first."""
    return store().alerts(run_id)


def alerts_by_run() -> dict[str, list[Alert]]:
    """Return the alerts of each run by run id, newest first."""
    grouped: dict[str, list[Alert]] = {}
    for alert in alerts():
        grouped.setdefault(alert.run_id, []).append(alert)
    return grouped


def silences(now: float) -> list[Silence]:
    """Return the silences that are active at ``now`` (Unix seconds), oldest first."""
    return [silence for silence in store().silences() if silence.until > now]


def policy() -> AlertingConfig:
    """Return the alerting rules in force, or the default ones if ``rlwatch.toml`` cannot be read."""
    try:
        return load_config(store_root=getattr(store(), "root", None)).policy
    except ConfigError:
        return AlertingConfig()


def incident_records(now: float) -> list[IncidentRecord]:
    """Return all incidents with assignee and notifications at ``now`` (Unix seconds), the one that fired last first."""
    return incidents.incident_records(
        store(), policy(), now, diagnose=lambda run: _diagnosed(store_url(), version(run))
    )


@st.cache_data(show_spinner=False, max_entries=500)
def _diagnosed(url: str, version: Version) -> Diagnosis:  # noqa: ARG001  (url and version are the key)
    return diagnosis(store().run(version[0]))


# A run's series, thinned for the screen.

WHOLE = 2000
"""Most steps of which a chart has every row, so that a zoom needs none of the server's."""
BUCKETS = 240
"""Buckets of a chart. With two points each they give about one point per pixel of a third of the page's width."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a metric over a whole run: number of rows, lowest and highest value; ``finite``: whether all values are
    finite.
    """

    rows: int = 0
    low: float = math.inf
    high: float = -math.inf
    finite: bool = True

    @property
    def level(self) -> float | None:
        """Value of a metric that is constant over at least 3 rows, else None."""
        return self.low if self.rows >= 3 and self.finite and self.low == self.high else None

    def grown(self, values: np.ndarray) -> Extent:
        """Return the extent extended by further ``values`` (N,)."""
        if not len(values):
            return self
        finite = values[np.isfinite(values)]
        low, high = float(finite.min(initial=self.low)), float(finite.max(initial=self.high))
        return Extent(self.rows + len(values), low, high, self.finite and len(finite) == len(values))


@dataclass(frozen=True, slots=True)
class Outline:
    """First step of every attempt of a run, and first and last step of all attempts.

    A resumed run may not have reached the last step of the attempt before it.
    """

    starts: Mapping[int, int]
    first: int
    last: int


def metric_names(run: RunInfo) -> list[str]:
    """Return all metric names of the run, sorted."""
    return _metric_names(store_url(), version(run))


@st.cache_data(show_spinner=False, max_entries=200)
def _metric_names(url: str, version: Version) -> list[str]:  # noqa: ARG001  (url and version are the key)
    return store().metric_names(version[0])


def canonical_names(names: Sequence[str], source: str) -> dict[str, str]:
    """Return, for each canonical metric name, the best of the trainer's ``names`` for it; ``source`` is the trainer."""
    return canonicalise(dict.fromkeys(names, 0.0), source)[1]


REFRESH_SHARE = 200
"""Results that need every row of a long run are computed again once it has grown by one part in this many."""


@dataclass(slots=True)
class _Grown:
    """Extents of a run's metrics, up to the record ``seq``."""

    seq: int = 0
    extents: dict[str, Extent] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


def extents(run: RunInfo) -> Mapping[str, Extent]:
    """Return the extent of each metric over the whole run, by the trainer's name; later calls read only new rows."""
    grown = _grown(store_url(), run.run_id, run.created_at)
    with grown.lock:
        return _extents(grown, store_url(), version(run))


@st.cache_resource(show_spinner=False, max_entries=200)
def _grown(url: str, run_id: str, created_at: float) -> _Grown:  # noqa: ARG001  (the key)
    return _Grown()


def _extents(grown: _Grown, url: str, version: Version) -> Mapping[str, Extent]:
    known, names, source = grown.extents, _metric_names(url, version), store()
    new = [name for name in names if name not in known]
    later = source.series(version[0], list(known), after_seq=grown.seq) if known else {}
    # With so few points only extremes are returned. Reading a row twice, now and at the next call, changes none.
    first = source.series(version[0], new, points=1) if new else {}
    for name, one in (*later.items(), *first.items()):
        known[name] = known.get(name, Extent()).grown(one.values)
    grown.seq = max((int(one.seqs.max(initial=0)) for one in (later or first).values()), default=0) or grown.seq
    return dict(known)


def outline(run: RunInfo) -> Outline:
    """Return the first and last step of the run, and the first step of each attempt."""
    return _outline(store_url(), version(run))


@st.cache_data(show_spinner=False, max_entries=200)
def _outline(url: str, version: Version) -> Outline:  # noqa: ARG001  (url and version are the key)
    spans = store().spans(version[0])
    starts = {attempt: low for attempt, (low, _) in spans.items()}
    last = max((high for _, high in spans.values()), default=0)
    return Outline(starts, min(starts.values(), default=0), max(last, version[2]))


def traces(run: RunInfo, window: tuple[int, int], names: Sequence[str]) -> dict[str, Branches]:
    """Return the lines of the metrics ``names`` over the steps of ``window`` (both ends included), by the trainer's
    name.
    """
    return _traces(store_url(), version(run), tuple(names), window)


@st.cache_data(show_spinner=False, max_entries=50)
def _traces(url: str, version: Version, names: tuple[str, ...], window: tuple[int, int]) -> dict[str, Branches]:
    starts, buckets = dict(_outline(url, version).starts), WHOLE // 2 if is_whole(window) else BUCKETS
    seen = store().series(version[0], names, steps=window, points=buckets)
    return {name: branches(one, starts, window, buckets) for name, one in seen.items()}


def is_whole(window: tuple[int, int]) -> bool:
    """Return True if charts of the steps of ``window`` have every row, not two of each bucket."""
    return window[1] - window[0] < WHOLE


def whole(run: RunInfo, names: Sequence[str]) -> Mapping[str, Series]:
    """Return the whole series of the metrics ``names``; they are shared, so callers must not change them."""
    return _whole(store_url(), version(run), tuple(names))


@st.cache_resource(show_spinner=False, max_entries=3)
def _whole(url: str, version: Version, names: tuple[str, ...]) -> dict[str, Series]:  # noqa: ARG001
    """Read whole series, which are shared. Few are cached, because 100 000 steps of 50 metrics take 160 MB."""
    return store().series(version[0], names)


# Forecasts of a run: the newest one in full, all of them as lines.

RISK = "forecast/risk"
NAMES = ("forecast/p20", "forecast/p50", "forecast/p100", RISK)


@dataclass(frozen=True, slots=True)
class RunForecasts:
    """Forecasts of a run.

    ``newest`` may have no number, and then holds the reason. ``highest``: the highest p50 of the current branch and its
    step. ``traces``: lines by name over the window; the risk alone if no probabilities were given, empty without
    forecasts.
    """

    newest: Forecast
    highest: tuple[float, int] | None
    traces: Mapping[str, Branches]


def run_forecasts(run: RunInfo, window: tuple[int, int]) -> RunForecasts | None:
    """Return the forecasts of a run, with lines over the steps of ``window``; None if none was attempted."""
    newest = newest_forecast(run.run_id)
    if newest is None:
        return None
    names = metric_names(run)
    highest = _highest(store_url(), version(run)) if "forecast/p50" in names else None
    if highest is None:
        return RunForecasts(newest, None, traces(run, window, (RISK,)) if RISK in names else {})
    return RunForecasts(newest, highest, traces(run, window, NAMES))


@st.cache_data(show_spinner=False, max_entries=200)
def _highest(url: str, version: Version) -> tuple[float, int] | None:  # noqa: ARG001  (url and version are the key)
    """Return the highest chance within 50 steps so far, and its step."""
    series = store().series(version[0], ("forecast/p50",), points=1)["forecast/p50"]
    if not len(series.steps):
        return None
    at = int(np.argmax(series.values))
    return float(series.values[at]), int(series.steps[at])


def newest_forecast(run_id: str) -> Forecast | None:
    """Return the newest forecast of a run, or the reason for its absence; None if none was attempted."""
    kept = store().forecasts(run_id, last=1)
    return forecast_of(kept[-1]) if kept else None


MOST_RECORDED = 300
"""Most runs in the record of forecasts, the newest ones."""


def forecast_record() -> tuple[Record, int]:
    """Return past forecasts of the newest runs, and the number of older runs left out."""
    every = store().runs()
    kept = (forecast_of_run(run) for run in every[:MOST_RECORDED])
    return gathered(each for each in kept if each is not None), max(0, len(every) - MOST_RECORDED)


def forecast_of_run(run: RunInfo) -> RunRecord | None:
    """Return past forecasts of one run with users' answers; None without forecasts, or if they cannot be read."""
    try:
        answers = tuple((each.attempt, each.step, each.at) for each in store().forecast_answers(run.run_id))
        return _forecast_of_run(store_url(), version(run), answers)
    except StoreError:
        return None


@st.cache_data(show_spinner=False, max_entries=1000)
def _forecast_of_run(url: str, version: Version, answers: tuple[object, ...]) -> RunRecord | None:  # noqa: ARG001
    return record_of_run(store(), store().run(version[0]))


# A run at a glance.


@dataclass(frozen=True, slots=True)
class Vitals:
    """Short summary of a run: pace, last values, names read, newest forecast (if one may be shown), and state.

    ``values`` are by canonical name (or the trainer's, if there is none), ``sources`` the trainer's names of these.
    """

    pace: Pace
    values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    forecast: Forecast | None = None
    verdict: Verdict = field(default_factory=lambda: verdict_of((), {}))

    @property
    def step_s(self) -> float | None:
        """Median duration of a step in seconds; None if unknown."""
        return self.pace.step_s


RESTED_S = 300.0
"""Seconds for which the verdict on an ended run is cached: a background service may still judge its last rows."""


def vitals(run: RunInfo) -> Vitals:
    """Return the summary of a run, cached until it has new rows."""
    kept, now = _kept_vitals(store_url()), time.monotonic()
    known, at = kept.get(run.run_id), (version(run), dead_since(run, time.time()) is not None)
    if known is None or known[0] != at or now - known[1] > RESTED_S:
        known = kept[run.run_id] = (at, now, _read_vitals(run))
    return known[2]


@lru_cache(maxsize=4)
def _kept_vitals(url: str) -> dict[str, tuple[tuple[Version, bool], float, Vitals]]:  # noqa: ARG001
    return {}


def _read_vitals(run: RunInfo) -> Vitals:
    source, lives = store(), run.state is RunState.RUNNING
    with source.at_once(run.run_id):
        last = source.last_values(run.run_id)
        newest = source.records(run.run_id, last=TAIL) if lives else ()
        verdict_ = verdict(run)
        forecast = newest_forecast(run.run_id) if forecast_allowed(verdict_) else None
    sources = _sources(tuple(last), run.source)
    values = {name: last[at][1] for name, at in sources.items()}
    return Vitals(pace_of(newest, run.source), values, sources, forecast, verdict_)


@lru_cache(maxsize=1000)
def _sources(names: tuple[str, ...], source: str) -> Mapping[str, str]:
    """Map each displayed name, canonical where there is one, to the logged name; shared by runs of one trainer."""
    canonical = canonical_names(names, source)
    read = set(canonical.values())
    return {**canonical, **{name: name for name in names if name not in read and not name.startswith("forecast/")}}


# Tokens of a run: the localised steps, and the rows of one step.

MOST_BATCHES = 300
"""Most batches read for a list of steps, the newest ones: some 50 ms for a large run."""

NORM = "optim/grad_norm"


def localised(run_id: str) -> list[Event]:
    """Return the events of the steps of a run whose gradient spike was localised to tokens, in order."""
    return [event for event in store().events(run_id) if event.kind == LOCALISED]


def culprits(run_id: str) -> list[SpikeBatch]:
    """Return the newest batches of culprit tokens (those that dominate a gradient spike) of a run, by step."""
    return store().spikes(run_id, last=MOST_BATCHES, reason=CULPRITS)


def far_out(run_id: str) -> list[SpikeBatch]:
    """Return the newest batches of outlier tokens of a run, and of tokens of steps that were not finite."""
    source = store()
    return [
        batch for reason in (FAR_OUT, NON_FINITE) for batch in source.spikes(run_id, last=MOST_BATCHES, reason=reason)
    ]


def of_step(run_id: str, step: int) -> list[SpikeBatch]:
    """Return all token records of a step of a run, of all attempts."""
    return store().spikes(run_id, step=step)


def usual_norm(run: RunInfo) -> float | None:
    """Return the median of the run's finite gradient norms; None without any."""
    name = canonical_names(metric_names(run), run.source).get(NORM)
    if name is None:
        return None
    values = whole(run, (name,))[name].values
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


# Completions of a run. Texts are large, so few runs are cached; a run is read again only if it has new ones.

Newest = tuple[int, int, int, float, int]


def newest_completions(run_id: str) -> CompletionBatch | None:
    """Return the completions of a run that were recorded last, or None."""
    return next(iter(store().completions(run_id, last=1)), None)


def completions(run_id: str) -> list[Row]:
    """Return all recorded completions as rows, newest step first; they are shared, so callers must not change them."""
    last = newest_completions(run_id)
    if last is None:
        return []
    return _completions(store_url(), run_id, (last.attempt, last.step, last.rank, last.ts, len(last)))


@st.cache_resource(show_spinner=False, max_entries=2)
def _completions(url: str, run_id: str, newest: Newest) -> list[Row]:  # noqa: ARG001  (url and newest are the key)
    return completion_rows(store().completions(run_id))


# The likely cause of a run's failure, and its post-mortem.


def diagnosis(run: RunInfo) -> Diagnosis:
    """Return the diagnosis of a run from all its findings and events so far."""
    last = run.last_step or 0
    key = (len(findings_and_updates(run.run_id)), len(events(run.run_id)))
    return _diagnosis(
        store_url(), run.run_id, (run.attempt, run.state.value, last // max(1, last // REFRESH_SHARE), *key)
    )


@st.cache_data(show_spinner=False, max_entries=200)
def _diagnosis(url: str, run_id: str, key: tuple[object, ...]) -> Diagnosis:  # noqa: ARG001  (url and key are the key)
    return stored_diagnosis(store(), store().run(run_id))


def verdict(run: RunInfo) -> Verdict:
    """Return the state of a run with its explanation."""
    return stored_verdict(store(), run, gone=dead_since(run, time.time()) is not None)


def headline(run: RunInfo) -> str:
    """Return one sentence on a run: state, failure, cause, next action."""
    return headline_of(verdict(run), diagnosis(run))


def report(run_id: str) -> str:
    """Return the post-mortem of a run as one HTML file."""
    from rlwatch.report import facts_of_run, html

    return html(facts_of_run(store(), run_id, now=time.time()))
