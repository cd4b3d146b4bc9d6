"""Data of the list of runs: state, sparklines (small curves), groups and order of all runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from rlwatch.compare.alignment import attempt_starts
from rlwatch.curation import SearchDocument, SearchQuery, facts_of
from rlwatch.errors import StoreError
from rlwatch.records import Alert, AlertState, RunInfo, RunState

from . import format as fmt
from .health import Pause, StatusWord, judge, pause_of, since_words
from .queries import Version, Vitals, alerts_by_run, commands, store, store_url, version, vitals
from .thinning import ThinnedCurve, mean_of, small, trend

STILL_S = 5.0
"""Seconds without a step after which a run is checked for a pause."""
RISK = "forecast/p50"
POINTS = 30
"""Buckets of a sparkline, each drawn as two points."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All runs of a store with their vitals (state and last values), alerts and pauses, and the errors of unreadable
    runs.
    """

    runs: tuple[RunInfo, ...]
    vitals: Mapping[str, Vitals]
    alerts: Mapping[str, Sequence[Alert]]
    unreadable: Mapping[str, str]
    pauses: Mapping[str, Pause] = field(default_factory=dict)


def fleet(*, deleted: bool = False) -> Fleet:
    """Return all runs and everything that the list of runs needs except curves; ``deleted``: the deleted runs only."""
    with READING:  # what one page reads the next one finds read
        return _fleet(deleted=deleted)


READING = Lock()


def _fleet(*, deleted: bool) -> Fleet:
    source, now = store(), time.time()
    runs, vitals_of, broken = [], {}, dict(source.unreadable())
    paused: dict[str, Pause] = {}
    for run in source.runs(deleted=deleted):
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
    """Return the pause of a run; commands are read only for a live run that has not logged for a while."""
    still = run.state is RunState.RUNNING and now - (run.last_ts or run.created_at) > STILL_S
    return pause_of(run, commands(run.run_id), now) if still else None


# Sparklines of the runs that are shown.


@dataclass(frozen=True, slots=True)
class Spark:
    """One metric of a run as shown in the list of runs: its last value, its trend and a small curve."""

    curve: ThinnedCurve
    value: float | None = None
    trend: str = ""


NO_CURVE = Spark(ThinnedCurve(np.empty(0, np.int64), np.empty(0), np.empty(0, np.bool_)))


def sparks(run: RunInfo, known: Vitals, names: Iterable[str]) -> dict[str, Spark]:
    """Return the small curves of the metrics ``names`` of a run; they are read again only after new rows.

    ``known`` are the run's vitals; metrics that were not recorded are left out.
    """
    kept, at = _kept_sparks(store_url()), version(run)
    wanted = {name: RISK if name == RISK else known.sources.get(name) for name in names}
    absent = [
        (name, as_logged)
        for name, as_logged in wanted.items()
        if as_logged is not None and kept.get((run.run_id, name), (None,))[0] != at
    ]
    if absent:
        series = store().series(run.run_id, [as_logged for _, as_logged in absent], points=2 * POINTS)
        starts = attempt_starts(list(series.values()))
        for name, as_logged in absent:
            one = series[as_logged]
            value = float(one.values[-1]) if len(one.values) else None
            kept[run.run_id, name] = (at, Spark(small(one, starts, POINTS), value, trend(one.values)))
    return {name: kept[run.run_id, name][1] for name, as_logged in wanted.items() if as_logged is not None}


@lru_cache(maxsize=4)  # called once per row: Streamlit's own caches take 0.1 ms a call
def _kept_sparks(url: str) -> dict[tuple[str, str], tuple[Version, Spark]]:  # noqa: ARG001
    return {}


# One run as an entry of the list.


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run of the list with its state, vitals and alerts."""

    run: RunInfo
    health: StatusWord
    vitals: Vitals
    alerts: Sequence[Alert]

    @property
    def heard(self) -> float:
        """Time of the run's last step, or of its start, in Unix seconds."""
        return self.run.last_ts or self.run.created_at


def run_entries(fleet: Fleet, now: float) -> list[RunEntry]:
    """Return an entry for every run in ``fleet``, those that need attention first, then the most recently updated
    first.

    ``now`` is in Unix seconds.
    """
    found = []
    for run in fleet.runs:
        known, alerts = fleet.vitals[run.run_id], fleet.alerts.get(run.run_id, ())
        health = judge(run, known.verdict, now, known.pace, fleet.pauses.get(run.run_id))
        found.append(RunEntry(run, health, known, alerts))
    return sorted(found, key=lambda entry: (*entry.health.order, -entry.heard))


def why(entry: RunEntry) -> str:
    """Return the reason for a run's state or, without one, its last resolved alarm; "" if there is none."""
    if entry.health.why:
        return entry.health.why
    last = last_alarm(entry.alerts)
    return "" if last is None else f"resolved: {since_words(last, last.resolved_step)}"


def last_alarm(alerts: Sequence[Alert]) -> Alert | None:
    """Return the resolved alert with the latest onset; None if there is none."""
    over = [alert for alert in alerts if alert.state is AlertState.RESOLVED and alert.fired_at is not None]
    return max(over, key=lambda alert: alert.onset_step, default=None)


def risk(entry: RunEntry) -> float | None:
    """Return the probability of a failure within 50 steps; None if the run has no forecast."""
    forecast = entry.vitals.forecast
    return None if forecast is None else forecast.p50


# Searching, sorting, grouping.


def facts(run: RunInfo) -> SearchDocument:
    """Return the searchable facts of a run; they are cached, since flattening a configuration takes about 1 ms."""
    kept = _kept_facts(store_url())
    at = (run.attempt, run.curation.edited_at or 0.0)
    known = kept.get(run.run_id)
    if known is None or known[0] != at:
        known = kept[run.run_id] = (at, facts_of(run))
    return known[1]


@lru_cache(maxsize=4)
def _kept_facts(url: str) -> dict[str, tuple[tuple[int, float], SearchDocument]]:  # noqa: ARG001
    return {}


def matching(
    all_entries: Sequence[RunEntry],
    *,
    projects: Sequence[str] = (),
    states: Sequence[str] = (),
    tags: Sequence[str] = (),
    text: str = "",
) -> list[RunEntry]:
    """Return entries of the chosen projects and states (empty: all) with all ``tags`` that match the query ``text``."""
    query = SearchQuery.parse(text)
    return [
        entry
        for entry in all_entries
        if (not projects or entry.run.project in projects)
        and (not states or entry.health.word.value in states)
        and set(tags) <= set(entry.run.tags)
        and (not query.terms or query.fits(facts(entry.run), why(entry)))
    ]


URGENT = "most urgent"
LOW, HIGH = "lowest", "highest"
SORTS: Mapping[str, Callable[[RunEntry], Any]] = {
    "run": lambda entry: (entry.run.name or entry.run.run_id).casefold(),
    "step": lambda entry: entry.run.last_step,
    "reward": lambda entry: entry.vitals.values.get("reward/mean"),
    "entropy": lambda entry: entry.vitals.values.get("policy/entropy"),
    "KL": lambda entry: kl(entry.vitals),
    "grad norm": lambda entry: entry.vitals.values.get("optim/grad_norm"),
    "risk": risk,
    "last step": lambda entry: entry.heard,
    "started": lambda entry: entry.run.created_at,
}
"""Columns that the list of runs can be sorted by, and the functions that return their sort keys."""


def kl(known: Vitals) -> float | None:
    """Return a run's last KL to the reference model, from the first of its estimators that was logged; None without
    one.

    ``known``: the last values of the run.
    """
    names = ("policy/kl_ref", "policy/kl_ref_k3", "policy/kl_ref_k1", "policy/kl_ref_k2")
    return next((known.values[name] for name in names if name in known.values), None)


def in_order(entries: Sequence[RunEntry], by: str) -> list[RunEntry]:
    """Return entries sorted by ``by``, as ``"reward, highest"``; for any other text, in their order.

    Runs without a value come last.
    """
    name, _, way = by.rpartition(", ")
    if name not in SORTS:
        return list(entries)
    keyed = [(SORTS[name](entry), entry) for entry in entries]
    absent = [entry for key, entry in keyed if key is None or (isinstance(key, float) and math.isnan(key))]
    held = [(key, entry) for key, entry in keyed if not (key is None or (isinstance(key, float) and math.isnan(key)))]
    return [entry for _, entry in sorted(held, key=lambda pair: pair[0], reverse=way == HIGH)] + absent


NOT_GROUPED, BY_PROJECT, BY_NAME, BY_TAGS = "", "project", "name without its last number", "tags"


def group_names(runs: Iterable[RunInfo]) -> list[str]:
    """Return the properties by which runs can be grouped: common fields, and the settings in which they differ."""
    given: dict[str, set[str]] = {}
    for run in runs:
        for name, value in _flat(run.config):
            given.setdefault(name, set()).add(str(value))
    return [BY_PROJECT, BY_NAME, BY_TAGS, *sorted(name for name, values in given.items() if len(values) > 1)]


def _flat(config: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def group_of(run: RunInfo, by: str) -> str:
    """Return the name of the group that a run belongs to when runs are grouped by ``by``."""
    if by == BY_PROJECT:
        return run.project
    if by == BY_NAME:
        return (run.name or run.run_id).rstrip("0123456789").rstrip("-_ .") or run.name or run.run_id
    if by == BY_TAGS:
        return ", ".join(sorted(run.tags)) or "no tags"
    values = facts(run).values(by.casefold())
    return f"{by} = {values[0]}" if values else f"{by} not set"


def groups(entries: Sequence[RunEntry], by: str) -> dict[str, list[RunEntry]]:
    """Return the entries of each group, groups in the order of their first entries."""
    found: dict[str, list[RunEntry]] = {}
    for entry in entries:
        found.setdefault(group_of(entry.run, by), []).append(entry)
    return found


def mean_spark(members: Sequence[Spark]) -> tuple[ThinnedCurve, np.ndarray]:
    """Return the mean of ``members``, the small curves of a group of runs, and its band (mean ± standard deviation)."""
    return mean_of([one.curve for one in members])


def mean_words(values: Sequence[float | None]) -> str:
    """Return mean and standard deviation of the finite values, as ``0.413 ± 0.021``, with ``NaN in 2``
    if some are not.

    The deviation has the decimal places of the mean.
    """
    held = [value for value in values if value is not None]
    finite = [value for value in held if math.isfinite(value)]
    odd = f"NaN in {len(held) - len(finite)}" if len(finite) < len(held) else ""
    if not finite:
        return odd or fmt.NOTHING
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    spread = f" ± {_to_places_of(mean, deviation)}" if math.isfinite(mean) and math.isfinite(deviation) else ""
    return f"{fmt.number(mean)}{spread}" + (f", {odd}" if odd else "")


def _to_places_of(mean: float, spread: float) -> str:
    """Return ``spread`` rounded to the last of the three digits in which ``mean`` is shown.

    >>> _to_places_of(0.0312, 0.000936)
    '0.0009'
    """
    last = math.floor(math.log10(abs(mean))) - 2 if mean else -3
    return fmt.number(round(spread, -last)) if spread >= 10**last else fmt.number(spread, 1)
