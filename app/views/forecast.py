"""The forecast of a run: how likely a failure is, when, and what drives it."""

from __future__ import annotations

import streamlit as st

from .. import foretelling, marks, queries, shell, window
from ..charts import height
from ..markup import el, joined


def show(run_id: str) -> None:
    """One line; below it, once there is a forecast, the chances, the risk and the reasons."""
    with shell.readable("The forecast"):
        run = queries.run(run_id)
        outline = queries.outline(run)
        shown = window.read(st.query_params, outline.first, outline.last)
        told = queries.foretold(run, (shown.low, shown.high))
        if told is None:
            return
        st.html(el("div", "Forecast", cls="rl-family"))
        st.html(joined(foretelling.facts(told)))
        if not told.traces:
            return
        marked = marks.of_run(queries.alerts(run_id), queries.findings(run_id), queries.events(run_id), outline.starts)
        chart, why = st.columns([2, 1], gap="small")
        with chart:
            st.echarts_chart(
                foretelling.option(told.traces, marked, (shown.low, shown.high), shell.ink()),
                height=height(2, foretelling.COLUMNS),
                key="chart-forecast",
                alt="Forecast: chance of a failure within 20, 50 and 100 steps, and risk, by step",
            )
        with why:
            st.html(joined(foretelling.bars(told.newest, shell.ink())))
