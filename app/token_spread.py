"""Distributions of token quantities over the steps of a run: density maps with quantiles, or a line and a band."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from rlwatch.compare.alignment import counts
from rlwatch.distributions import QUANTITIES, Distributions, TokenQuantity, distributions, kept_bins
from rlwatch.ports import Series
from rlwatch.records import DISTRIBUTIONS, RunInfo
from rlwatch.wording import number

from . import board, charts, layout, overlays, queries
from .board import LAST, Board, BoardChart, ChartLine, ChartSection, Shades
from .charts import DARK
from .markup import el
from .overlays import COLOURS, DASHES
from .queries import Version, store, store_url, version
from .thinning import Floats, Ints, ThinnedCurve, thin

BUCKETS = 240


@dataclass(frozen=True, slots=True)
class Spread:
    """A token quantity to draw: metrics of its middle and of its lower and upper quantiles over the tokens of a step,
    and their labels.

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
        """Names of the metrics that the chart of this quantity needs."""
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
    """Draw a density map for each token quantity with recorded distributions, and a band for those
    with quantiles only.
    """
    st.html(el("div", "Distributions over tokens, by step", cls="rl-family"))
    outline = queries.outline(run)
    whole = (outline.first, outline.last)
    window = charts.read_window(st.query_params, *whole)
    shown, dark = (window.low, window.high), layout.ink() is DARK
    maps, mapped = _maps(store_url(), progress(version(run)), dict(outline.starts), shown, dark=dark)
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
    counted = read(url, key, starts)
    maps = [panel for one in counted.values() if (panel := density_chart(one, window, dark=dark)) is not None]
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
    """Return the chart of one token quantity (line and band), or None if no step has all of its quantiles.

    A bucket of several steps has the mean of the means, the smallest low and the largest high quantile, so that no
    spike is lost. Values that are not finite are marked on the axis. ``starts``: first step of each attempt.
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


# Distributions of token quantities over the steps of a run, as density maps with quantiles.

COLUMNS = 120
"""Most columns of a density map; each is a range of steps."""
GAP = 4
"""Distance between steps, as a multiple of the usual one, from which a map shows a gap."""
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
NAMES = ("5th percentile", "25th percentile", "median", "75th percentile", "95th percentile")
HEIGHT = 210
LABELS: Mapping[str, tuple[float, ...]] = {
    "log_ratio": (1.0, 2.0, 0.5, 1.1, 0.9, 10.0, 0.1, 1.01, 0.99, 1.001, 0.999, 1e3, 1e-3),
    "logp_difference": (0.0, 1.0, -1.0, 0.1, -0.1, 0.01, -0.01, 10.0, -10.0, 0.001, -0.001),
    "entropy": (1.0, 0.1, 0.0, 0.01, 5.0, 2.0, 0.5, 0.02, 0.2, 0.05),
}
"""Labelled levels of a density map, the more important first."""
ROOM = 12
"""Most labels that fit at the axis of a map."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Distributions of one token quantity over the tokens of each of S steps, as histograms.

    ``shares`` (S, R) of the tokens in each bin; ``low`` and ``high`` (R,): ends of the bins; ``quantiles`` (S, 5) as
    :data:`SHARES`; ``bad``: steps and kinds of values that were not finite.
    """

    quantity: TokenQuantity
    steps: Ints
    shares: Floats
    low: Floats
    high: Floats
    quantiles: Floats
    bad: tuple[tuple[int, str], ...]

    def rows(self, values: Floats) -> Floats:
        """Return the positions of ``values`` among the bins; bin r is from r to r + 1."""
        edges = np.append(self.low, self.high[-1])
        places: Floats = np.interp(values, edges, np.arange(len(edges)))
        return places

    def readable(self, values: Floats) -> Floats:
        """Return ``values`` for display, with logarithms reversed."""
        return np.exp(values) if self.quantity.log else values


def counted(found: Mapping[str, Distributions], starts: Mapping[int, int]) -> dict[str, Counted]:
    """Return the distributions in ``found`` of the steps that no later attempt replaced, by token quantity.

    ``starts``: first step of each attempt.
    """
    known = {name: _newest_counts(found[name], starts) for name in QUANTITIES if name in found}
    return {name: _counted(QUANTITIES[name], own) for name, own in known.items() if len(own.steps)}


def _newest_counts(own: Distributions, starts: Mapping[int, int]) -> Distributions:
    """Keep the steps that no later attempt repeated, each once."""
    kept = own.tokens > 0
    kept[:-1] &= own.steps[1:] != own.steps[:-1]
    for attempt, first in starts.items():
        kept &= (own.attempts >= attempt) | (own.steps < first)
    return own.where(kept)


def _counted(quantity: TokenQuantity, own: Distributions) -> Counted:
    low, high = kept_bins(quantity)
    used = np.flatnonzero(own.counts.any(axis=0))
    rows = np.searchsorted(high, (own.low[used] + own.high[used]) / 2).clip(max=len(low) - 1)
    first, last = (rows.min(), rows.max()) if len(rows) else (len(low) // 2, len(low) // 2)
    kept = slice(max(0, first - 1), last + 2)
    shares = np.zeros((len(own.steps), len(low[kept])))
    np.add.at(shares.T, rows - kept.start, (own.counts[:, used] / own.tokens[:, None]).T)
    broken = own.broken.any(axis=1)
    bad = tuple(
        (int(step), _broken(counts)) for step, counts in zip(own.steps[broken], own.broken[broken], strict=True)
    )
    return Counted(quantity, own.steps, shares, low[kept], high[kept], own.quantiles(SHARES), bad)


def _broken(counts: Ints) -> str:
    return ", ".join(f"{n} × {word}" for n, word in zip(counts.tolist(), ("NaN", "-Inf", "Inf"), strict=True) if n)


@st.cache_data(show_spinner=False, max_entries=20)
def read(url: str, key: Version, starts: Mapping[int, int]) -> dict[str, Counted]:  # noqa: ARG001  (url: the key)
    """Read all token distributions of the run in ``key`` from the store, by quantity.

    ``url`` is the store; ``starts``: first step of each attempt.
    """
    return counted(distributions(store().spikes(key[0], reason=DISTRIBUTIONS)), starts)


def progress(version: Version) -> Version:
    """Return ``version`` (state and length of a run) as a coarser cache key, which changes with the state and, less
    often than each step, with the length.
    """
    run_id, attempt, last, _, state = version
    return (run_id, attempt, last // max(1, last // queries.REFRESH_SHARE), 0.0, state)


def density_chart(one: Counted, window: tuple[int, int], *, dark: bool = False) -> BoardChart | None:
    """Return the density map of a token quantity over the steps of ``window``, or None if no step has one.

    ``dark``: for a dark background.
    """
    inside = (one.steps >= window[0]) & (one.steps <= window[1])
    if not inside.any():
        return None
    steps = one.steps[inside]
    starts, columns = _columns(steps)
    used = np.unique(columns)
    shares = np.full((len(starts) - 1, one.shares.shape[1]), np.nan)
    for column in used:
        shares[column] = one.shares[inside][columns == column].mean(axis=0)
    shades = Shades(starts.tolist(), shares.T, one.readable(np.append(one.low, one.high[-1])), _ticks(one))
    bad = tuple(mark for mark in one.bad if window[0] <= mark[0] <= window[1])
    lines = _lines(one, one.quantiles[inside], columns, starts, bad, dark=dark)
    sub = " · ".join(filter(None, [one.quantity.unit, "stronger: more tokens", "lines: 5, 25, 50, 75, 95 % of them"]))
    name, rows = one.quantity.name, one.shares.shape[1]
    return BoardChart(name, one.quantity.title, lines, (0.0, float(rows)), sub, shades=shades, height=HEIGHT)


def _columns(steps: Ints) -> tuple[Ints, NDArray[np.intp]]:
    """Return the column edges and the column of each step: one column per step if there is room."""
    if len(steps) > COLUMNS:
        first, last = int(steps[0]), min(int(steps[-1]) + 1, LAST)
        starts = first + (last - first) * np.arange(COLUMNS + 1, dtype=object) // COLUMNS
        starts = np.unique(starts.astype(np.int64))
        return starts, (np.searchsorted(starts, steps, side="right") - 1).clip(max=len(starts) - 2)
    usual = max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else 1
    ends = np.append(steps[1:], min(int(steps[-1]) + usual, LAST))
    ends = np.where(ends - steps > GAP * usual, steps + usual, ends)
    starts = np.unique(np.concatenate([steps, ends]))
    if len(starts) == 1:
        starts = np.array([LAST - 1, LAST])
    return starts, np.searchsorted(starts, steps).clip(max=len(starts) - 2)


def _lines(
    one: Counted,
    quantiles: Floats,
    columns: NDArray[np.intp],
    starts: Ints,
    bad: tuple[tuple[int, str], ...],
    *,
    dark: bool,
) -> list[ChartLine]:
    """Return the quantile lines; a column of several steps has the lowest low, highest high and mean of the middle."""
    used = np.unique(columns)
    reduce: tuple[Callable[[Floats], float], ...] = (np.nanmin, np.nanmin, np.nanmean, np.nanmax, np.nanmax)
    lines = []
    for place, (name, how) in enumerate(zip(NAMES, reduce, strict=True)):
        own = [quantiles[columns == column, place] for column in used]
        values = np.array([how(some) if np.isfinite(some).any() else np.nan for some in own])
        there = np.isfinite(values)
        at, kept = starts[used][there], values[there]
        breaks = np.zeros(len(kept), dtype=np.bool_)
        breaks[1:] = np.diff(used[there]) > 1
        middle = place == len(SHARES) // 2
        curve = ThinnedCurve(at, one.rows(kept), breaks, bad if middle else ())
        outer = 0 if middle else len(overlays.COLOURS) * (2 if place in (0, len(SHARES) - 1) else 1)
        lines.append(
            overlays.line(name, 1 + outer, curve, dark=dark, shown=one.readable(kept), width=1.8 if middle else 1.1)
        )
    return lines


def _ticks(one: Counted) -> list[tuple[float, str]]:
    """Return the positions of the labels: levels on the map, no two too close."""
    ends = one.low[0], one.high[-1]
    rows = len(one.low)
    found: list[tuple[float, str]] = []
    for level in LABELS[one.quantity.name]:
        value = float(np.log(level)) if one.quantity.log else level
        at = float(one.rows(np.array([value]))[0])
        if ends[0] <= value <= ends[1] and all(abs(at - other) >= rows / ROOM for other, _ in found):
            found.append((at, number(level, 4).replace("-", "−")))
    return sorted(found)
