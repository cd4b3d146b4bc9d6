"""Order of a run's metrics, by failure family and the most informative first, and its layers as one heat map."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import streamlit as st

from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import LAYER_PREFIX, TABLE, Family, family_of, meaning_of, metric_of, resolve, unit_of
from rlwatch.records import RunInfo

from . import format as fmt
from . import overlays
from .board import BoardChart, Cells, ChartSection
from .queries import BUCKETS, REFRESH_SHARE, Extent, canonical_names, metric_names, outline, store, store_url
from .thinning import Floats, ThinnedCurve, branches

MOST = 3
"""Charts of a family shown at first, one row; the rest is folded, unless a finding concerns them: then whole rows are
added.
"""


@dataclass(frozen=True, slots=True)
class MetricChart:
    """One metric to draw: its ``name`` in the trainer's log and, for a known metric, its canonical name."""

    name: str
    canonical: str = ""

    @property
    def title(self) -> str:
        """Title of the metric's chart."""
        return self.canonical or self.name

    @property
    def about(self) -> str:
        """Explanation of the metric; empty if it is not a known one."""
        return meaning_of(self.canonical)

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Lowest and highest possible value of the metric, None if there is none."""
        metric = metric_of(self.canonical or self.name)
        return (None, None) if metric is None else (metric.low, metric.high)

    @property
    def vital(self) -> bool:
        """True for a metric that is drawn even if it never changes."""
        metric = metric_of(self.canonical)
        return metric is not None and metric.vital

    def subtitle(self, source: str) -> str:
        """Return the unit, and the name that the trainer ``source`` uses if it differs (with ``proxy`` if the quantity
        is only related).
        """
        if not self.canonical:
            return ""
        reading = resolve(self.name, source)
        known_as = "" if self.name == self.canonical else self.name
        if known_as and reading is not None and reading.closeness == 2:
            known_as = f"proxy: {known_as}"
        return " · ".join(part for part in (unit_of(self.canonical), known_as) if part)


@dataclass(slots=True)
class MetricSection:
    """Charts of one metric family: those shown, those folded, and metrics that never changed (name, value)."""

    family: Family
    shown: list[MetricChart] = field(default_factory=list)
    more: list[MetricChart] = field(default_factory=list)
    unchanging: list[tuple[str, float]] = field(default_factory=list)


def all_panels(names: Sequence[str], source: str) -> list[MetricChart]:
    """Return every metric of a run once: known ones, the most informative first, then all others by name.

    ``source``: the trainer. Layers and forecasts are left out; they have charts of their own.
    """
    canonical = canonical_names(names, source)
    rank = {metric.name: (metric.panel or math.inf, place) for place, metric in enumerate(TABLE)}
    known = sorted((c for c in canonical if c in rank and not c.startswith(FORECAST)), key=rank.__getitem__)
    used = {source for name, source in canonical.items() if name in rank}
    return [
        *(MetricChart(canonical[c], c) for c in known),
        *(MetricChart(name) for name in sorted(set(names) - used) if not name.startswith(LAYER_PREFIX)),
    ]


def sections(
    panels: Sequence[MetricChart],
    extents: Mapping[str, Extent],
    source: str,
    suspects: Collection[str] = (),
) -> list[MetricSection]:
    """Return the charts of a run by metric family; unknown metrics are folded.

    Parameters
    ----------
    panels
        The metrics to draw.
    extents
        Extent of each metric over the whole run.
    source
        The trainer.
    suspects
        Metrics of findings, which are always shown, like metrics with values that were not finite.
    """
    found = {family: MetricSection(family) for family in Family}
    for panel in panels:
        section = found[family_of(panel.canonical or panel.name, source)]
        if not panel.canonical:
            shown = not extents[panel.name].finite or panel.name in suspects
            (section.shown if shown else section.more).append(panel)
            continue
        extent, suspect = extents[panel.name], panel.canonical in suspects
        if extent.level is not None and not suspect and not panel.vital:
            section.unchanging.append((panel.canonical, extent.level))
        elif suspect or len(section.shown) < MOST or not extent.finite:
            section.shown.append(panel)
        else:
            section.more.append(panel)
    for section in found.values():
        lacking = -len(section.shown) % MOST if len(section.shown) > MOST else 0
        known = [panel for panel in section.more if panel.canonical][:lacking]
        section.shown += known
        section.more = [panel for panel in section.more if panel not in known]
    return [section for section in found.values() if section.shown or section.more or section.unchanging]


def unchanging_words(section: MetricSection) -> str:
    """Return ``never changed: optim/lr 1e-06``, or an empty string if all metrics of the section changed."""
    if not section.unchanging:
        return ""
    return "never changed: " + " · ".join(f"{name} {fmt.number(value)}" for name, value in section.unchanging)


def found_by(names: Sequence[str], panels: Sequence[MetricChart], wanted: str) -> list[MetricChart]:
    """Return the metrics whose names or explanation contain all words of ``wanted``, including layers and forecasts.

    ``panels``: the metrics that have charts of their own.
    """
    words = wanted.lower().split()
    listed = {panel.name for panel in panels}
    every = [*panels, *(MetricChart(name) for name in sorted(names) if name not in listed)]
    return [p for p in every if all(word in f"{p.name} {p.canonical} {p.about}".lower() for word in words)]


# The layers of a run as one heat map of gradient norms relative to their usual level.

COLUMNS = 120
"""Most columns of the heat map; each is a range of steps."""
MOST_ROWS = 120
"""Most layers drawn: those furthest above their usual norm."""
ROW_PX, LEAST_PX, MOST_PX, FOOT_PX = 14, 90, 600, 8
APART = "layers/heterogeneity"
"""Metric of the heterogeneity of the layers' norms, drawn as a line below the heat map."""
APART_PX = 90


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of the model: its name, and its gradient norms, thinned to their extremes."""

    name: str
    curve: ThinnedCurve


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Heat map of the layers' gradient norms, rows in model order; ``left_out``: number of layers not drawn.

    A cell is the highest norm in a range of steps. ``usual`` is the level of its row: the median over the ranges of the
    geometric mean of lowest and highest norm, which is the median of the norms if a range is one step.
    """

    cells: Cells
    left_out: int = 0

    @property
    def times(self) -> Floats:
        """Norms of the map divided by the usual level of their layer (L, C)."""
        over: Floats = self.cells.values / self.cells.usual[:, None]
        return over


def in_model_order(names: Sequence[str]) -> list[str]:
    """Sort names of layers: embeddings, then layers by number, then names without a number.

    >>> in_model_order(["lm_head", "layers.10", "layers.9", "embed_tokens"])
    ['embed_tokens', 'layers.9', 'layers.10', 'lm_head']
    """
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    numbered = [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
    first = re.search(r"embed|wte|wpe", name) is not None and not re.search(r"\d", name)
    return (0 if first else 1 if re.search(r"\d", name) else 2, numbered)


def layer_map(rows: Sequence[LayerRow], window: tuple[int, int]) -> LayerMap:
    """Return the heat map of the layers in ``rows`` (at least one) over the steps of ``window``, both ends included."""
    first, last = window
    columns = min(COLUMNS, last - first + 1)
    starts = tuple(first + (last - first + 1) * i // columns for i in range(columns + 1))
    high, low = (np.full((len(rows), columns), extreme) for extreme in (-np.inf, np.inf))
    bad = np.zeros((len(rows), columns), dtype=bool)
    for i, row in enumerate(rows):
        own = row.curve.values > 0.0  # a batch without a gradient has norm 0 and does not count
        at = (np.searchsorted(starts, row.curve.steps[own], side="right") - 1).clip(max=columns - 1)
        np.maximum.at(high[i], at, row.curve.values[own])
        np.minimum.at(low[i], at, row.curve.values[own])
        broken = np.searchsorted(starts, [step for step, _ in row.curve.bad], side="right") - 1
        bad[i, broken.clip(max=columns - 1)] = True
    high[np.isinf(high)] = np.nan
    middle = np.sqrt(low) * np.sqrt(high)
    usual = np.array([np.nanmedian(row) if not np.isnan(row).all() else np.nan for row in middle])
    return _furthest(LayerMap(Cells([row.name for row in rows], starts, high, usual, bad)))


def _furthest(whole: LayerMap) -> LayerMap:
    """Keep at most ``MOST_ROWS`` layers, in model order."""
    cells = whole.cells
    if len(cells.names) <= MOST_ROWS:
        return whole
    reach = np.where(cells.bad.any(axis=1), np.inf, np.nan_to_num(whole.times).max(axis=1))
    kept = np.sort(np.argsort(-reach, kind="stable")[:MOST_ROWS])
    names = [cells.names[i] for i in kept]
    few = Cells(names, cells.starts, cells.values[kept], cells.usual[kept], cells.bad[kept])
    return LayerMap(few, len(cells.names) - MOST_ROWS)


def map_height(rows: int) -> int:
    """Return the height in pixels of a heat map of ``rows`` layers."""
    return FOOT_PX + min(max(LEAST_PX, rows * ROW_PX), MOST_PX)


def map_section(shown: LayerMap, apart: ThinnedCurve | None = None) -> ChartSection:
    """Return a section of charts with ``shown``, the heat map of the layers, and below it the curve ``apart``, if
    given.

    ``apart`` is the heterogeneity of the layers: 1 minus the mean correlation of their gradient norms over the last
    rows.
    """
    names = shown.cells.names
    left_out = f"the {len(names)} furthest above it; {shown.left_out} more" if shown.left_out else ""
    broken = "pink: NaN or Inf" if shown.cells.bad.any() else ""
    notes = (
        "highest of each stretch of steps over the layer's baseline",
        "red: ten times, blue: a tenth",
        left_out,
        broken,
    )
    panel = BoardChart(
        name="layers",
        title="gradient norm by layer",
        lines=(),
        range=(0.0, float(len(names))),
        sub=" · ".join(filter(None, notes)),
        cells=shown.cells,
        height=map_height(len(names)),
    )
    return ChartSection("layers", "Layers", [panel] if apart is None else [panel, apart_panel(apart)], span=3)


def apart_panel(curve: ThinnedCurve) -> BoardChart:
    """Return the chart of ``curve``, the heterogeneity of the layers: 1 minus the mean correlation of their gradient
    norms over the last rows.
    """
    return BoardChart(
        name="layers-apart",
        title="heterogeneity of the layers",
        lines=(overlays.line("heterogeneity", 0, curve),),
        range=(0.0, max(1.0, float(curve.values.max(initial=0.0)))),
        sub="1 - mean correlation of their norms over the last 50 rows: 0 in step, 1 unrelated",
        height=APART_PX,
    )


# Gradient norms of a run's layers, thinned for the screen.


def layer_section(run: RunInfo, window: tuple[int, int]) -> ChartSection | None:
    """Return the section with the heat map of all layers of a run, or None if none was measured."""
    every = metric_names(run)
    names = [name.removeprefix(LAYER_PREFIX) for name in every if name.startswith(LAYER_PREFIX)]
    if not names:
        return None
    last = run.last_step or 0
    progress = last // max(1, last // REFRESH_SHARE)
    key = (run.run_id, run.attempt, progress, run.state.value)
    wanted = [LAYER_PREFIX + name for name in in_model_order(names)] + [APART] * (APART in every)
    rows = _layers(store_url(), key, tuple(wanted), dict(outline(run).starts), window)
    apart = rows.pop().curve if APART in every else None
    return map_section(layer_map(rows, window), apart)


@st.cache_data(show_spinner=False, max_entries=20)
def _layers(
    url: str,  # noqa: ARG001  (part of the key)
    key: tuple[str, int, int, str],
    names: tuple[str, ...],
    starts: Mapping[int, int],
    window: tuple[int, int],
) -> list[LayerRow]:
    """Return the norms of every layer, from the current branch, and the other named metrics."""
    read = store().series(key[0], names, steps=window, points=BUCKETS)
    curves = [branches(read[name], dict(starts), window, BUCKETS).current for name in names]
    return [LayerRow(name.removeprefix(LAYER_PREFIX), curve) for name, curve in zip(names, curves, strict=True)]
