"""The charts of a run by failure family, then what was found and what happened."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from rlwatch.ports import Series
from rlwatch.records import Finding, RunInfo

from .. import buckets, marks, panels, queries, shell, story, window
from ..charts import BUCKETS, COLUMNS, Plot, family_option, height
from ..markup import el
from ..panels import Panel, Section
from . import history


def show(run_id: str) -> None:
    """Everything below the controls."""
    with shell.readable("This run"):
        run = queries.run(run_id)
        catalogue = panels.catalogue(queries.metric_names(run), run.source)
        series = queries.known_series(run)
        findings, events = queries.findings(run_id), queries.events(run_id)
        if not catalogue:
            st.caption("No metric has been recorded yet.")
        canvas = _canvas(run, series, findings, marks_of(run_id, findings, series))
        suspects = {finding.metric for finding in findings}
        for shelf in panels.shelves(panels.sections(catalogue, series, run.source, suspects), COLUMNS):
            canvas.shelf(shelf)
        history.findings(findings)
        history.events(events)


def marks_of(run_id: str, findings: Sequence[Finding], series: dict[str, Series]) -> list[marks.Mark]:
    """The moments every chart shows."""
    starts = buckets.attempt_starts(list(series.values()))
    return marks.of_run(queries.alerts(run_id), findings, queries.events(run_id), starts)


class _Canvas:
    """What the sections of one run share."""

    def __init__(self, run: RunInfo, series: dict[str, Series], marked: list[marks.Mark], baselines: dict[str, float]):
        self.run = run
        self.series = series
        self.marks = marked
        self.baselines = baselines
        self.starts = buckets.attempt_starts(list(series.values()))
        shown = window.read(st.query_params, *queries.extent(run))
        self.window = (shown.low, shown.high)

    def shelf(self, shelf: Sequence[tuple[Section, int]]) -> None:
        """Families side by side; what they keep behind a click opens below, over the whole width."""
        free = COLUMNS - sum(width for _, width in shelf)
        places = st.columns([*(width for _, width in shelf), *([free] if free else [])], gap="small")
        opened = []
        for place, (section, width) in zip(places, shelf, strict=False):
            with place:
                self._section(section, width)
                with st.container(horizontal=True, vertical_alignment="center", gap="small"):
                    if section.more and self._more_wanted(section):
                        opened.append(section)
                    if words := panels.unchanging_words(section):
                        st.html(el("div", words, cls="rl-quiet"), width="content")
        for section in opened:
            self._more(section)

    def _section(self, section: Section, width: int) -> None:
        st.html(el("div", section.family.value, cls="rl-family"))
        if section.shown:
            self._chart(section, section.shown, self.series, width)

    @staticmethod
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

    def _more(self, section: Section) -> None:
        chosen = section.more[: panels.MOST_MORE]
        self._chart(section, chosen, queries.series(self.run, [panel.name for panel in chosen]), COLUMNS, "-more")
        if len(section.more) > len(chosen):
            rest = ", ".join(panel.name for panel in section.more[len(chosen) :])
            st.html(el("div", f"and {rest}", cls="rl-quiet"))

    def _chart(
        self, section: Section, chosen: Sequence[Panel], series: dict[str, Series], columns: int, suffix: str = ""
    ) -> None:
        plots = [self._plot(panel, series[panel.name], section.family.value) for panel in chosen]
        st.echarts_chart(
            family_option(plots, self.marks, self.window, shell.ink(), columns),
            height=height(len(plots), columns),
            key=f"chart-{section.family.name}{suffix}",
            alt=f"{section.family.value}: {', '.join(plot.title for plot in plots)} by step",
        )

    def _plot(self, panel: Panel, series: Series, family: str) -> Plot:
        lines = buckets.branches(series, self.starts, self.window, BUCKETS)
        baseline = self.baselines.get(panel.canonical)
        return Plot(panel.title, panel.subtitle(self.run.source), lines, family, baseline)


def _canvas(run: RunInfo, series: dict[str, Series], findings: Sequence[Finding], marked: list[marks.Mark]) -> _Canvas:
    return _Canvas(run, series, marked, story.baselines(findings))
