"""Every read of the store that a page makes.

Everything returned is a snapshot; everything may raise ``StoreError``. Series and what is computed of them
are read again only when a run moved on (:func:`version`); small rows are read afresh.
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
    "dockets",
    "events",
    "extents",
    "far_out",
    "findings",
    "forecast_of_run",
    "forecast_record",
    "last_values",
    "localised",
    "metric_names",
    "newest_completions",
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


# The open store, and how far a run has come: what every cached read is keyed by.

DEFAULT_STORE = "./rlwatch-runs"

Version = tuple[str, int, int, float, str]
"""Run id, attempt, last step, its time, state."""


def store_url() -> str:
    """The store this app shows: ``RLWATCH_STORE``, set by ``rlwatch ui``."""
    return os.environ.get("RLWATCH_STORE") or DEFAULT_STORE


def store() -> Store:
    """The open store (one for all sessions). Raises ``StoreError`` where it cannot be opened."""
    return _opened(store_url())


@lru_cache(maxsize=16)
def _opened(url: str) -> Store:
    """Asked for by every read: what Streamlit does around its own caches would cost more than many of them."""
    return open_store(url)


def version(run: RunInfo) -> Version:
    """Changes whenever the run has new rows or another state."""
    return (run.run_id, run.attempt, run.last_step or 0, run.last_ts or 0.0, run.state.value)


# Small rows, read afresh at every look: runs, findings, events, commands, alerts, messages.


def run(run_id: str) -> RunInfo:
    """One run. Raises ``RunNotFoundError``."""
    return store().run(run_id)


def runs_by_id() -> dict[str, RunInfo]:
    """Run id -> run, of all that can be read and are not deleted."""
    return {run.run_id: run for run in store().runs()}


def findings(run_id: str) -> list[Finding]:
    """Published findings, in order."""
    return store().findings(run_id)


def told(run_id: str) -> list[Finding]:
    """Findings and that they eased or are over, in order of arrival."""
    return sorted((*findings(run_id), *store().recoveries(run_id)), key=arrival)


def events(run_id: str) -> list[Event]:
    """Events, in order."""
    return store().events(run_id)


def commands(run_id: str) -> list[Command]:
    """Commands, oldest first."""
    return store().commands(run_id)


def last_values(run_id: str) -> dict[str, tuple[int, float]]:
    """Metric -> (step, value) as last recorded."""
    return store().last_values(run_id)


def alerts(run_id: str | None = None) -> list[Alert]:
    """Alerts of one run or of all, newest first."""
    return store().alerts(run_id)


def alerts_by_run() -> dict[str, list[Alert]]:
    """Run id -> its alerts, newest first."""
    grouped: dict[str, list[Alert]] = {}
    for alert in alerts():
        grouped.setdefault(alert.run_id, []).append(alert)
    return grouped


def silences(now: float) -> list[Silence]:
    """Silences that last at ``now``, oldest first."""
    return [silence for silence in store().silences() if silence.until > now]


def policy() -> AlertingConfig:
    """The rules that apply here. Where ``rlwatch.toml`` cannot be read, the usual ones do."""
    try:
        return load_config(store_root=getattr(store(), "root", None)).policy
    except ConfigError:
        return AlertingConfig()


def dockets(now: float) -> list[IncidentRecord]:
    """Every incident, with who has it and who was told; the one that fired last first."""
    return incidents.dockets(store(), policy(), now, diagnose=lambda run: _diagnosed(store_url(), version(run)))


@st.cache_data(show_spinner=False, max_entries=500)
def _diagnosed(url: str, version: Version) -> Diagnosis:  # noqa: ARG001  (url and version are the key)
    return diagnosis(store().run(version[0]))


# A run's series, thinned for the screen: whole series are large, what is drawn of them is not.

BUCKETS = 240
"""Two points a bucket are about one a pixel of a panel a third of the page wide."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A metric over a whole run: how many rows it has, its lowest and highest value, and whether all were finite."""

    rows: int = 0
    low: float = math.inf
    high: float = -math.inf
    finite: bool = True

    @property
    def level(self) -> float | None:
        """The one value there ever was (of at least 3), else None."""
        return self.low if self.rows >= 3 and self.finite and self.low == self.high else None

    def grown(self, values: np.ndarray) -> Extent:
        """With more values (N,)."""
        if not len(values):
            return self
        finite = values[np.isfinite(values)]
        low, high = float(finite.min(initial=self.low)), float(finite.max(initial=self.high))
        return Extent(self.rows + len(values), low, high, self.finite and len(finite) == len(values))


@dataclass(frozen=True, slots=True)
class Outline:
    """First step of every attempt, and first and last step of all of them.

    A resumed run may not have come as far yet as the attempt before it.
    """

    starts: Mapping[int, int]
    first: int
    last: int


def metric_names(run: RunInfo) -> list[str]:
    """Every metric name of the run, sorted."""
    return _metric_names(store_url(), version(run))


@st.cache_data(show_spinner=False, max_entries=200)
def _metric_names(url: str, version: Version) -> list[str]:  # noqa: ARG001  (url and version are the key)
    return store().metric_names(version[0])


def canonical_names(names: Sequence[str], source: str) -> dict[str, str]:
    """Canonical name -> the source name it is best read from."""
    return canonicalise(dict.fromkeys(names, 0.0), source)[1]


REFRESH_SHARE = 200
"""What needs every row of a long run is computed again once the run is one part in so many longer."""


@dataclass(slots=True)
class _Grown:
    """Extents of a run's metrics, as far as they are known: up to the record ``seq``."""

    seq: int = 0
    extents: dict[str, Extent] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


def extents(run: RunInfo) -> Mapping[str, Extent]:
    """Every metric over the whole run, by source name; later looks read what is new."""
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
    # Of so few places only extremes come. What is read after this, and again at the next look, changes none.
    first = source.series(version[0], new, points=1) if new else {}
    for name, one in (*later.items(), *first.items()):
        known[name] = known.get(name, Extent()).grown(one.values)
    grown.seq = max((int(one.seqs.max(initial=0)) for one in (later or first).values()), default=0) or grown.seq
    return dict(known)


def outline(run: RunInfo) -> Outline:
    """First and last step of the run's attempts."""
    return _outline(store_url(), version(run))


@st.cache_data(show_spinner=False, max_entries=200)
def _outline(url: str, version: Version) -> Outline:  # noqa: ARG001  (url and version are the key)
    spans = store().spans(version[0])
    starts = {attempt: low for attempt, (low, _) in spans.items()}
    last = max((high for _, high in spans.values()), default=0)
    return Outline(starts, min(starts.values(), default=0), max(last, version[2]))


def traces(run: RunInfo, window: tuple[int, int], names: Sequence[str]) -> dict[str, Branches]:
    """Lines of ``names`` over the steps of ``window``, by source name."""
    return _traces(store_url(), version(run), tuple(names), window)


@st.cache_data(show_spinner=False, max_entries=50)
def _traces(url: str, version: Version, names: tuple[str, ...], window: tuple[int, int]) -> dict[str, Branches]:
    starts = dict(_outline(url, version).starts)
    seen = store().series(version[0], names, steps=window, points=BUCKETS)
    return {name: branches(one, starts, window, BUCKETS) for name, one in seen.items()}


def whole(run: RunInfo, names: Sequence[str]) -> Mapping[str, Series]:
    """Whole series of ``names``, shared and not to be changed."""
    return _whole(store_url(), version(run), tuple(names))


@st.cache_resource(show_spinner=False, max_entries=3)
def _whole(url: str, version: Version, names: tuple[str, ...]) -> dict[str, Series]:  # noqa: ARG001
    """Whole series, shared and not to be changed; few are kept: 100 000 steps of 50 metrics are 160 MB."""
    return store().series(version[0], names)


# Forecasts of a run: the newest one whole, all of them as lines.

RISK = "forecast/risk"
NAMES = ("forecast/p20", "forecast/p50", "forecast/p100", RISK)


@dataclass(frozen=True, slots=True)
class RunForecasts:
    """``newest`` may be without a number, and then says why; ``highest`` p50 and its step over all that count.

    ``traces``: by name, over the window; the risk alone where no chance was given, empty where nothing was forecast.
    """

    newest: Forecast
    highest: tuple[float, int] | None
    traces: Mapping[str, Branches]


def run_forecasts(run: RunInfo, window: tuple[int, int]) -> RunForecasts | None:
    """Forecasts of ``run``; None if nobody ever tried."""
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
    """The highest chance within 50 steps there ever was, and its step."""
    series = store().series(version[0], ("forecast/p50",), points=1)["forecast/p50"]
    if not len(series.steps):
        return None
    at = int(np.argmax(series.values))
    return float(series.values[at]), int(series.steps[at])


def newest_forecast(run_id: str) -> Forecast | None:
    """The newest, or why there is none; None if nobody ever tried."""
    kept = store().forecasts(run_id, last=1)
    return forecast_of(kept[-1]) if kept else None


MOST_RECORDED = 300
"""Runs whose past forecasts are looked at, the newest."""


def forecast_record() -> tuple[Record, int]:
    """Past forecasts of the newest runs, and how many older runs are left out."""
    every = store().runs()
    kept = (forecast_of_run(run) for run in every[:MOST_RECORDED])
    return gathered(each for each in kept if each is not None), max(0, len(every) - MOST_RECORDED)


def forecast_of_run(run: RunInfo) -> RunRecord | None:
    """Past forecasts of one run, with the answers of people; None where nothing was forecast, or it cannot be read."""
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
    """A run at a glance: its pace, last values by canonical name (or the trainer's, where there is none), the source
    names they were read from, its newest forecast where one may be shown, and its state.
    """

    pace: Pace
    values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    forecast: Forecast | None = None
    verdict: Verdict = field(default_factory=lambda: verdict_of((), {}))

    @property
    def step_s(self) -> float | None:
        """Median seconds a step."""
        return self.pace.step_s


RESTED_S = 300.0
"""Seconds for which the verdict on a run that ended is kept: whoever looks after the store may judge its last rows."""


def vitals(run: RunInfo) -> Vitals:
    """The vitals of ``run``, kept until it moves on."""
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
    """Name to show -> name as logged: canonical ones, and those that are none; runs of one trainer share them."""
    canonical = canonical_names(names, source)
    read = set(canonical.values())
    return {**canonical, **{name: name for name in names if name not in read and not name.startswith("forecast/")}}


# Tokens of a run: the steps that were localised, and the rows of one step.

MOST_BATCHES = 300
"""Batches read at most for a list of steps, the newest: some 50 ms of a large run."""

NORM = "optim/grad_norm"


def localised(run_id: str) -> list[Event]:
    """Events of localised steps, in order."""
    return [event for event in store().events(run_id) if event.kind == LOCALISED]


def culprits(run_id: str) -> list[SpikeBatch]:
    """The newest batches of culprits, by step."""
    return store().spikes(run_id, last=MOST_BATCHES, reason=CULPRITS)


def far_out(run_id: str) -> list[SpikeBatch]:
    """The newest batches of far-out tokens, and of tokens of steps that were not finite."""
    source = store()
    return [
        batch for reason in (FAR_OUT, NON_FINITE) for batch in source.spikes(run_id, last=MOST_BATCHES, reason=reason)
    ]


def of_step(run_id: str, step: int) -> list[SpikeBatch]:
    """Everything recorded of the tokens of a step, in all attempts."""
    return store().spikes(run_id, step=step)


def usual_norm(run: RunInfo) -> float | None:
    """Median gradient norm of the run, of the steps where it was finite."""
    name = canonical_names(metric_names(run), run.source).get(NORM)
    if name is None:
        return None
    values = whole(run, (name,))[name].values
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


# Completions of a run: text, so few runs are kept at once, and read again only where there are more.

Newest = tuple[int, int, int, float, int]


def newest_completions(run_id: str) -> CompletionBatch | None:
    """The completions that were recorded last, if any were."""
    return next(iter(store().completions(run_id, last=1)), None)


def completions(run_id: str) -> list[Row]:
    """Every recorded completion as a row, newest step first; shared, and not to be changed."""
    last = newest_completions(run_id)
    if last is None:
        return []
    return _completions(store_url(), run_id, (last.attempt, last.step, last.rank, last.ts, len(last)))


@st.cache_resource(show_spinner=False, max_entries=2)
def _completions(url: str, run_id: str, newest: Newest) -> list[Row]:  # noqa: ARG001  (url and newest are the key)
    return completion_rows(store().completions(run_id))


# The likely cause of a run's trouble, and its post-mortem.


def diagnosis(run: RunInfo) -> Diagnosis:
    """Of all that was found and happened so far."""
    last = run.last_step or 0
    told_of = (len(told(run.run_id)), len(events(run.run_id)))
    return _diagnosis(
        store_url(), run.run_id, (run.attempt, run.state.value, last // max(1, last // REFRESH_SHARE), *told_of)
    )


@st.cache_data(show_spinner=False, max_entries=200)
def _diagnosis(url: str, run_id: str, key: tuple[object, ...]) -> Diagnosis:  # noqa: ARG001  (url and key are the key)
    return stored_diagnosis(store(), store().run(run_id))


def verdict(run: RunInfo) -> Verdict:
    """The state of the run with its sentence."""
    return stored_verdict(store(), run, gone=dead_since(run, time.time()) is not None)


def headline(run: RunInfo) -> str:
    """The run in one sentence: state, what broke, cause, next action."""
    return headline_of(verdict(run), diagnosis(run))


def report(run_id: str) -> str:
    """The post-mortem as one HTML file."""
    from rlwatch.report import facts_of_run, html

    return html(facts_of_run(store(), run_id, now=time.time()))
