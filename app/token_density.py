"""Distributions of token quantities over the steps of a run, as density maps with quantiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from rlwatch.distributions import QUANTITIES, Distributions, TokenQuantity, distributions, kept_bins
from rlwatch.records import DISTRIBUTIONS
from rlwatch.wording import number

from . import overlays, queries
from .board import LAST, BoardChart, ChartLine, Shades
from .queries import Version, store
from .thinning import Floats, Ints, ThinnedCurve

COLUMNS = 120
"""Most columns of a map; each is a range of steps."""
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
"""Labelled levels of a map, the more important first."""
ROOM = 12
"""Most labels for which there is room."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One quantity over the S current steps: ``shares`` (S, R) of the tokens in each bin; ``low`` and ``high`` (R,):
    ends of the bins; ``quantiles`` (S, 5) as :data:`SHARES`; ``bad``: steps and kinds of values that were not finite.
    """

    quantity: TokenQuantity
    steps: Ints
    shares: Floats
    low: Floats
    high: Floats
    quantiles: Floats
    bad: tuple[tuple[int, str], ...]

    def rows(self, values: Floats) -> Floats:
        """Return the positions of values among the rows; row r is from r to r + 1."""
        edges = np.append(self.low, self.high[-1])
        places: Floats = np.interp(values, edges, np.arange(len(edges)))
        return places

    def told(self, values: Floats) -> Floats:
        """Return values for display, with logarithms reversed."""
        return np.exp(values) if self.quantity.log else values


def counted(found: Mapping[str, Distributions], starts: Mapping[int, int]) -> dict[str, Counted]:
    """Return the distributions of the current branch, by quantity. ``starts``: attempt -> its first step."""
    known = {name: _newest(found[name], starts) for name in QUANTITIES if name in found}
    return {name: _counted(QUANTITIES[name], own) for name, own in known.items() if len(own.steps)}


def _newest(own: Distributions, starts: Mapping[int, int]) -> Distributions:
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
    return ", ".join(f"{n} × {word}" for n, word in zip(counts.tolist(), ("NaN", "−Inf", "Inf"), strict=True) if n)


@st.cache_data(show_spinner=False, max_entries=20)
def read(url: str, key: Version, starts: Mapping[int, int]) -> dict[str, Counted]:  # noqa: ARG001  (url: the key)
    """Read all distributions of the run, by quantity."""
    return counted(distributions(store().spikes(key[0], reason=DISTRIBUTIONS)), starts)


def progress(version: Version) -> Version:
    """Return a cache key that changes with the run's state and, less often than each step, with its length."""
    run_id, attempt, last, _, state = version
    return (run_id, attempt, last // max(1, last // queries.REFRESH_SHARE), 0.0, state)


def panel(one: Counted, window: tuple[int, int], *, dark: bool = False) -> BoardChart | None:
    """Return the map of a quantity over the steps of ``window``, or None if no step has one."""
    inside = (one.steps >= window[0]) & (one.steps <= window[1])
    if not inside.any():
        return None
    steps = one.steps[inside]
    starts, columns = _columns(steps)
    used = np.unique(columns)
    shares = np.full((len(starts) - 1, one.shares.shape[1]), np.nan)
    for column in used:
        shares[column] = one.shares[inside][columns == column].mean(axis=0)
    shades = Shades(starts.tolist(), shares.T, one.told(np.append(one.low, one.high[-1])), _ticks(one))
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
            overlays.line(name, 1 + outer, curve, dark=dark, told=one.told(kept), width=1.8 if middle else 1.1)
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
