"""One run: its health, why, the charts by failure family, what was found, and the way to act on it."""

from __future__ import annotations

import time
from collections.abc import Callable

import streamlit as st

from rlwatch.records import RunInfo, RunState

from .. import asks, control, pauses, queries, shell, window
from . import asking, blame, cause, charts, forecast, head, history
from .blame import GoToTokens

COMMAND_REFRESH_S = 1.0
"""How often a command on its way is looked after, in seconds."""


def page(go_to_tokens: GoToTokens) -> None:
    """The run named in the address."""
    run_id = st.query_params.get("run", "")
    if not run_id:
        st.info("No run chosen: open one from the list of runs.")
        return
    with shell.readable("This run"):
        _run(queries.run(run_id), go_to_tokens)


def _run(run: RunInfo, go_to_tokens: GoToTokens) -> None:
    wanted = st.session_state.get("live", st.query_params.get("live") != "false")
    live = run.state is RunState.RUNNING and wanted
    every = shell.REFRESH_S if live else None
    _part(head.show, every, run.run_id)
    _part(cause.show, every, run.run_id)
    commands = queries.commands(run.run_id)
    _controls(run, paused=pauses.pause_of(run, commands, time.time()) is not None)
    asking.dialog_if_open(run)
    _part(history.commands, COMMAND_REFRESH_S if control.waiting(commands, time.time()) else every, run.run_id)
    _part(blame.show, every, run.run_id, go_to_tokens)
    _part(forecast.show, every, run.run_id)
    _part(charts.show, every, run.run_id, go_to_tokens)


def _part(show: Callable[..., None], every: float | None, *args: object) -> None:
    """A part that is looked at again by itself, in a place of its own: where it draws more or less than before, the
    parts after it stay where the browser expects them.
    """
    with st.container():
        st.fragment(show, run_every=every)(*args)


def _controls(run: RunInfo, *, paused: bool) -> None:
    steps, live, act, more = st.columns([6, 1.2, 2, 1.5], vertical_alignment="bottom", gap="medium")
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
    may = shell.principal().may_command
    with act:
        _first_button(run, paused=paused, may=may)
    with more:
        st.menu_button(
            "Commands",
            asks.menu(paused=paused),
            key="more",
            format_func=lambda kind: asks.ASKS[kind].menu,
            on_click=asking.open_chosen,
            args=(run.run_id, "more"),
            disabled=run.state is not RunState.RUNNING or not may,
            help=None if may else shell.LOOK_ONLY,
            width="stretch",
        )


def _first_button(run: RunInfo, *, paused: bool, may: bool) -> None:
    """What is asked most; of a paused run, that it goes on."""
    alive = run.state is RunState.RUNNING
    kind = "resume" if paused else asks.RESET
    due = paused or control.reset_due(queries.alerts(run.run_id))
    st.button(
        asks.ASKS[kind].menu,
        key="resume-open" if paused else "reset-open",
        on_click=asking.open_for,
        args=(run.run_id, kind),
        disabled=not alive or not may,
        help=shell.LOOK_ONLY if not may else None if alive else "Only a live run can be asked",
        type="primary" if due and may else "secondary",
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
