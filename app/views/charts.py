"""The charts of a run by failure family, then what was found and what happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from rlwatch.metrics import Family
from rlwatch.records import RunInfo

from .. import marks, panels, queries, shell, story, window
from ..charts import COLUMNS, Plot, family_option, height
from ..markup import el
from ..panels import Panel, Section
from ..queries import Trace
from . import history, layers
from .blame import GoToTokens


def show(run_id: str, go_to_tokens: GoToTokens) -> None:
    """Everything below the controls."""
    with shell.readable("This run"):
        run = queries.run(run_id)
        findings, events, outline = queries.findings(run_id), queries.events(run_id), queries.outline(run)
        catalogue = panels.catalogue(queries.metric_names(run), run.source)
        if not catalogue:
            st.caption("No metric has been recorded yet.")
        shown = window.read(st.query_params, outline.first, outline.last)
        marked = marks.of_run(queries.alerts(run_id), findings, events, outline.starts)
        canvas = _Canvas(run, (shown.low, shown.high), marked, story.baselines(findings))
        traces = queries.traces(run, canvas.window)
        suspects = {finding.metric for finding in findings}
        for shelf in panels.shelves(panels.sections(catalogue, traces, run.source, suspects), COLUMNS):
            canvas.shelf(shelf, traces)
        history.findings(findings, history.Localised.of(run_id, events), go_to_tokens)
        history.events(events)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """What the sections of one run share."""

    run: RunInfo
    window: tuple[int, int]
    marks: Sequence[marks.Mark]
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
            layers.show(self.run, self.window)

    def _more(self, section: Section) -> None:
        chosen = section.more[: panels.MOST_MORE]
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
            family_option(plots, self.marks, self.window, shell.ink(), columns),
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
        if words := panels.unchanging_words(section):
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
