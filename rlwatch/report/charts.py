"""Charts of a run as SVG: a line, the level at the start, numbered onsets of findings, and a red tick for each NaN."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlwatch.glance import LIGHT, RULES
from rlwatch.report.gather import Chart, TimelineEntry
from rlwatch.wording import Markup, cut, el, joined, number, step

WIDTH, HEIGHT = 420, 150
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 16, 20
LOG_SPREAD = 200.0
"""A positive metric whose largest value is this many times its median is drawn on a logarithmic axis."""
LARGEST = 1.7e308
"""Largest value on an axis: close to the largest float."""
APART = 14.0
"""Smallest distance in pixels between two numbers above a chart; of onsets that are closer only the first has its
number.
"""

_VARIABLE = re.compile(r"var\(--(\w+)\)")
COLOURS = dict(re.findall(r"--(\w+):(#\w+)", LIGHT))


class ChartFrame:
    """Mapping of steps and values to pixels of one chart, with a linear or logarithmic value axis.

    ``window``: first and last step of all charts. ``log``: whether the axis is logarithmic.
    """

    def __init__(self, chart: Chart, window: tuple[int, int]) -> None:
        values = sorted(chart.curve.values)
        self.log = bool(values) and values[0] > 0 and values[-1] > LOG_SPREAD * values[len(values) // 2]
        level = [] if chart.baseline is None or (self.log and chart.baseline <= 0) else [chart.baseline]
        scaled = [self._scaled(value) for value in (*values[:1], *values[-1:], *level)] or [0.0, 1.0]
        low, high = min(scaled), max(scaled)
        room = (high / 2 - low / 2) * 0.1 or abs(high) * 0.05 or 0.5
        floor = 0.0 if low >= 0 and not self.log else -LARGEST  # what is never negative has no axis below 0
        self.low, self.high = max(low - room, floor), min(high + room, LARGEST)
        self.first, self.last = window

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def x(self, at: float) -> float:
        """Return the distance of the step ``at`` from the left edge, in pixels."""
        span = (self.last - self.first) or 1
        return round(LEFT + (at - self.first) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the distance of ``value`` from the top edge, in pixels."""
        share = (self._scaled(value) / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def ticks(self) -> list[float]:
        """Return the values at the bottom, the middle and the top of the chart."""
        places = [self.low, self.low / 2 + self.high / 2, self.high]
        return [10.0**place if self.log else place for place in places]


def svg(
    chart: Chart, moments: Sequence[TimelineEntry], window: tuple[int, int], size: tuple[int, int] | None = None
) -> Markup:
    """Draw one chart as an ``<svg>`` element; every text in it is escaped.

    Parameters
    ----------
    chart
        The metric with its curve.
    moments
        Entries of the timeline; those with a number are marked.
    window
        First and last step of all charts.
    size
        Width and height in pixels; None: as large as its place in the page.
    """
    frame = ChartFrame(chart, window)
    label = f"{chart.name} over steps {window[0]} to {window[1]}"
    parts = [_axes(frame), _level(chart, frame), _line(chart, frame), _bad(chart, frame), _marks(moments, frame)]
    sized: dict[str, Any] = {} if size is None else {"width": size[0], "height": size[1]}
    return el("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label, **sized)


def _axes(frame: ChartFrame) -> Markup:
    rows = [
        joined(
            el("line", cls="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=frame.y(value), y2=frame.y(value)),
            el("text", number(value), cls="tick", x=LEFT - 5, y=frame.y(value) + 3, text_anchor="end"),
        )
        for value in frame.ticks()
    ]
    first = el("text", step(frame.first), cls="tick", x=LEFT, y=HEIGHT - 5)
    last = el("text", step(frame.last), cls="tick", x=WIDTH - RIGHT, y=HEIGHT - 5, text_anchor="end")
    return joined(*rows, first, last)


def _level(chart: Chart, frame: ChartFrame) -> Markup:
    if chart.baseline is None or not math.isfinite(chart.baseline) or (frame.log and chart.baseline <= 0):
        return Markup()
    y = frame.y(chart.baseline)
    return el("line", cls="level", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)


def _line(chart: Chart, frame: ChartFrame) -> Markup:
    """Draw one polyline for each stretch without a non-finite value in between; a single point is a dot."""
    stretches: list[list[tuple[float, float]]] = [[]]
    holes = sorted({at for at, _ in chart.curve.bad})
    crossed = 0
    for at, value in zip(chart.curve.steps, chart.curve.values, strict=True):
        if crossed < len(holes) and holes[crossed] < at:
            stretches.append([])
            while crossed < len(holes) and holes[crossed] < at:
                crossed += 1
        stretches[-1].append((frame.x(at), frame.y(value)))
    return joined(*(_stretch(points) for points in stretches if points))


def _stretch(points: Sequence[tuple[float, float]]) -> Markup:
    if len(points) == 1:
        return el("circle", cls="dot", cx=points[0][0], cy=points[0][1], r=2)
    return el("polyline", cls="line", points=" ".join(f"{x},{y}" for x, y in points))


def _bad(chart: Chart, frame: ChartFrame) -> Markup:
    base = HEIGHT - BOTTOM
    ticks = [
        el(
            "line",
            el("title", f"{word} at step {at}"),
            cls="bad",
            x1=frame.x(at),
            x2=frame.x(at),
            y1=base - 10,
            y2=base,
        )
        for at, word in chart.curve.bad
    ]
    words = ", ".join(sorted({word for _, word in chart.curve.bad}))
    label = el("text", words, cls="badword", x=WIDTH - RIGHT, y=base - 12, text_anchor="end") if words else Markup()
    return joined(*ticks, label)


def _marks(moments: Sequence[TimelineEntry], frame: ChartFrame) -> Markup:
    parts: list[Markup] = []
    free_from = -math.inf
    for moment in sorted((m for m in moments if m.number), key=lambda m: m.step):
        x = frame.x(moment.step)
        title = el("title", f"{moment.number}: {moment.text}")
        parts.append(el("line", title, cls=f"mark {moment.level}", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM))
        if x >= free_from:
            parts.append(el("text", str(moment.number), cls="markno", x=x, y=TOP - 4, text_anchor="middle"))
            free_from = x + APART
    return joined(*parts)


def figures(charts: Sequence[Chart], moments: Sequence[TimelineEntry]) -> Markup:
    """Draw charts as HTML over one range of steps, with the numbered entries of the timeline; empty if there is no
    value.

    ``moments``: entries of the timeline.
    """
    window = _window(charts)
    if window is None:
        return Markup()
    inside = _inside(moments, window)
    note = el(
        "p",
        "Numbers refer to the timeline. Dotted line: level at the start. Red ticks: non-finite values. "
        "Extremes are always drawn.",
        cls="soft",
    )
    return joined(note, el("div", *(_figure(chart, inside, window) for chart in charts), cls="charts"))


def _window(charts: Sequence[Chart]) -> tuple[int, int] | None:
    everywhere = [at for c in charts for at in (*c.curve.steps[:1], *c.curve.steps[-1:], *(s for s, _ in c.curve.bad))]
    return (min(everywhere), max(everywhere)) if everywhere else None


def _inside(moments: Sequence[TimelineEntry], window: tuple[int, int]) -> list[TimelineEntry]:
    return [m for m in moments if m.number and window[0] <= m.step <= window[1]]


def _figure(chart: Chart, moments: Sequence[TimelineEntry], window: tuple[int, int]) -> Markup:
    caption = el("figcaption", cut(chart.name, 80), el("span", _notes(chart)))
    return el("figure", caption, svg(chart, moments, window))


def _notes(chart: Chart) -> str:
    notes = [chart.unit, chart.known_as]
    if chart.curve.replaced:
        notes.append(f"{chart.curve.replaced} points of earlier attempts not drawn")
    return cut(" · ".join(filter(None, notes)), 120)


HEAD = 22
"""Height in pixels of the title above a chart in a file."""


def svg_file(charts: Sequence[Chart], moments: Sequence[TimelineEntry]) -> Markup:
    """Draw the charts below one another as one SVG file that any viewer shows.

    ``moments``: entries of the timeline; those with a number are marked.
    """
    window = _window(charts) or (0, 0)
    inside, row = _inside(moments, window), HEIGHT + HEAD
    shown = [
        el(
            "g",
            el("text", cut(chart.name, 60), el("tspan", f"  {_notes(chart)}", cls="tick"), cls="title", x=6, y=15),
            el("g", svg(chart, inside, window, (WIDTH, HEIGHT)), transform=f"translate(0 {HEAD})"),
            transform=f"translate(0 {place * row})",
        )
        for place, chart in enumerate(charts)
    ]
    height = max(row * len(charts), row)
    paper = el("rect", width=WIDTH, height=height, fill=COLOURS["paper"])
    return el(
        "svg",
        el("style", Markup(_styles())),
        paper,
        *shown,
        xmlns="http://www.w3.org/2000/svg",
        width=WIDTH,
        height=height,
        viewBox=f"0 0 {WIDTH} {height}",
    )


def _styles() -> str:
    """Return the styles of charts with literal colours: few viewers other than browsers know CSS variables."""
    of_charts = "\n".join(line for line in RULES.splitlines() if line.startswith("svg ."))
    rules = (
        f"text {{ font:10px sans-serif; fill:var(--soft); }} .title {{ font-size:12px; fill:var(--ink); }}\n{of_charts}"
    )
    return _VARIABLE.sub(lambda found: COLOURS[found[1]], rules)
