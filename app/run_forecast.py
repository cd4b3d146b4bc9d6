"""The forecast of a run: how likely a failure is, when, and what drives it; in words, bars and a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import streamlit as st

from rlwatch.forecast import Forecast
from rlwatch.forecast.forecast import limit_sentence

from . import charts, layout, queries
from . import format as fmt
from .charts import PLAIN, Ink, Mark, Option, Plot, Scale, family_option, height, points
from .health import AMBER, GREY, LOOKS, Word
from .markup import Markup, el, joined
from .queries import RunForecasts, Trace
from .thinning import Branches, Curve

COLUMNS = 2
MOST_BARS = 4
"""Metrics that are shown as what drives a forecast."""
ALARM = 1.0
"""The risk from which a forecast is an alarm."""


class Linear(Plot):
    """A panel whose values are drawn as they are: a chance is one of a hundred, not of its own median."""

    @property
    def scale(self) -> Scale:
        """The plain one."""
        return PLAIN


def forecast_facts(forecasts: RunForecasts) -> Markup:
    """Chance now, the limit in sight, and the highest chance so far; or the reason why there is no forecast."""
    now = forecasts.newest
    if now.limits_only:
        return el("div", *_by_limits(now), cls="rl-facts")
    if now.p50 is None:
        return el("div", el("span", absent_words(now)), *_highest(forecasts), cls="rl-facts")
    look = LOOKS[Word.WATCH if now.alarm else Word.HEALTHY]
    chance = el("span", el("span", look.shape, style=f"color:{look.colour}"), f" {fmt.chance(now.p50)}", cls="rl-word")
    parts = [
        el("span", chance, " within 50 steps"),
        el("span", limit_sentence(now) or "no limit in sight") if now.alarm or now.steps_to is not None else Markup(),
        *_highest(forecasts),
        el("span", el("span", "at step ", cls="label"), fmt.step(now.step)),
    ]
    return el("div", *parts, cls="rl-facts")


def absent_words(forecast: Forecast) -> str:
    """Reason for the absence of a forecast, as a sentence."""
    reason = forecast.absent.removeprefix("no forecast because").strip()
    return f"No forecast yet: {fmt.shorten(reason, 300)}" if reason else "No forecast yet."


def _by_limits(now: Forecast) -> list[Markup]:
    """Words for a run that logs too little for a chance: the limit it is on its way to, and why no more."""
    look = LOOKS[Word.WATCH if now.alarm else Word.HEALTHY]
    sentence = limit_sentence(now) if now.alarm else "no limit near"
    word = el("span", el("span", look.shape, style=f"color:{look.colour}"), f" {sentence}", cls="rl-word")
    reason = now.limits_only.removeprefix("no chance is given because").strip()
    return [
        word,
        el("span", el("span", "at step ", cls="label"), fmt.step(now.step)),
        el("span", f"Limits alone are watched: {fmt.shorten(reason, 300)}", cls="rl-quiet"),
    ]


def _highest(forecasts: RunForecasts) -> list[Markup]:
    if forecasts.highest is None:
        return []
    chance, step = forecasts.highest
    return [el("span", el("span", "highest ", cls="label"), f"{fmt.chance(chance)} at step {fmt.step(step)}")]


def driver_bars(forecast: Forecast, ink: Ink) -> Markup:
    """Drivers of the newest forecast: each metric with its share as a bar."""
    title = el("div", "What drives it", cls="rl-panel")
    if not forecast.why:
        return el("div", title, el("div", "nothing stands out", cls="rl-quiet"))
    colour = AMBER if forecast.alarm else ink.line
    rows = [cell for reason in forecast.why[:MOST_BARS] for cell in _bar(reason.metric, reason.share, colour)]
    note = el("div", f"share of the forecast at step {fmt.step(forecast.step)}", cls="rl-quiet")
    return el("div", title, note, el("div", *rows, cls="rl-bars"))


def _bar(metric: str, share: float, colour: str) -> list[Markup]:
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}%"
    return [
        el("span", fmt.shorten(metric, 80), cls="name"),
        el("span", fmt.percent(share), cls="share"),
        el("span", cls="bar", style=f"width:{width};background:{colour}"),
    ]


def forecast_option(traces: Mapping[str, Trace], marks: Sequence[Mark], window: tuple[int, int], ink: Ink) -> Option:
    """Two panels: the chances (nested areas, p50 as the line) and the risk with the threshold it alarms at.

    The risk alone of a run that is given no chances.
    """
    risk = Linear("Risk", "times the alarm threshold", traces["forecast/risk"].lines)
    if "forecast/p50" not in traces:
        return _with_threshold(family_option([risk], marks, window, ink, COLUMNS), risk, axis=0)
    chance = Linear(
        "Chance of a failure", "% · line: within 50 steps; areas: 20, 50, 100", _percent(traces["forecast/p50"])
    )
    made = family_option([chance, risk], marks, window, ink, COLUMNS)
    main = made["series"][0]
    main["name"], main["areaStyle"] = "within 50 steps", {"color": ink.band, "opacity": 0.14}
    for name, label in (("forecast/p100", "within 100 steps"), ("forecast/p20", "within 20 steps")):
        made["series"].append(_area(label, _percent(traces[name]).current, ink))
    made["yAxis"][0] |= {"min": 0, "max": 100, "interval": 25, "scale": False}
    return _with_threshold(made, risk, axis=2)


def _with_threshold(made: Option, risk: Plot, axis: int) -> Option:
    """The risk from 0, with the line it alarms at always in sight."""
    top = max(1.25, *(float(value) for value in risk.lines.current.values), 0.0)
    made["yAxis"][axis] |= {"min": 0, "max": float(f"{1.1 * top:.2g}"), "scale": False}
    risk_line = next(s for s in made["series"] if s.get("name") == "Risk")
    risk_line["markLine"]["data"].append(_threshold())
    return made


def _percent(trace: Trace) -> Branches:
    lines = trace.lines
    return Branches(_hundredfold(lines.current), tuple(map(_hundredfold, lines.replaced)))


def _hundredfold(curve: Curve) -> Curve:
    return replace(curve, values=100.0 * curve.values)


def _area(label: str, curve: Curve, ink: Ink) -> Option:
    return {
        "type": "line",
        "name": label,
        "xAxisIndex": 0,
        "yAxisIndex": 0,
        "data": points(curve),
        "showSymbol": False,
        "z": 1,
        "itemStyle": {"color": ink.band},
        "lineStyle": {"width": 0.6, "color": ink.band, "opacity": 0.5},
        "areaStyle": {"color": ink.band, "opacity": 0.12},
    }


def _threshold() -> Option:
    style = {"color": AMBER, "type": "solid", "width": 1.2}
    label = {"position": "insideStartTop", "formatter": "alarm", "fontSize": 10, "color": GREY, "distance": 1}
    return {"yAxis": ALARM, "lineStyle": style, "label": label}


def show_forecast(run_id: str) -> None:
    """One line; below it, once there is a forecast, the chances, the risk and the reasons."""
    with layout.readable("The forecast"):
        run = queries.run(run_id)
        outline = queries.outline(run)
        shown = charts.read_window(st.query_params, outline.first, outline.last)
        forecasts = queries.run_forecasts(run, (shown.low, shown.high))
        if forecasts is None:
            return
        st.html(el("div", "Forecast", cls="rl-family"))
        st.html(joined(forecast_facts(forecasts)))
        if not forecasts.traces:
            return
        marked = charts.marks_of_run(
            queries.alerts(run_id), queries.findings(run_id), queries.events(run_id), outline.starts
        )
        chart, why = st.columns([2, 1], gap="small")
        with chart:
            st.echarts_chart(
                forecast_option(forecasts.traces, marked, (shown.low, shown.high), layout.ink()),
                height=height(2, COLUMNS),
                key="chart-forecast",
                alt="Forecast: chance of a failure within 20, 50 and 100 steps, and risk, by step",
            )
        with why:
            st.html(joined(driver_bars(forecasts.newest, layout.ink())))
