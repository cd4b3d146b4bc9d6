"""The charts of a run by failure family: the telling metrics first, the others behind a click."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import streamlit as st

from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import BY_NAME, LAYER_PREFIX, TABLE, Family, family_of, resolve
from rlwatch.records import RunInfo

from . import charts, health, layout, queries, run_history, run_layers
from . import format as fmt
from .charts import COLUMNS, Plot, family_option, height
from .layout import GoToTokens
from .markup import el
from .queries import Trace, canonical_names

MOST = 3
"""Panels a family shows at first; the others are one click away, unless something is wrong with them."""

MOST_MORE = 30
"""Panels one click shows at most."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric: the ``name`` its source uses and, where the table knows it, the canonical one."""

    name: str
    canonical: str = ""

    @property
    def title(self) -> str:
        """Title of the chart."""
        return self.canonical or self.name

    def subtitle(self, source: str) -> str:
        """Unit, and the source's own name where it differs (``proxy`` where it is not the same quantity)."""
        if not self.canonical:
            return ""
        reading = resolve(self.name, source)
        known_as = "" if self.name == self.canonical else self.name
        if known_as and reading is not None and reading.closeness == 2:
            known_as = f"proxy: {known_as}"
        return " · ".join(part for part in (BY_NAME[self.canonical].unit, known_as) if part)


@dataclass(slots=True)
class Section:
    """One family: panels shown, panels behind a click, and metrics that never changed (name, value)."""

    family: Family
    shown: list[Panel] = field(default_factory=list)
    more: list[Panel] = field(default_factory=list)
    unchanging: list[tuple[str, float]] = field(default_factory=list)


def all_panels(names: Sequence[str], source: str) -> list[Panel]:
    """Every metric once: known ones, the telling first, then the others by name.

    Layers have a map of their own, the forecast a panel.
    """
    canonical = canonical_names(names, source)
    rank = {metric.name: (metric.panel or math.inf, place) for place, metric in enumerate(TABLE)}
    known = sorted((c for c in canonical if c in rank and not c.startswith(FORECAST)), key=rank.__getitem__)
    used = {source for name, source in canonical.items() if name in rank}
    return [
        *(Panel(canonical[c], c) for c in known),
        *(Panel(name) for name in sorted(set(names) - used) if not name.startswith(LAYER_PREFIX)),
    ]


def sections(
    panels: Sequence[Panel], traces: Mapping[str, Trace], source: str, suspects: Collection[str] = ()
) -> list[Section]:
    """The panels by family; ``traces`` holds the known metrics' (unknown ones go behind the click unread).

    ``suspects`` are canonical metrics a finding speaks of: shown whatever their rank, like those that were
    ever not finite.
    """
    found = {family: Section(family) for family in Family}
    for panel in panels:
        section = found[family_of(panel.canonical or panel.name, source)]
        if not panel.canonical:
            section.more.append(panel)
            continue
        trace, suspect = traces[panel.name], panel.canonical in suspects
        if trace.level is not None and not suspect and not BY_NAME[panel.canonical].vital:
            section.unchanging.append((panel.canonical, trace.level))
        elif suspect or len(section.shown) < MOST or not trace.finite:
            section.shown.append(panel)
        else:
            section.more.append(panel)
    return [section for section in found.values() if section.shown or section.more or section.unchanging]


def shelves(all_sections: Sequence[Section], columns: int) -> list[list[tuple[Section, int]]]:
    """Sections side by side, in order, with the columns each takes; no shelf is wider than ``columns``."""
    found: list[list[tuple[Section, int]]] = []
    room = 0
    for section in all_sections:
        width = min(max(len(section.shown), 1), columns)
        if width > room:
            found.append([])
            room = columns
        found[-1].append((section, width))
        room -= width
    return found


def unchanging_words(section: Section) -> str:
    """``never changed: optim/lr 1e-06``; empty if all did."""
    if not section.unchanging:
        return ""
    return "never changed: " + " · ".join(f"{name} {fmt.number(value)}" for name, value in section.unchanging)


# The charts of a run by failure family, then what was found and what happened.


def show_charts(run_id: str, go_to_tokens: GoToTokens) -> None:
    """Everything below the controls."""
    with layout.readable("This run"):
        run = queries.run(run_id)
        findings, events, outline = queries.findings(run_id), queries.events(run_id), queries.outline(run)
        catalogue = all_panels(queries.metric_names(run), run.source)
        if not catalogue:
            st.caption("No metric has been recorded yet.")
        shown = charts.read_window(st.query_params, outline.first, outline.last)
        marked = charts.marks_of_run(queries.alerts(run_id), findings, events, outline.starts)
        canvas = _Canvas(run, (shown.low, shown.high), marked, health.baselines(findings))
        traces = queries.traces(run, canvas.window)
        suspects = {finding.metric for finding in findings}
        for shelf in shelves(sections(catalogue, traces, run.source, suspects), COLUMNS):
            canvas.shelf(shelf, traces)
        run_history.show_findings(queries.told(run_id), run_history.Localised.of(run_id, events), go_to_tokens)
        run_history.show_events(events)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Run, window and marks that the sections of one page share."""

    run: RunInfo
    window: tuple[int, int]
    marks: Sequence[charts.Mark]
    baselines: Mapping[str, float]

    def shelf(self, shelf: Sequence[tuple[Section, int]], traces: Mapping[str, Trace]) -> None:
        """Families side by side; what they keep behind a click opens below, over the whole width."""
        free = COLUMNS - sum(width for _, width in shelf)
        places = st.columns([*(width for _, width in shelf), *([free] if free else [])], gap="small")
        opened = []
        for place, (section, width) in zip(places, shelf, strict=False):
            with place:
                st.html(el("div", section.family.value, cls="rl-family"))
                if section.shown:
                    self._chart(section, section.shown, traces, width)
                if _foot(section):
                    opened.append(section)
        for section in opened:
            self._more(section)
        if any(section.family is Family.OPTIMISATION for section, _ in shelf):
            run_layers.show_layers(self.run, self.window)

    def _more(self, section: Section) -> None:
        chosen = section.more[:MOST_MORE]
        traces = queries.traces(self.run, self.window, [panel.name for panel in chosen])
        self._chart(section, chosen, traces, COLUMNS, "-more")
        if len(section.more) > len(chosen):
            rest = ", ".join(panel.name for panel in section.more[len(chosen) :])
            st.html(el("div", f"and {rest}", cls="rl-quiet"))

    def _chart(
        self, section: Section, chosen: Sequence[Panel], traces: Mapping[str, Trace], columns: int, suffix: str = ""
    ) -> None:
        plots = [self._plot(panel, traces[panel.name], section.family.value) for panel in chosen]
        st.echarts_chart(
            family_option(plots, self.marks, self.window, layout.ink(), columns),
            height=height(len(plots), columns),
            key=f"chart-{section.family.name}{suffix}",
            alt=f"{section.family.value}: {', '.join(plot.title for plot in plots)} by step",
        )

    def _plot(self, panel: Panel, trace: Trace, family: str) -> Plot:
        baseline = self.baselines.get(panel.canonical)
        return Plot(panel.title, panel.subtitle(self.run.source), trace.lines, family, baseline)


def _foot(section: Section) -> bool:
    """Below a family's charts: the button for the others, what never changed. Whether the others are wanted."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        wanted = bool(section.more) and _more_wanted(section)
        if words := unchanging_words(section):
            st.html(el("div", words, cls="rl-quiet"), width="content")
    return wanted


def _more_wanted(section: Section) -> bool:
    key = f"more-{section.family.name}"
    wanted = bool(st.session_state.get(key))
    st.button(
        f"hide {len(section.more)}" if wanted else f"{len(section.more)} more",
        key=f"{key}-button",
        type="tertiary",
        icon=":material/expand_less:" if wanted else ":material/expand_more:",
        on_click=st.session_state.__setitem__,
        args=(key, not wanted),
    )
    return wanted
