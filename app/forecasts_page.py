"""Page with the record of forecasts: past alarms and their outcomes, calibration, and a dialog for users' answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import streamlit as st

from rlwatch.errors import RLWatchError
from rlwatch.forecast.forecast import REACHED
from rlwatch.forecast.record import Came, Past, Record, find_past
from rlwatch.records import RunInfo

from . import board, layout, queries, table
from . import format as fmt
from . import incident_acts as acts
from .board import Board, BoardChart, ChartLine, ChartSection, StepAxis
from .charts import Ink
from .health import AMBER, BLUE, GREY, VERMILLION
from .layout import GoToRun
from .markup import Markup, el, joined
from .thinning import ThinnedCurve

COLUMNS = (
    table.TableColumn("outcome", "tight"),
    table.TableColumn("run"),
    table.TableColumn("at step", "right tight"),
    table.TableColumn("peak risk", "right tight"),
    table.TableColumn("forecast", "long wide"),
    table.TableColumn("failure at", "right tight"),
    table.TableColumn("lead", "right tight"),
    table.TableColumn("feedback", "long"),
)
LOOK = {
    Came.TRUE: ("●", BLUE),
    Came.FALSE: ("▲", AMBER),
    Came.MISSED: ("■", VERMILLION),
    Came.AFTERWARDS: ("◍", GREY),
    Came.OPEN: ("◌", GREY),
    Came.CUT_SHORT: ("◌", GREY),
}
NONE_YET = (
    "A run gets a chance of failure only if its log is of a kind on which the forecaster has proven skill on other "
    "people's runs. To accept the evidence of rlwatch's own runs, set "
    "`RLWATCH_FORECAST_EVIDENCE=own` before training starts; forecasts then begin after 40 steps."
)
JUDGE = "judge:"
"""Prefix of the message of a click on the last column; run id and step follow."""
STEPS_OF_CHANCE = 1000
"""Positions on the axis of probabilities: tenths of a per cent."""
PENDING = "judging"
"""Session key of the forecast that is being rated: (run id, step)."""


def headline(record: Record) -> str:
    """Return the headline of the page: ``3 of 5 alarms came true, a median of 41 steps early; 1 failure missed``."""
    right, wrong = record.count(Came.TRUE), record.count(Came.FALSE)
    if not record.runs:
        return "No forecasts yet"
    if not right + wrong:
        parts = ["No alarm has an outcome yet"]
    else:
        early = (
            f", a median of {fmt.plural(record.leads[len(record.leads) // 2], 'step')} early" if record.leads else ""
        )
        parts = [f"{right} of {fmt.plural(right + wrong, 'alarm')} came true{early}"]
    missed = record.count(Came.MISSED)
    return "; ".join(parts + ([f"{fmt.plural(missed, 'failure')} missed"] if missed else []))


def past_row(past: Past, run: RunInfo | None, *, may_judge: bool) -> table.TableRow:
    """Return a past forecast alarm as a row of the table with :data:`COLUMNS`; ``may_judge``: the user may rate it."""
    shape, colour = LOOK[past.came]
    limit_label = REACHED.get(past.limit, "")
    lead = "" if past.lead is None else fmt.plural(past.lead, "step")
    return table.TableRow(
        cells=[
            table.mark(shape, colour, past.came.value),
            table.run_link(past.run_id, run.project if run else "", run.name if run else ""),
            table.text(fmt.step(past.step), title=f"until step {fmt.step(past.last)}"),
            table.text("" if past.p50 is None else fmt.chance(past.p50)),
            table.text(limit_label, quiet=True),
            table.text("" if past.onset is None else fmt.step(past.onset), title=past.type),
            table.text(lead),
            answer_cell(past, may_judge=may_judge),
        ],
        opens="",
    )


def answer_cell(past: Past, *, may_judge: bool) -> table.Cell:
    """Return a table cell with the user's answer that the forecast ``past`` was right or wrong, linked to the dialog if
    ``may_judge``.
    """
    asks = f"{JUDGE}{past.run_id}:{past.step}"
    if past.answer is not None:
        words = f"{'right' if past.answer.right else 'wrong'} ({fmt.shorten(past.answer.by, 60)})"
        why = f": {fmt.shorten(past.answer.why, 120)}" if past.answer.why else ""
        return table.link(words + why, "forecasts", asks) if may_judge else table.text(words + why)
    return table.link("rate", "forecasts", asks, acts=True) if may_judge else table.text("no feedback", quiet=True)


def curve_board(record: Record, ink: Ink) -> Board:
    """Return the calibration curve as a board: observed frequency of failures against predicted probability, a dot for
    each bin.

    ``ink``: colours.
    """
    each = sorted(record.curve, key=lambda each: each.said)
    seen = _line([one.said for one in each], [one.came for one in each])
    lines = [
        ChartLine(seen, ink.line, "observed failures", dots=11),
        ChartLine(_line([0.0, 1.0], [0.0, 1.0]), ink.quiet, dash=(4, 4), mute=True),
    ]
    panel = BoardChart("reliability", "Observed failures, %", lines, (-4.0, 104.0), "by predicted risk, %", height=300)
    place = StepAxis("chance", np.array([0.0, STEPS_OF_CHANCE]), np.array([0.0, 100.0]))
    ends = (0, STEPS_OF_CHANCE)
    return Board("reliability", ends, ends, ink, place, sections=[ChartSection("curve", "", [panel], span=3)])


def _line(predicted: Sequence[float], came: Sequence[float]) -> ThinnedCurve:
    at = np.round(STEPS_OF_CHANCE * np.array(predicted)).astype(np.int64)
    return ThinnedCurve(at, 100.0 * np.array(came), np.zeros(len(at), dtype=np.bool_))


def curve_table(record: Record) -> Markup:
    """Return the calibration of the forecasts as an HTML table."""
    head = el("tr", *(el("th", name) for name in ("predicted", "observed", "steps", "runs")))
    rows = [
        el(
            "tr",
            *(el("td", text) for text in (fmt.chance(each.said), fmt.chance(each.came))),
            *(el("td", fmt.step(count)) for count in (each.steps, each.runs)),
        )
        for each in record.curve
    ]
    return el("table", head, *rows, cls="rl-numbers")


# The dialog in which a user judges whether a forecast was right.


def _dialog_if_open() -> None:
    asked = st.session_state.get(PENDING)
    if asked:
        st.dialog("Was this forecast right?", width="medium", on_dismiss=_close)(_dialog)(*asked)


def _close() -> None:
    st.session_state.pop(PENDING, None)


def _dialog(run_id: str, step: int) -> None:
    run = queries.run(run_id)
    past = find_past(queries.forecast_of_run(run), step)
    limit_label = REACHED.get(past.limit, "")
    chance = "" if past.p50 is None else f"{fmt.chance(past.p50)} within 50 steps"
    facts = [f"from step {fmt.step(past.step)} to {fmt.step(past.last)}", chance, limit_label, past.came.value]
    st.html(
        joined(
            el("div", fmt.shorten(run.name or run_id, 240), cls="rl-family"),
            el("div", *(el("span", fact) for fact in facts if fact), cls="rl-facts"),
        )
    )
    st.caption("Did the run fail soon after? `rlwatch forecast calibrate` uses these answers.")
    verdict = st.radio("The forecast was", ["right", "wrong"], horizontal=True, key="judge-right", index=None)
    why = st.text_input("Why", key="judge-why", max_chars=300, placeholder="visible to everyone")
    layout.signature()
    send, cancel = st.columns([1, 1])
    if send.button("Save", type="primary", key="judge", width="stretch"):
        _keep(past, verdict, why or "")
    if cancel.button("Cancel", key="judge-cancel", width="stretch"):
        _close()
        st.rerun()


def _keep(past: Past, verdict: str | None, why: str) -> None:
    if verdict is None:
        st.error("Choose right or wrong.")
        return
    try:
        acts.answer_forecast(queries.store(), past, by=layout.principal(), right=verdict == "right", why=why)
    except RLWatchError as error:
        st.error("The answer was not saved.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    _close()
    st.toast("Answer saved", icon=":material/check:")
    st.rerun()


# The page.


def page(go_to_run: GoToRun) -> None:
    """Draw the record of forecasts of all runs of the store; ``go_to_run`` opens the page of a run."""
    with layout.readable():
        _dialog_if_open()
        record, left = queries.forecast_record()
        runs = queries.runs_by_id()
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", headline(record), cls="rl-head"))
        with store:
            layout.store_line(
                fmt.plural(record.runs, "run") + " with forecasts", *([f"{left} older not shown"] * (left > 0))
            )
        if not record.runs:
            st.caption(NONE_YET)
            return
        _alarms(record, runs, go_to_run)
        _curve(record)


def _alarms(record: Record, runs: dict[str, RunInfo], go_to_run: GoToRun) -> None:
    may_judge = layout.principal().may_command
    st.caption("An alarm is true if a failure began within 50 steps of it (labelled as in training).")
    if not record.past:
        st.caption("No alarms and no missed failures.")
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
    st.html(el("div", "Calibration: predicted / observed", cls="rl-family"))
    chart, numbers = st.columns([3, 2], gap="medium")
    with chart:
        board.library()
        board.show_by_address(curve_board(record, layout.ink()))
    with numbers:
        st.html(joined(curve_table(record)))
        st.caption(
            "Each forecast step counts after its 50 steps are over. Steps of one run are not independent: check the "
            "number of runs, too. The dashed line is perfect calibration; below it, fewer failures were observed."
        )
