"""The post-mortem as one HTML file: no script, no request to anywhere, every datum as text."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.report.facts import Chart, Facts, Moment
from rlwatch.report.html_diagnosis import actions, causes, verdict
from rlwatch.report.html_tables import table
from rlwatch.report.markup import Markup, el, joined
from rlwatch.report.style import STYLE
from rlwatch.report.svg import svg
from rlwatch.report.tables import TABLES
from rlwatch.report.words import cut, step

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing."""
FEW = 8
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
    return joined(el("h1", title), el("p", el("span", facts.status, cls=f"status {look}")), el("dl", *rows, cls="head"))


def _sections(facts: Facts) -> list[Markup]:
    return [
        _section("What happened", verdict(facts.diagnosis)),
        _section("What to do", actions(facts.diagnosis)),
        _section("Timeline", _timeline(facts.timeline)),
        _section("Charts", _charts(facts.charts, facts.timeline)),
        _section("Other causes considered", causes(facts.diagnosis)),
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
    said = el("p", "These detectors could not run: silence of theirs is no sign of health.", cls="soft")
    rows = el("ul", *(el("li", line) for line in lines))
    return joined(said, rows if len(lines) <= FEW else el("details", el("summary", f"{len(lines)} detectors"), rows))


def _foot(facts: Facts) -> Markup:
    return el("footer", f"Made by rlwatch, {facts.made_at}. One file; it loads nothing.")
