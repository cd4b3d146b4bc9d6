"""The layers of a run, below the charts of its optimisation."""

from __future__ import annotations

import streamlit as st

from rlwatch.records import RunInfo

from .. import layer_map, shell
from ..queries.layers import layers


def show(run: RunInfo, window: tuple[int, int]) -> None:
    """One map of all layers; nothing where none was measured."""
    rows = layers(run, window)
    if not rows:
        return
    shown = layer_map.layer_map(rows, window)
    st.echarts_chart(
        layer_map.map_option(shown, shell.ink()),
        height=layer_map.height(len(shown.rows)),
        key="chart-layers",
        alt=f"Gradient norm of {len(shown.rows)} layers by step, over their usual",
    )
