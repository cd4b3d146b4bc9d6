"""Alerts: what was told to whom about which run, newest first."""

from __future__ import annotations

import time
from collections.abc import Callable

import streamlit as st

from .. import alarms, queries, shell, table
from .. import format as fmt
from ..markup import el
from . import taking


def page(go_to_run: Callable[[str], None]) -> None:
    """Every alert of the store, refreshed while somebody looks."""
    with shell.readable():
        taking.dialog_if_open()
    st.fragment(_body, run_every=shell.REFRESH_S)(go_to_run)


def _body(go_to_run: Callable[[str], None]) -> None:
    with shell.readable():
        now, alerts, runs = time.time(), queries.alerts(), queries.runs_by_id()
        entries = alarms.entries(alerts, runs, queries.outbox(), queries.standing(alerts, runs, now))
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", alarms.headline(entries), cls="rl-head"))
        with store:
            shell.store_line(fmt.plural(len(entries), "alert"))
        _silences(now)
        if not entries:
            st.caption("Nothing has raised an alarm yet. What does is decided by the rules in rlwatch.toml.")
            return
        shown = alarms.matching(entries, _choice())
        may_take = shell.principal().may_command
        opened = table.show("alerts", alarms.COLUMNS, [alarms.row(e, now, may_take=may_take) for e in shown])
        if opened is not None and opened.startswith(alarms.TAKE):
            taking.open_for(opened.removeprefix(alarms.TAKE))
            st.rerun()  # the dialog lives outside of the part that is looked at again
        elif opened is not None:
            go_to_run(opened)


def _silences(now: float) -> None:
    lasting = queries.silences(now)
    if lasting:
        with st.expander(
            f"{fmt.plural(len(lasting), 'silence')}: nobody is told of these", icon=":material/volume_off:"
        ):
            st.text("\n".join(alarms.silence_words(silence, now) for silence in lasting))
            st.caption("`rlwatch alerts silences` lists them, `rlwatch alerts unsilence ID` ends one.")


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
