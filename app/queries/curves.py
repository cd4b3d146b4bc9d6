"""A run's series, thinned for the screen: whole series are large, what is drawn of them is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import streamlit as st

from rlwatch.metrics import canonicalise
from rlwatch.ports import Series
from rlwatch.records import RunInfo

from ..buckets import Branches, attempt_starts, branches
from .door import Version, store, store_url, version

BUCKETS = 240
"""Two points a bucket are about one a pixel of a panel a third of the page wide."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One metric: what to draw of it, its one value if it never had another, and whether all were finite."""

    lines: Branches
    level: float | None = None
    finite: bool = True


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


def outline(run: RunInfo) -> Outline:
    """Where the run's attempts begin and end."""
    return _outline(store_url(), version(run), _known(run))


@st.cache_data(show_spinner=False, max_entries=200)
def _outline(url: str, version: Version, names: tuple[str, ...]) -> Outline:
    series = [one for one in _whole(url, version, names).values() if len(one.steps)]
    last = max((int(one.steps.max()) for one in series), default=0)
    first = min((int(one.steps.min()) for one in series), default=0)
    return Outline(attempt_starts(series), first, max(last, version[2]))


def traces(run: RunInfo, window: tuple[int, int], names: Sequence[str] | None = None) -> dict[str, Trace]:
    """``names`` (None: all the metric table knows) over the steps of ``window``, by source name."""
    known = _known(run)
    wanted = known if names is None else tuple(names)
    return _traces(store_url(), version(run), known, wanted, window)


@st.cache_data(show_spinner=False, max_entries=50)
def _traces(
    url: str, version: Version, known: tuple[str, ...], names: tuple[str, ...], window: tuple[int, int]
) -> dict[str, Trace]:
    starts = dict(_outline(url, version, known).starts)
    return {name: trace(one, starts, window) for name, one in _whole(url, version, names).items()}


def trace(series: Series, starts: dict[int, int], window: tuple[int, int]) -> Trace:
    """The trace of one series."""
    finite = bool(np.isfinite(series.values).all())
    return Trace(branches(series, starts, window, BUCKETS), constant(series.values) if finite else None, finite)


def constant(values: np.ndarray) -> float | None:
    """The one value there ever was (of at least 3), else None."""
    return float(values[0]) if len(values) >= 3 and np.ptp(values) == 0 else None


def whole(run: RunInfo, names: Sequence[str]) -> Mapping[str, Series]:
    """Whole series of ``names``, shared and not to be changed."""
    return _whole(store_url(), version(run), tuple(names))


def _known(run: RunInfo) -> tuple[str, ...]:
    return tuple(sorted(canonical_names(metric_names(run), run.source).values()))


@st.cache_resource(show_spinner=False, max_entries=3)
def _whole(url: str, version: Version, names: tuple[str, ...]) -> dict[str, Series]:  # noqa: ARG001
    """Whole series, shared and not to be changed; few are kept: 100 000 steps of 50 metrics are 160 MB."""
    return store().series(version[0], names)
