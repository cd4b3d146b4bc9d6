"""Distributions of token quantities over the steps of a run: a middle line and a band between two quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import streamlit as st

from rlwatch.compare.alignment import counts
from rlwatch.ports import Series
from rlwatch.records import RunInfo

from . import board, charts, layout, overlays, queries, token_density
from .board import Board, BoardChart, ChartSection
from .charts import DARK
from .markup import el
from .overlays import COLOURS, DASHES
from .queries import Version, store, store_url, version
from .thinning import Floats, Ints, ThinnedCurve, thin

BUCKETS = 240


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity: canonical metrics of its middle and of the lower and upper quantiles, and their labels.

    ``low`` is empty for a quantity that is never negative; its band begins at 0. ``quantity``: name of the recorded
    distributions that replace the band.
    """

    title: str
    unit: str
    middle: str
    low: str
    high: str
    low_name: str
    high_name: str
    quantity: str

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that it needs."""
        return tuple(name for name in (self.middle, self.low, self.high) if name)


SPREADS = (
    Spread("importance ratio", "", "ratio/mean", "ratio/min", "ratio/p99", "smallest", "99th percentile", "log_ratio"),
    Spread(
        "|log-prob difference|, trainer and engine", "nats",
        "mismatch/logp_absdiff", "", "mismatch/logp_absdiff_p99", "", "99th percentile", "logp_difference",
    ),
    Spread(
        "entropy", "nats",
        "policy/entropy", "policy/entropy_p10", "policy/entropy_p90", "10th percentile", "90th percentile", "entropy",
    ),
)  # fmt: skip
NONE_RECORDED = "Token distributions need level='tokens' or tokens passed by the training loop."
BANDS_ALONE = "Distributions were not recorded, the mean and two quantiles a step were. "
BANDS = "Line: mean. Band, with its dashed and dotted ends: between the quantiles."


def show_spreads(run: RunInfo) -> None:
    """Draw a map for each quantity with recorded distributions, and a band for those with quantiles only."""
    st.html(el("div", "Distributions over tokens, by step", cls="rl-family"))
    outline = queries.outline(run)
    whole = (outline.first, outline.last)
    window = charts.read_window(st.query_params, *whole)
    shown, dark = (window.low, window.high), layout.ink() is DARK
    maps, mapped = _maps(store_url(), token_density.progress(version(run)), dict(outline.starts), shown, dark=dark)
    bands = _panels(store_url(), version(run), run.source, shown, dark=dark, mapped=mapped)
    if not maps and not bands:
        st.html(el("div", NONE_RECORDED, cls="rl-soft"))
        return
    if bands:
        st.html(el("div", BANDS if maps else BANDS_ALONE + BANDS, cls="rl-soft"))
    board.library()
    sections = [ChartSection("spreads", "", [*maps, *bands])]
    board.show_by_address(Board("spreads", shown, whole, layout.ink(), board.by_step(*whole), sections=sections))


@st.cache_data(show_spinner=False, max_entries=50)
def _maps(
    url: str, key: Version, starts: Mapping[int, int], window: tuple[int, int], *, dark: bool
) -> tuple[list[BoardChart], frozenset[str]]:
    """Return maps of the quantities with recorded distributions, and the names of these quantities."""
    counted = token_density.read(url, key, starts)
    maps = [panel for one in counted.values() if (panel := token_density.panel(one, window, dark=dark)) is not None]
    return maps, frozenset(counted)


@st.cache_data(show_spinner=False, max_entries=50)
def _panels(
    url: str,  # noqa: ARG001  (part of the key)
    version: Version,
    source: str,
    window: tuple[int, int],
    *,
    dark: bool,
    mapped: frozenset[str],
) -> list[BoardChart]:
    names = queries.canonical_names(store().metric_names(version[0]), source)
    left = [spread for spread in SPREADS if spread.quantity not in mapped]
    wanted = [spread for spread in left if all(metric in names for metric in spread.metrics)]
    read = {names[metric] for spread in wanted for metric in spread.metrics}
    if not read:
        return []
    series = store().series(version[0], sorted(read), steps=window)
    starts = dict(queries.outline(store().run(version[0])).starts)
    by_name = {metric: series[names[metric]] for spread in wanted for metric in spread.metrics}
    return [panel for spread in wanted if (panel := panel_of(spread, by_name, starts, dark=dark)) is not None]


def panel_of(
    spread: Spread, series: Mapping[str, Series], starts: Mapping[int, int], *, dark: bool = False
) -> BoardChart | None:
    """Return the chart of one quantity, or None if no step has all of its quantiles.

    A bucket of several steps has the mean of the means, the smallest low and the largest high quantile, so that no
    spike is lost. Values that are not finite are marked on the axis.
    """
    own = {metric: _newest(series[metric], starts) for metric in spread.metrics}
    steps = np.concatenate([at for at, _ in own.values()])
    if not len(steps):
        return None
    edges = np.linspace(steps.min(), float(steps.max()) + 1, min(BUCKETS, int(np.ptp(steps)) + 1) + 1)
    middle = _bucketed(*own[spread.middle], edges, np.add)
    high = _bucketed(*own[spread.high], edges, np.maximum)
    low = _bucketed(*own[spread.low], edges, np.minimum) if spread.low else dict.fromkeys(middle, (0, 0.0))
    kept = sorted(middle.keys() & high.keys() & low.keys())
    if not kept:
        return None
    at = np.array([middle[bucket][0] for bucket in kept], dtype=np.int64)
    values = [np.array([part[bucket][1] for bucket in kept]) for part in (middle, low, high)]
    bad = tuple(dict.fromkeys(mark for where, column in own.values() for mark in thin(where, column, BUCKETS).bad))
    dashed, dotted = len(COLOURS), len(COLOURS) * (len(DASHES) - 1)
    lines = [overlays.line("mean", 0, _curve(at, values[0], bad), np.stack(values[1:]), dark=dark)]
    lines += [overlays.line(spread.low_name, dashed, _curve(at, values[1]), dark=dark)] if spread.low else []
    lines.append(overlays.line(spread.high_name, dotted, _curve(at, values[2]), dark=dark))
    return overlays.overlay(spread.middle, lines, spread.title, spread.unit)


def _newest(one: Series, starts: Mapping[int, int]) -> tuple[Ints, Floats]:
    """Return steps and values that no later attempt repeated, by step."""
    kept = counts(one, dict(starts))
    order = np.argsort(one.steps[kept], kind="stable")
    return one.steps[kept][order], one.values[kept][order]


def _bucketed(steps: Ints, values: Floats, edges: Floats, reduce: np.ufunc) -> dict[int, tuple[int, float]]:
    """Return the first step of each bucket and its finite values, reduced; ``np.add`` gives their mean."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(steps):
        return {}
    places, firsts = np.unique(np.digitize(steps, edges), return_index=True)
    sums = reduce.reduceat(values, firsts)
    sizes = np.diff(firsts, append=len(values))
    reduced: Sequence[float] = (sums / sizes if reduce is np.add else sums).tolist()
    return {int(place): (int(steps[first]), value) for place, first, value in zip(places, firsts, reduced, strict=True)}


def _curve(steps: Ints, values: Floats, bad: tuple[tuple[int, str], ...] = ()) -> ThinnedCurve:
    return ThinnedCurve(steps, values, np.zeros(len(steps), dtype=np.bool_), bad)
