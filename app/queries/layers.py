"""Gradient norms of a run's layers, thinned for the screen."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import streamlit as st

from rlwatch.metrics import LAYER_PREFIX
from rlwatch.ports import Series
from rlwatch.records import RunInfo

from ..buckets import branches
from ..layer_map import LayerRow, in_model_order
from .curves import BUCKETS, metric_names, outline
from .door import store, store_url

AT_ONCE = 50
"""Layers read together: whole series of all are large where runs are long."""
REFRESH_SHARE = 200
"""A long run is read again once it is one part in so many longer."""


def layers(run: RunInfo, window: tuple[int, int]) -> list[LayerRow]:
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
        rows += [row(name, series[LAYER_PREFIX + name], starts, window) for name in part]
    return rows


def row(name: str, series: Series, starts: Mapping[int, int], window: tuple[int, int]) -> LayerRow:
    """One layer: what the newest attempts measured of it, and the median of the norms that are no zeros."""
    inside = (series.steps >= window[0]) & (series.steps <= window[1])
    told = series.values[inside & np.isfinite(series.values) & (series.values > 0.0)]
    usual = float(np.median(told)) if len(told) else None
    return LayerRow(name, usual, branches(series, dict(starts), window, BUCKETS).current)
