"""The post-mortem as one HTML file: no script, no request to anywhere, every datum as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlwatch.diagnosis import Action, Cause, Diagnosis
from rlwatch.report.gather import TABLES, Chart, Facts, Moment, Rows
from rlwatch.wording import Markup, code_in, cut, el, joined, number, sentence, step

STYLE = """
:root { --ink:#1b1b1b; --soft:#626262; --paper:#ffffff; --card:#f6f7f8; --rule:#dfe2e5; --line:#0072B2; --warn:#B36B00;
  --bad:#C2410C; --good:#00704f; --link:#0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink:#e8e8e8; --soft:#a3a3a3; --paper:#141618; --card:#1d2023;
  --rule:#33373b; --line:#56B4E9; --warn:#E69F00; --bad:#ff7a45; --good:#3ecf9f; --link:#7ab8ff; } }
* { box-sizing:border-box; }
body { margin:0 auto; max-width:1080px; padding:2rem 1.25rem 4rem; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif; font-variant-numeric:tabular-nums; }
h1 { font-size:1.6rem; line-height:1.25; margin:0; overflow-wrap:anywhere; }
h2 { font-size:1.1rem; margin:2.4rem 0 .7rem; padding-bottom:.25rem; border-bottom:1px solid var(--rule); }
h3 { font-size:1rem; margin:1.2rem 0 .3rem; }
p { margin:.4rem 0; max-width:80ch; }
.soft { color:var(--soft); font-size:.87rem; } .status { font-weight:600; }
.critical { color:var(--bad); } .warning { color:var(--warn); } .good { color:var(--good); }
dl.head { display:grid; grid-template-columns:max-content 1fr; gap:.1rem 1rem; margin:.9rem 0 0; font-size:.9rem; }
dl.head dt { color:var(--soft); } dl.head dd { margin:0; overflow-wrap:anywhere; }
.cause { background:var(--card); border-left:4px solid var(--line); padding:.8rem 1rem; border-radius:4px; }
.cause.strong { border-color:var(--bad); } .cause.plausible { border-color:var(--warn); }
.cause .name { font-size:1.1rem; font-weight:600; }
ol.do { padding-left:1.4rem; } ol.do > li { margin:.7rem 0; } ol.do b { font-weight:600; }
.badge { font-size:.75rem; border:1px solid var(--rule); border-radius:3px; padding:0 .35rem; margin-left:.4rem;
  color:var(--soft); white-space:nowrap; }
.badge.measured { color:var(--good); border-color:currentColor; }
.opt { display:block; font-size:.87rem; margin-top:.15rem; } .opt .who { color:var(--soft); margin-right:.4rem; }
code, .token { font:.85em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; background:var(--card);
  padding:.05em .3em; border-radius:3px; overflow-wrap:anywhere; white-space:pre-wrap; }
.cause code { background:var(--paper); }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:.87rem; }
th { text-align:left; color:var(--soft); font-weight:500; }
th, td { padding:.28rem .7rem .28rem 0; border-bottom:1px solid var(--rule); vertical-align:top; }
td { overflow-wrap:anywhere; } td.n, th.n { text-align:right; white-space:nowrap; overflow-wrap:normal; }
td.w { overflow-wrap:normal; } td.what { min-width:16rem; }
.charts { display:grid; grid-template-columns:repeat(auto-fill,minmax(320px,1fr)); gap:1rem 1.4rem; }
figure { margin:0; } figcaption { font-size:.9rem; font-weight:600; overflow-wrap:anywhere; }
figcaption span { font-weight:400; color:var(--soft); font-size:.8rem; margin-left:.4rem; }
svg { width:100%; height:auto; display:block; }
svg text { font:10px system-ui,sans-serif; fill:var(--soft); }
svg .grid { stroke:var(--rule); stroke-width:1; }
svg .line { fill:none; stroke:var(--line); stroke-width:1.4; stroke-linejoin:round; }
svg .dot { fill:var(--line); } svg .level { stroke:var(--soft); stroke-dasharray:2 3; }
svg .bad { stroke:var(--bad); stroke-width:2; } svg .badword { fill:var(--bad); }
svg .mark { stroke:var(--soft); stroke-dasharray:4 3; } svg .mark.critical { stroke:var(--bad); }
svg .mark.warning { stroke:var(--warn); } svg .markno { font-weight:600; fill:var(--ink); }
.no { display:inline-block; min-width:1.35em; text-align:center; border:1px solid currentColor; border-radius:50%;
  font-size:.75rem; line-height:1.3em; font-weight:600; }
details > summary { cursor:pointer; color:var(--link); margin:.5rem 0; }
footer { margin-top:3rem; color:var(--soft); font-size:.8rem; }
@media print { body { max-width:none; padding:0; font-size:11px; } h2 { break-after:avoid; }
  figure, li { break-inside:avoid; } }
"""


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

WORD = 16
"""Letters of a word that is not broken."""
LEVELS = ("critical", "warning")


def table(rows: Rows) -> Markup:
    """Nothing where there are no rows; long ones behind a fold."""
    if not rows.rows:
        return Markup()
    numeric = [header.startswith(">") for header in rows.headers]
    head = el("tr", *(_cell("th", h.removeprefix(">"), n) for h, n in zip(rows.headers, numeric, strict=True)))
    body = [el("tr", *(_cell("td", c, n) for c, n in zip(row, numeric, strict=True))) for row in rows.rows]
    whole = el("div", el("table", el("thead", head), el("tbody", *body)), cls="scroll")
    note = el("p", rows.note, cls="soft") if rows.note else Markup()
    more = el("p", f"{rows.left_out} more not shown.", cls="soft") if rows.left_out else Markup()
    if not rows.folded:
        return joined(note, whole, more)
    return joined(note, el("details", el("summary", f"{len(rows.rows)} rows"), whole, more))


def _cell(tag: str, text: str, numeric: bool) -> Markup:
    level = text if tag == "td" and text in LEVELS else ""
    word = "w" if len(text) <= WORD and " " not in text else ""
    return el(tag, text, cls="n" if numeric else f"{level} {word}".strip())


# Why and what to do, as HTML.

FEW_ACTIONS = 4
"""Actions shown at once; the rest is behind a fold."""
SEES = {
    "measured": "measured by us on toy-sized paired runs",
    "published": "in a paper",
    "reported": "in issues and logs",
    "folklore": "people do it; no evidence",
}


def _verdict(diagnosis: Diagnosis) -> Markup:
    """The likeliest cause, how sure and why; or that none can be named."""
    if not diagnosis.causes:
        return el("p", "Nothing was found that needs an explanation.")
    first = diagnosis.causes[0]
    if not diagnosis.enough:
        return el("div", el("p", sentence(diagnosis.why_not)), cls="cause weak")
    return el(
        "div",
        el("div", f"{first.title} ", el("span", first.sure.value, cls="badge"), cls="name"),
        el("p", sentence(first.summary)),
        el("p", f"How sure: {first.sure.value}, because {first.why}.", cls="soft"),
        cls=f"cause {first.sure.value}",
    )


def _actions(diagnosis: Diagnosis) -> Markup:
    """The likeliest cause's actions in order; of a guess behind a fold."""
    if not diagnosis.causes or not diagnosis.causes[0].actions:
        return Markup()
    first = diagnosis.causes[0]
    withheld = el("p", sentence(first.withheld), cls="warning") if first.withheld else Markup()
    rest = [*map(_action, first.actions[FEW_ACTIONS:])]
    more = (
        el("details", el("summary", f"{len(rest)} more"), el("ol", *rest, cls="do", start=FEW_ACTIONS + 1))
        if rest
        else Markup()
    )
    order = joined(withheld, el("ol", *map(_action, first.actions[:FEW_ACTIONS]), cls="do"), more)
    if diagnosis.enough:
        return order
    fold = el("summary", "No cause is sure enough to act on. What people do about the first sign:")
    return el("details", fold, order)


def _other_causes(diagnosis: Diagnosis) -> Markup:
    """All but the first."""
    return joined(*map(_other, diagnosis.causes[1:]))


def _action(action: Action) -> Markup:
    lines = [
        el("span", el("span", trainer, cls="who"), code_in(text), cls="opt") for trainer, text in action.options.items()
    ]
    return el(
        "li",
        el("b", action.name),
        el("span", action.strength.value, cls=f"badge {action.strength.value}", title=SEES[action.strength.value]),
        el("div", action.what),
        *lines,
        el("div", f"{action.evidence} Source: {action.source}.", cls="soft"),
    )


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
        _section("What happened", _verdict(facts.diagnosis)),
        _section("What to do", _actions(facts.diagnosis)),
        _section("Timeline", _timeline(facts.timeline)),
        _section("Charts", _charts(facts.charts, facts.timeline)),
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


def _charts(charts: Sequence[Chart], moments: Sequence[Moment]) -> Markup:
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
