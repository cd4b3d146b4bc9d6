"""The post-mortem as one HTML file: no script, no request to anywhere, every datum as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlwatch.diagnosis import Cause, Diagnosis
from rlwatch.glance import DARK, LIGHT, RULES, actions_block, cause_block, table_cell
from rlwatch.report.gather import TABLES, Chart, Facts, Moment, Rows
from rlwatch.wording import Markup, cut, el, joined, number, sentence, step

STYLE = (
    f":root {{ {LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n{RULES}"
    + """
* { box-sizing:border-box; }
body { margin:0 auto; max-width:1080px; padding:2rem 1.25rem 4rem; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif; font-variant-numeric:tabular-nums; }
h1 { font-size:1.6rem; line-height:1.25; margin:0; overflow-wrap:anywhere; }
h2 { font-size:1.1rem; margin:2.4rem 0 .7rem; padding-bottom:.25rem; border-bottom:1px solid var(--rule); }
h3 { font-size:1rem; margin:1.2rem 0 .3rem; }
dl.head { display:grid; grid-template-columns:max-content 1fr; gap:.1rem 1rem; margin:.9rem 0 0; font-size:.9rem; }
dl.head dt { color:var(--soft); } dl.head dd { margin:0; overflow-wrap:anywhere; }
.no { display:inline-block; min-width:1.35em; text-align:center; border:1px solid currentColor; border-radius:50%;
  font-size:.75rem; line-height:1.3em; font-weight:600; }
footer { margin-top:3rem; color:var(--soft); font-size:.8rem; }
@media print { body { max-width:none; padding:0; font-size:11px; } h2 { break-after:avoid; }
  figure, li { break-inside:avoid; } }
"""
)


# A chart as SVG by hand: a line, the level in health, numbered onsets, and a red tick for each NaN.

WIDTH, HEIGHT = 420, 150
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 16, 20
LOG_SPREAD = 200.0
"""A positive metric whose largest value is this many times its median is drawn on a logarithmic axis."""
LARGEST = 1.7e308
"""No axis goes beyond what a float can hold."""
APART = 14.0
"""Pixels between two numbers above a chart; of onsets nearer than that only the first has its number."""


class Frame:
    """Coordinates of steps and values in the picture. ``window``: first and last step of all charts."""

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
        """Pixels from the left."""
        span = (self.last - self.first) or 1
        return round(LEFT + (at - self.first) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (self._scaled(value) / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def ticks(self) -> list[float]:
        """The values at the bottom, the middle and the top."""
        places = [self.low, self.low / 2 + self.high / 2, self.high]
        return [10.0**place if self.log else place for place in places]


def svg(chart: Chart, moments: Sequence[Moment], window: tuple[int, int]) -> Markup:
    """The chart as an ``<svg>`` element; every text in it is escaped."""
    frame = Frame(chart, window)
    label = f"{chart.name} over steps {window[0]} to {window[1]}"
    parts = [_axes(frame), _level(chart, frame), _line(chart, frame), _bad(chart, frame), _marks(moments, frame)]
    return el("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def _axes(frame: Frame) -> Markup:
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


def _level(chart: Chart, frame: Frame) -> Markup:
    if chart.baseline is None or not math.isfinite(chart.baseline) or (frame.log and chart.baseline <= 0):
        return Markup()
    y = frame.y(chart.baseline)
    return el("line", cls="level", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)


def _line(chart: Chart, frame: Frame) -> Markup:
    """One polyline for each stretch without a non-finite value in between; a lone point is a dot."""
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


def _bad(chart: Chart, frame: Frame) -> Markup:
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


def _marks(moments: Sequence[Moment], frame: Frame) -> Markup:
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


# Plain rows as an HTML table.


def table(rows: Rows) -> Markup:
    """Nothing where there are no rows; long ones behind a fold."""
    if not rows.rows:
        return Markup()
    numeric = [header.startswith(">") for header in rows.headers]
    head = el("tr", *(table_cell("th", h.removeprefix(">"), n) for h, n in zip(rows.headers, numeric, strict=True)))
    body = [el("tr", *(table_cell("td", c, n) for c, n in zip(row, numeric, strict=True))) for row in rows.rows]
    whole = el("div", el("table", el("thead", head), el("tbody", *body)), cls="scroll")
    note = el("p", rows.note, cls="soft") if rows.note else Markup()
    more = el("p", f"{rows.left_out} more not shown.", cls="soft") if rows.left_out else Markup()
    if not rows.folded:
        return joined(note, whole, more)
    return joined(note, el("details", el("summary", f"{len(rows.rows)} rows"), whole, more))


def _other_causes(diagnosis: Diagnosis) -> Markup:
    """All but the first."""
    return joined(*map(_other, diagnosis.causes[1:]))


def _other(cause: Cause) -> Markup:
    return joined(
        el("h3", cause.title, el("span", cause.sure.value, cls="badge")),
        el("p", sentence(cause.summary)),
        el("p", sentence(cause.why), cls="soft"),
    )


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing."""
FEW_DETECTORS = 8
"""Detectors that could not run, shown without a fold."""
GOOD = ("finished", "no critical alarm", "running")
BAD = ("crashed", "critical alarm")


def html(facts: Facts) -> str:
    """The whole page."""
    title = cut(facts.title, 240)
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{cut(facts.title, 80)} · rlwatch report"),
        el("style", Markup(STYLE)),
    )
    body = el("body", _head(facts, title), *filter(None, _sections(facts)), _foot(facts))
    return "<!doctype html>\n" + el("html", head, body, lang="en") + "\n"


def _head(facts: Facts, title: str) -> Markup:
    look = "critical" if facts.status in BAD else "good" if facts.status in GOOD else "warning"
    rows = [part for label, text in facts.head.items() for part in (el("dt", label), el("dd", cut(text, 400)))]
    verdict = el("p", facts.verdict, cls="verdict") if facts.verdict else Markup()
    status = el("p", el("span", facts.status, cls=f"status {look}"))
    return joined(el("h1", title), status, verdict, el("dl", *rows, cls="head"))


def _sections(facts: Facts) -> list[Markup]:
    return [
        _section("What happened", cause_block(facts.diagnosis)),
        _section("What to do", actions_block(facts.diagnosis)),
        _section("Timeline", _timeline(facts.timeline)),
        _section("Charts", figures(facts.charts, facts.timeline)),
        _section("Other causes considered", _other_causes(facts.diagnosis)),
        *(_section(name, table(rows(facts))) for name, rows in TABLES.items()),
        _section("Not measured", _list(facts.missing)),
    ]


def _section(title: str, content: Markup) -> Markup:
    """Nothing where there is nothing to say."""
    return el("section", el("h2", title), content) if content else Markup()


def _timeline(moments: Sequence[Moment]) -> Markup:
    rows = [
        el(
            "tr",
            el("td", el("span", str(m.number), cls="no") if m.number else "", cls=f"n {m.level}"),
            el("td", step(m.step), cls="n"),
            el("td", m.level, cls=m.level),
            el("td", m.text, cls="what"),
        )
        for m in moments
    ]
    if not rows:
        return Markup()
    names = el("tr", el("th", "", cls="n"), el("th", "step", cls="n"), el("th", "severity"), el("th", "what"))
    return el("div", el("table", el("thead", names), el("tbody", *rows)), cls="scroll")


def figures(charts: Sequence[Chart], moments: Sequence[Moment]) -> Markup:
    """The charts over one range of steps, with the numbered ones of ``moments``; nothing where there is no value."""
    everywhere = [at for c in charts for at in (*c.curve.steps[:1], *c.curve.steps[-1:], *(s for s, _ in c.curve.bad))]
    if not everywhere:
        return Markup()
    window = (min(everywhere), max(everywhere))
    inside = [m for m in moments if m.number and window[0] <= m.step <= window[1]]
    note = el(
        "p",
        "Numbers are those of the timeline; dotted: the run's own level at the start; red ticks: values that are not "
        "finite. Smallest and largest value of each stretch are always drawn.",
        cls="soft",
    )
    return joined(note, el("div", *(_figure(chart, inside, window) for chart in charts), cls="charts"))


def _figure(chart: Chart, moments: Sequence[Moment], window: tuple[int, int]) -> Markup:
    notes = [chart.unit, chart.known_as]
    if chart.curve.replaced:
        notes.append(f"{chart.curve.replaced} points of earlier attempts left out")
    caption = el("figcaption", cut(chart.name, 80), el("span", cut(" · ".join(filter(None, notes)), 120)))
    return el("figure", caption, svg(chart, moments, window))


def _list(lines: Sequence[str]) -> Markup:
    if not lines:
        return Markup()
    note = el("p", "These detectors could not run: silence of theirs is no sign of health.", cls="soft")
    rows = el("ul", *(el("li", line) for line in lines))
    return joined(
        note, rows if len(lines) <= FEW_DETECTORS else el("details", el("summary", f"{len(lines)} detectors"), rows)
    )


def _foot(facts: Facts) -> Markup:
    return el("footer", f"Made by rlwatch, {facts.made_at}. One file; it loads nothing.")
