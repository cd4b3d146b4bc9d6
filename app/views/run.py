"""One run: its health, why, the charts by failure family, what was found, and the way to act on it."""

from __future__ import annotations

import time

import streamlit as st

from rlwatch.records import RunInfo, RunState

from .. import control, queries, shell, window
from . import charts, head, history, reset

COMMAND_REFRESH_S = 1.0
"""How often a command on its way is looked after, in seconds."""


def page() -> None:
    """The run named in the address."""
    run_id = st.query_params.get("run", "")
    if not run_id:
        st.info("No run chosen: open one from the list of runs.")
        return
    with shell.readable("This run"):
        _run(queries.run(run_id))


def _run(run: RunInfo) -> None:
    wanted = st.session_state.get("live", st.query_params.get("live") != "false")
    live = run.state is RunState.RUNNING and wanted
    every = shell.REFRESH_S if live else None
    st.fragment(head.show, run_every=every)(run.run_id)
    _controls(run)
    reset.dialog_if_open(run)
    commands = queries.commands(run.run_id)
    st.fragment(history.commands, run_every=COMMAND_REFRESH_S if control.waiting(commands, time.time()) else every)(
        run.run_id
    )
    st.fragment(charts.show, run_every=every)(run.run_id)


def _controls(run: RunInfo) -> None:
    steps, live, act = st.columns([6, 1.2, 2], vertical_alignment="bottom", gap="medium")
    with steps:
        _range(run)
    with live:
        st.toggle(
            "Live",
            value=True,
            key="live",
            bind="query-params",
            disabled=run.state is not RunState.RUNNING,
            help="Look again every 5 s; off keeps the page still",
        )
    with act:
        st.button(
            "Reset reference…",
            key="reset-open",
            on_click=reset.open_for,
            args=(run.run_id,),
            disabled=run.state is not RunState.RUNNING,
            help=None if run.state is RunState.RUNNING else "Only a live run can be asked",
            type="primary" if control.reset_due(queries.alerts(run.run_id)) else "secondary",
            width="stretch",
        )


def _range(run: RunInfo) -> None:
    last = queries.outline(run).last
    end = window.limit(last)
    key = f"steps-{run.run_id}-{end}"
    chosen = window.read(st.query_params, 0, last)
    st.slider(
        "Steps shown",
        0,
        end,
        (chosen.low, end if chosen.follows else chosen.high),
        key=key,
        on_change=_range_changed,
        args=(key, end),
    )


def _range_changed(key: str, end: int) -> None:
    low, high = st.session_state[key]
    window.write(st.query_params, low, high, 0, end)
