"""The record of forecasts: each past alarm with what came of it, how often the chances held, and "was this right?"."""

from __future__ import annotations

from typing import Any

import streamlit as st

from rlwatch.errors import RLWatchError
from rlwatch.forecast.forecast import REACHED
from rlwatch.forecast.record import Came, Past, Record, find_past
from rlwatch.records import RunInfo

from . import format as fmt
from . import incident_acts as acts
from . import layout, queries, table
from .charts import Ink, Option
from .health import AMBER, BLUE, GREY, VERMILLION
from .layout import GoToRun
from .markup import Markup, el, joined

COLUMNS = (
    table.Column("what came of it", "tight"),
    table.Column("run"),
    table.Column("at step", "right tight"),
    table.Column("highest chance", "right tight"),
    table.Column("it was said that", "long wide"),
    table.Column("failure at", "right tight"),
    table.Column("lead", "right tight"),
    table.Column("was it right?", "long"),
)
LOOK = {
    Came.TRUE: ("●", BLUE),
    Came.FALSE: ("▲", AMBER),
    Came.MISSED: ("■", VERMILLION),
    Came.AFTERWARDS: ("◍", GREY),
    Came.OPEN: ("◌", GREY),
    Came.CUT_SHORT: ("◌", GREY),
}
JUDGE = "judge:"
"""Prefix of a click on the last column; run, attempt and step follow."""
PENDING = "judging"
"""Session key of the forecast that is being judged: (run id, step)."""


def headline(record: Record) -> str:
    """``3 of 5 alarms came true, a median of 41 steps early; 1 failure was missed``."""
    right, wrong = record.count(Came.TRUE), record.count(Came.FALSE)
    if not record.runs:
        return "Nothing was forecast yet"
    if not right + wrong:
        parts = ["No alarm was put to the test yet"]
    else:
        early = (
            f", a median of {fmt.plural(record.leads[len(record.leads) // 2], 'step')} early" if record.leads else ""
        )
        parts = [f"{right} of {fmt.plural(right + wrong, 'alarm')} came true{early}"]
    missed = record.count(Came.MISSED)
    return "; ".join(parts + ([f"{fmt.plural(missed, 'failure')} missed"] if missed else []))


def past_row(past: Past, run: RunInfo | None, *, may_judge: bool) -> table.Row:
    """The forecast as a row of :data:`COLUMNS`."""
    shape, colour = LOOK[past.came]
    said = REACHED.get(past.limit, "")
    lead = "" if past.lead is None else fmt.plural(past.lead, "step")
    return table.Row(
        cells=[
            table.mark(shape, colour, past.came.value),
            table.run_link(past.run_id, run.project if run else "", run.name if run else ""),
            table.text(fmt.step(past.step), title=f"until step {fmt.step(past.last)}"),
            table.text("" if past.p50 is None else fmt.chance(past.p50)),
            table.text(said, quiet=True),
            table.text("" if past.onset is None else fmt.step(past.onset), title=past.type),
            table.text(lead),
            answer_cell(past, may_judge=may_judge),
        ],
        opens="",
    )


def answer_cell(past: Past, *, may_judge: bool) -> table.Cell:
    """A link to answer, or the answer that was given."""
    asks = f"{JUDGE}{past.run_id}:{past.step}"
    if past.answer is not None:
        words = f"{'right' if past.answer.right else 'wrong'}, says {fmt.shorten(past.answer.by, 60)}"
        why = f": {fmt.shorten(past.answer.why, 120)}" if past.answer.why else ""
        return table.link(words + why, "forecasts", asks) if may_judge else table.text(words + why)
    return table.link("say so", "forecasts", asks) if may_judge else table.text("nobody said", quiet=True)


def curve_option(record: Record, ink: Ink) -> Option:
    """Chance said against failures seen, a point a bin, the larger the more steps it has; the diagonal is right."""
    most = max((each.steps for each in record.curve), default=1)
    points = [
        {
            "value": [round(100 * each.said, 1), round(100 * each.came, 1)],
            "symbolSize": 7 + 15 * (each.steps / most) ** 0.5,
            "name": f"{fmt.step(each.steps)} steps of {fmt.plural(each.runs, 'run')}",
        }
        for each in record.curve
    ]
    axis: dict[str, Any] = {
        "type": "value",
        "min": 0,
        "max": 100,
        "axisLabel": {"color": ink.quiet, "fontSize": 11},
        "splitLine": {"lineStyle": {"color": ink.grid}},
        "nameLocation": "middle",
        "nameTextStyle": {"color": ink.quiet, "fontSize": 11},
    }
    diagonal = {"type": "line", "data": [[0, 0], [100, 100]], "symbol": "none", "silent": True,
                "lineStyle": {"color": ink.quiet, "type": "dashed", "width": 1}}  # fmt: skip
    seen = {"type": "scatter", "data": points, "itemStyle": {"color": ink.line}}
    return {
        "grid": {"left": 48, "right": 16, "top": 12, "bottom": 44},
        "xAxis": axis | {"name": "chance that was given, %", "nameGap": 26},
        "yAxis": axis | {"name": "failures that came, %", "nameGap": 32},
        "tooltip": {"trigger": "item"},
        "animation": False,
        "series": [diagonal, seen],
    }


def curve_table(record: Record) -> Markup:
    """The same in numbers."""
    head = el("tr", *(el("th", name) for name in ("said", "came", "steps", "runs")))
    rows = [
        el(
            "tr",
            *(el("td", text) for text in (fmt.chance(each.said), fmt.chance(each.came))),
            *(el("td", fmt.step(count)) for count in (each.steps, each.runs)),
        )
        for each in record.curve
    ]
    return el("table", head, *rows, cls="rl-numbers")


# The dialog in which a person says whether a forecast was right.


def _dialog_if_open() -> None:
    asked = st.session_state.get(PENDING)
    if asked:
        st.dialog("Was this right?", width="medium", on_dismiss=_close)(_dialog)(*asked)


def _close() -> None:
    st.session_state.pop(PENDING, None)


def _dialog(run_id: str, step: int) -> None:
    run = queries.run(run_id)
    past = find_past(queries.forecast_of_run(run), step)
    said = REACHED.get(past.limit, "")
    chance = "" if past.p50 is None else f"{fmt.chance(past.p50)} within 50 steps"
    facts = [f"from step {fmt.step(past.step)} to {fmt.step(past.last)}", chance, said, past.came.value]
    st.html(
        joined(
            el("div", fmt.shorten(run.name or run_id, 240), cls="rl-family"),
            el("div", *(el("span", fact) for fact in facts if fact), cls="rl-facts"),
        )
    )
    st.caption("Did something go wrong with this run soon after? `rlwatch forecast calibrate` goes by the answers.")
    verdict = st.radio("It was", ["right", "wrong"], horizontal=True, key="judge-right", index=None)
    why = st.text_input("Why", key="judge-why", max_chars=300, placeholder="shown to whoever looks next")
    layout.signature()
    send, cancel = st.columns([1, 1])
    if send.button("Keep the answer", type="primary", key="judge", width="stretch"):
        _keep(past, verdict, why or "")
    if cancel.button("Cancel", key="judge-cancel", width="stretch"):
        _close()
        st.rerun()


def _keep(past: Past, verdict: str | None, why: str) -> None:
    if verdict is None:
        st.error("Say first whether it was right or wrong.")
        return
    try:
        acts.answer_forecast(queries.store(), past, by=layout.principal(), right=verdict == "right", why=why)
    except RLWatchError as error:
        st.error("The answer was not kept.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    _close()
    st.toast("Answer kept", icon=":material/check:")
    st.rerun()


# The page.


def page(go_to_run: GoToRun) -> None:
    """The record of all runs of the store that had forecasts."""
    with layout.readable():
        _dialog_if_open()
        record, left = queries.forecast_record()
        runs = queries.runs_by_id()
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", headline(record), cls="rl-head"))
        with store:
            layout.store_line(
                fmt.plural(record.runs, "run") + " with forecasts", *([f"{left} older left out"] * (left > 0))
            )
        if not record.runs:
            st.caption("The forecaster speaks once a run has some 50 steps with the metrics it goes by.")
            return
        _alarms(record, runs, go_to_run)
        _curve(record)


def _alarms(record: Record, runs: dict[str, RunInfo], go_to_run: GoToRun) -> None:
    may_judge = layout.principal().may_command
    st.caption(
        "An alarm came true where a failure, by the labels that forecasters are trained on, began within 50 steps."
    )
    if not record.past:
        st.caption("No alarm was raised, and no failure missed.")
        return
    rows = [past_row(past, runs.get(past.run_id), may_judge=may_judge) for past in record.past]
    opened = table.show("forecasts", COLUMNS, rows)
    if opened is not None and opened.startswith(JUDGE):
        run_id, _, step = opened.removeprefix(JUDGE).rpartition(":")
        st.session_state[PENDING] = (run_id, int(step))
        st.rerun()
    elif opened is not None:
        go_to_run(opened)


def _curve(record: Record) -> None:
    if not record.curve:
        return
    st.html(el("div", "Did the chances hold?", cls="rl-family"))
    chart, numbers = st.columns([3, 2], gap="medium")
    with chart:
        st.echarts_chart(
            curve_option(record, layout.ink()),
            height=320,
            key="reliability",
            alt="Reliability: chance of a failure within 50 steps that was given, against the share that came",
        )
    with numbers:
        st.html(joined(curve_table(record)))
        st.caption(
            "Each step with a chance counts once its 50 steps are over, so that steps of one run are not independent: "
            "look at the runs, too. On the dashed line chances are right; below it there were fewer failures."
        )
