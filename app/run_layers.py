"""The layers of a run as one heat map: layers that left their usual gradient norm, and when."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import streamlit as st

from rlwatch.metrics import LAYER_PREFIX
from rlwatch.ports import Series
from rlwatch.records import RunInfo

from . import format as fmt
from . import layout
from .charts import Ink, Option
from .health import VERMILLION
from .queries import AT_ONCE, BUCKETS, REFRESH_SHARE, metric_names, outline, store, store_url
from .thinning import Curve, Floats, branches

COLUMNS = 120
"""Stretches of steps that are norms apart."""
MOST_ROWS = 120
"""Layers drawn at most: those furthest above their usual norm."""
SCALE = 10.0
"""Factor from which on colour no longer changes."""
BELOW, BROKEN = "#0072B2", "#CC79A7"
"""Of norms below the usual, and of those that are NaN or infinite."""
ROW_PX, LEAST_PX, HEAD_PX, FOOT_PX = (5, 14), 90, 46, 26
LABEL_PX = 11
"""Height of a row from which every layer can be labelled."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer: its name, the median of its norms in the steps shown (None: it never had one), its norms."""

    name: str
    usual: float | None
    curve: Curve


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Rows in model order. ``norms`` (L, C) is the largest norm of each stretch of steps, NaN where there is none.

    ``times`` (L, C) the same over the layer's usual norm; ``bad`` (L, C) whether a norm was NaN or infinite; ``starts``
    (C + 1,) the first step of each stretch, and one beyond the last. ``left_out`` layers are not among the rows.
    """

    rows: tuple[LayerRow, ...]
    norms: Floats
    times: Floats
    bad: np.ndarray
    starts: tuple[int, ...]
    left_out: int = 0


def in_model_order(names: Sequence[str]) -> list[str]:
    """Embeddings, then layers by their numbers, then what has none.

    >>> in_model_order(["lm_head", "layers.10", "layers.9", "embed_tokens"])
    ['embed_tokens', 'layers.9', 'layers.10', 'lm_head']
    """
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    numbered = [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
    first = re.search(r"embed|wte|wpe", name) is not None and not re.search(r"\d", name)
    return (0 if first else 1 if re.search(r"\d", name) else 2, numbered)


def layer_map(rows: Sequence[LayerRow], window: tuple[int, int]) -> LayerMap:
    """Of ``rows`` (at least one) over the steps of ``window``, both ends included."""
    first, last = window
    columns = min(COLUMNS, last - first + 1)
    starts = tuple(first + (last - first + 1) * i // columns for i in range(columns + 1))
    norms = np.full((len(rows), columns), -np.inf)
    bad = np.zeros((len(rows), columns), dtype=bool)
    for i, row in enumerate(rows):
        np.maximum.at(norms[i], np.searchsorted(starts, row.curve.steps, side="right") - 1, row.curve.values)
        bad[i, np.searchsorted(starts, [step for step, _ in row.curve.bad], side="right") - 1] = True
    norms[np.isinf(norms)] = np.nan
    times = norms / np.array([[row.usual or np.nan] for row in rows])
    return _furthest(LayerMap(tuple(rows), norms, times, bad, starts))


def _furthest(whole: LayerMap) -> LayerMap:
    """At most ``MOST_ROWS`` layers, still in model order."""
    if len(whole.rows) <= MOST_ROWS:
        return whole
    reach = np.where(whole.bad.any(axis=1), np.inf, np.nan_to_num(whole.times).max(axis=1))
    kept = np.sort(np.argsort(-reach, kind="stable")[:MOST_ROWS])
    return LayerMap(
        tuple(whole.rows[i] for i in kept),
        whole.norms[kept],
        whole.times[kept],
        whole.bad[kept],
        whole.starts,
        len(whole.rows) - MOST_ROWS,
    )


def map_height(rows: int) -> int:
    """Pixels that a map of ``rows`` layers needs."""
    return HEAD_PX + FOOT_PX + max(LEAST_PX, rows * _row_px(rows))


def _row_px(rows: int) -> int:
    return min(max(420 // rows, ROW_PX[0]), ROW_PX[1])


def map_option(shown: LayerMap, ink: Ink) -> Option:
    """The ECharts option (plain JSON) of the map."""
    names = [row.name for row in shown.rows]
    left_out = f" · the {len(names)} furthest above it; {shown.left_out} more" if shown.left_out else ""
    broken = " · pink: NaN or Inf" if shown.bad.any() else ""
    return {
        "animation": False,
        "title": {
            "text": "gradient norm by layer",
            "subtext": f"highest of each stretch of steps over the layer's median in the steps shown{left_out}{broken}",
            "left": 0,
            "top": 4,
            "padding": 0,
            "itemGap": 3,
            "textStyle": {"fontSize": 13, "fontWeight": 600, "lineHeight": 16},
            "subtextStyle": {"fontSize": 11, "lineHeight": 13, "color": ink.quiet},
        },
        "grid": {"left": 0, "right": 8, "top": HEAD_PX, "bottom": 4, "containLabel": True},
        "xAxis": _step_axis(shown.starts),
        "yAxis": [_layer_axis(names, show=False), _layer_axis(_labels(names), show=True)],
        "visualMap": _legend(ink),
        "series": [_cells(shown)],
        "tooltip": {"padding": [4, 8], "textStyle": {"fontSize": 11}, "transitionDuration": 0},
    }


def _step_axis(starts: Sequence[int]) -> Option:
    every = max(1, (len(starts) - 1) // 8)
    return {
        "type": "category",
        "data": [fmt.step(start) for start in starts[:-1]],
        "axisTick": {"show": False},
        "axisLine": {"show": False},
        "axisLabel": {"fontSize": 11, "interval": every - 1, "showMaxLabel": False},
    }


def _layer_axis(names: Sequence[str], *, show: bool) -> Option:
    return {
        "type": "category",
        "data": list(names),
        "inverse": True,
        "position": "left",
        "axisTick": {"show": False},
        "axisLine": {"show": False},
        "axisLabel": {"show": show, "fontSize": 10, "interval": 0},
    }


def _labels(names: Sequence[str]) -> list[str]:
    """Short names, as many as there is room for; the others are empty."""
    every = math.ceil(LABEL_PX / _row_px(len(names)))
    return [fmt.shorten(name.removeprefix("model."), 28) if i % every == 0 else "" for i, name in enumerate(names)]


def _legend(ink: Ink) -> Option:
    return {
        "type": "continuous",
        "min": -1,
        "max": 1,
        "dimension": 2,
        "seriesIndex": 0,
        "calculable": False,
        "hoverLink": False,
        "orient": "horizontal",
        "right": 8,
        "top": 4,
        "itemWidth": 10,
        "itemHeight": 90,
        "text": [f"{SCALE:g} times", f"1/{SCALE:g}"],
        "textStyle": {"fontSize": 11, "color": ink.quiet},
        "inRange": {"color": [BELOW, ink.grid, ink.grid, VERMILLION]},
    }


def _cells(shown: LayerMap) -> Option:
    dimensions = ("x", "y", "colour", "layer", "steps", "norm", "times usual")
    spans = [
        fmt.step(low) if high - low == 1 else f"{fmt.step(low)} – {fmt.step(high - 1)}"
        for low, high in pairwise(shown.starts)
    ]
    return {
        "type": "heatmap",
        "name": "",
        "dimensions": [{"name": name, "type": "ordinal" if i > 2 else "number"} for i, name in enumerate(dimensions)],
        "encode": {"x": 0, "y": 1, "value": 2, "tooltip": [3, 4, 5, 6]},
        "data": [
            _bad(shown, i, j, spans[j]) if shown.bad[i, j] else _cell(shown, i, j, spans[j])
            for i, j in np.argwhere(shown.bad | (shown.times > 0)).tolist()
        ],
        "emphasis": {"disabled": True},
    }


def _cell(shown: LayerMap, i: int, j: int, span: str) -> list[int | float | str]:
    times, norm = float(shown.times[i, j]), float(shown.norms[i, j])
    colour = round(min(max(math.log(times, SCALE), -1.0), 1.0), 2)
    return [j, i, colour, shown.rows[i].name, span, fmt.number(norm), fmt.number(times)]


def _bad(shown: LayerMap, i: int, j: int, span: str) -> Option:
    """Not finite: in a colour of no number."""
    return {
        "value": [j, i, 1, shown.rows[i].name, span, "NaN or Inf", "–"],
        "visualMap": False,
        "itemStyle": {"color": BROKEN},
    }


# Gradient norms of a run's layers, thinned for the screen.


def layer_rows(run: RunInfo, window: tuple[int, int]) -> list[LayerRow]:
    """Every layer of the run over the steps of ``window``, in model order; empty where none was measured."""
    names = [name.removeprefix(LAYER_PREFIX) for name in metric_names(run) if name.startswith(LAYER_PREFIX)]
    if not names:
        return []
    last = run.last_step or 0
    progress = last // max(1, last // REFRESH_SHARE)
    key = (run.run_id, run.attempt, progress, run.state.value)
    return _layers(store_url(), key, tuple(in_model_order(names)), dict(outline(run).starts), window)


@st.cache_data(show_spinner=False, max_entries=20)
def _layers(
    url: str,  # noqa: ARG001  (part of the key)
    key: tuple[str, int, int, str],
    names: tuple[str, ...],
    starts: Mapping[int, int],
    window: tuple[int, int],
) -> list[LayerRow]:
    rows = []
    for begin in range(0, len(names), AT_ONCE):
        part = names[begin : begin + AT_ONCE]
        series = store().series(key[0], [LAYER_PREFIX + name for name in part])
        rows += [layer_row(name, series[LAYER_PREFIX + name], starts, window) for name in part]
    return rows


def layer_row(name: str, series: Series, starts: Mapping[int, int], window: tuple[int, int]) -> LayerRow:
    """One layer: what the newest attempts measured of it, and the median of the norms that are no zeros."""
    inside = (series.steps >= window[0]) & (series.steps <= window[1])
    norms = series.values[inside & np.isfinite(series.values) & (series.values > 0.0)]
    usual = float(np.median(norms)) if len(norms) else None
    return LayerRow(name, usual, branches(series, dict(starts), window, BUCKETS).current)


# The layers of a run, below the charts of its optimisation.


def show_layers(run: RunInfo, window: tuple[int, int]) -> None:
    """One map of all layers; nothing where none was measured."""
    rows = layer_rows(run, window)
    if not rows:
        return
    shown = layer_map(rows, window)
    st.echarts_chart(
        map_option(shown, layout.ink()),
        height=map_height(len(shown.rows)),
        key="chart-layers",
        alt=f"Gradient norm of {len(shown.rows)} layers by step, over their usual",
    )
