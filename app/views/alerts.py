"""Alerts: what was told to whom about which run, newest first."""

from __future__ import annotations

import time
from collections.abc import Callable

import streamlit as st

from .. import alarms, queries, shell, table
from .. import format as fmt
from ..markup import el


def page(go_to_run: Callable[[str], None]) -> None:
    """Every alert of the store, refreshed while somebody looks."""
    st.fragment(_body, run_every=shell.REFRESH_S)(go_to_run)


def _body(go_to_run: Callable[[str], None]) -> None:
    with shell.readable():
        entries = alarms.entries(queries.alerts(), queries.runs_by_id(), queries.outbox())
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", alarms.headline(entries), cls="rl-head"))
        with store:
            shell.store_line(fmt.plural(len(entries), "alert"))
        if not entries:
            st.caption("Nothing has raised an alarm yet. What does is decided by the rules in rlwatch.toml.")
            return
        shown = alarms.matching(entries, _choice())
        opened = table.show("alerts", alarms.COLUMNS, [alarms.row(entry, time.time()) for entry in shown])
        if opened is not None:
            go_to_run(opened)


def _choice() -> str:
    chosen = st.segmented_control(
        "Which",
        alarms.CHOICES,
        default=alarms.CHOICES[0],
        required=True,
        key="which",
        label_visibility="collapsed",
        bind="query-params",
    )
    return str(chosen or alarms.CHOICES[0])
