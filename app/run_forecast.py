"""The forecast of a run as HTML and charts: probability, time and main drivers of a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from rlwatch.forecast import Forecast
from rlwatch.forecast.forecast import limit_sentence, line_sentence
from rlwatch.forecast.gate import NO_SIGNAL
from rlwatch.records import RunInfo, RunState

from . import charts, layout, queries
from . import format as fmt
from .board import BoardChart, ChartLine, ChartSection, lines_of
from .charts import Ink
from .health import AMBER, LOOKS, Word
from .markup import Markup, el, joined
from .queries import RunForecasts
from .thinning import Branches, ThinnedCurve

MOST_BARS = 4
"""Most drivers of a forecast that are shown."""
ALARM = 1.0
"""Risk at which a forecast becomes an alarm."""


def forecast_facts(forecasts: RunForecasts) -> Markup:
    """Return current probability, next limit and highest probability as HTML; or the reason that there
    is no forecast.
    """
    now = forecasts.newest
    if now.limits_only:
        return el("div", *_by_limits(now), cls="rl-facts")
    if now.p50 is None:
        return el("div", el("span", absent_words(now)), *_highest(forecasts), cls="rl-facts")
    look = LOOKS[Word.AT_RISK if now.alarm else Word.HEALTHY]
    chance = el("span", el("span", look.shape, style=f"color:{look.colour}"), f" {fmt.chance(now.p50)}", cls="rl-word")
    parts = [
        el("span", chance, " within 50 steps"),
        el("span", limit_sentence(now) or "no limit in sight") if now.alarm or now.steps_to is not None else Markup(),
        *_highest(forecasts),
        el("span", el("span", "at step ", cls="label"), fmt.step(now.step)),
        el("span", now.caveat[:1].upper() + now.caveat[1:], cls="rl-quiet") if now.caveat else Markup(),
    ]
    return el("div", *parts, cls="rl-facts")


def absent_words(forecast: Forecast) -> str:
    """Return the reason for the absence of a forecast, as a sentence."""
    reason = forecast.absent.removeprefix("no forecast because").strip()
    if forecast.over or reason.startswith("no forecast"):
        return fmt.shorten(forecast.absent[:1].upper() + forecast.absent[1:], 300)
    return f"No forecast yet: {fmt.shorten(reason, 300)}" if reason else "No forecast yet."


def _by_limits(now: Forecast) -> list[Markup]:
    """Describe a run that logs too little for a chance: the limit that it approaches, and why there is no chance."""
    if now.limits_only.startswith(NO_SIGNAL):
        words = [text[0].upper() + text[1:] for text in (now.limits_only, line_sentence(now)) if text]
        return [
            *(el("span", text) for text in words),
            el("span", el("span", "at step ", cls="label"), fmt.step(now.step)),
        ]
    look = LOOKS[Word.AT_RISK if now.alarm else Word.HEALTHY]
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
    """Return the metrics with the most evidence for the newest forecast as HTML, each with its share as a bar.

    ``ink``: colours.
    """
    title = el("div", "What drives it", cls="rl-panel")
    if not forecast.why:
        return el("div", title, el("div", "no dominant metric", cls="rl-quiet"))
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


def forecast_panels(traces: Mapping[str, Branches], ink: Ink) -> list[BoardChart]:
    """Return two charts: the probabilities (nested areas, p50 as the line) and the risk with its alarm threshold.

    ``traces``: lines of the forecasts by name. ``ink``: colours. A run without probabilities has only the chart of the
    risk.
    """
    lines = traces["forecast/risk"]
    top = max(1.25, *(float(value) for value in lines.current.values), 0.0)
    rules = ((ALARM, "alarm"),)
    risk = BoardChart(
        "forecast/risk", "Risk", lines_of(lines, ink), (0.0, 1.1 * top), "times the alarm threshold", rules=rules
    )
    if "forecast/p50" not in traces:
        return [risk]
    main, wide, near = (_percent(traces[f"forecast/{name}"]) for name in ("p50", "p100", "p20"))
    areas = [
        ChartLine(wide.current, ink.band, "within 100 steps", width=0.6, alpha=0.6, fill=f"{ink.band}1E"),
        ChartLine(near.current, ink.band, "within 20 steps", width=0.6, alpha=0.6, fill=f"{ink.band}1E"),
    ]
    drawn = [
        ChartLine(main.current, ink.line, "within 50 steps", fill=f"{ink.band}24"),
        *areas,
        *lines_of(main, ink)[1:],
    ]
    chance = BoardChart(
        "forecast/p50", "Chance of a failure", drawn, (0.0, 100.0), "% \u00b7 line: within 50 steps; areas: 20, 50, 100"
    )
    return [chance, risk]


def _percent(lines: Branches) -> Branches:
    return Branches(_hundredfold(lines.current), tuple(map(_hundredfold, lines.replaced)))


def _hundredfold(curve: ThinnedCurve) -> ThinnedCurve:
    return replace(curve, values=100.0 * curve.values)


def forecast_section(run: RunInfo, window: tuple[int, int], ink: Ink) -> ChartSection | None:
    """Return the section with the charts of a run's forecasts over ``window``, or None without forecasts.

    ``ink``: colours.
    """
    forecasts = queries.run_forecasts(run, window)
    if forecasts is None or not forecasts.traces:
        return None
    return ChartSection("forecast", "Forecast", forecast_panels(forecasts.traces, ink))


def show_forecast(run_id: str) -> None:
    """Draw the newest forecast of a run in a line, with its main drivers below."""
    with layout.readable("The forecast"):
        run = queries.run(run_id)
        outline = queries.outline(run)
        shown = charts.read_window(st.query_params, outline.first, outline.last)
        forecasts = queries.run_forecasts(run, (shown.low, shown.high))
        if forecasts is None:
            return
        over = run.state is not RunState.RUNNING
        st.html(el("div", "Forecast at its end" if over else "Forecast", cls="rl-family"))
        st.html(joined(forecast_facts(forecasts)))
        if forecasts.traces:
            st.html(joined(driver_bars(forecasts.newest, layout.ink())))
