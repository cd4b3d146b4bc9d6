"""Charts of a run: the main ones at the top, then every metric. The user's choices are kept in the address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import streamlit as st

from rlwatch.errors import RLWatchError
from rlwatch.forecast.forecast import FORECAST
from rlwatch.metrics import family_of
from rlwatch.ports import Series
from rlwatch.records import Finding, RunInfo, RunState

from . import board, charts, health, layout, pinned, queries, run_charts, run_forecast, run_history, smoothing
from . import format as fmt
from .board import AT, Board, lines_of
from .charts import Ink
from .layout import GoToTokens
from .marks import marks_of_run
from .overlays import AS_USUAL, Scales
from .page_script import base_path
from .queries import Outline
from .run_charts import MetricChart, MetricSection, all_panels, found_by, sections, unchanging_words
from .thinning import Branches, branches

STRIP = (
    ("risk", ("forecast/risk",)),
    ("reward", ("reward/mean",)),
    ("entropy", ("policy/entropy",)),
    ("KL", ("policy/kl_ref", "policy/kl_ref_k3", "policy/kl_ref_k1", "policy/kl_old")),
    ("grad norm", ("optim/grad_norm",)),
    ("mismatch", ("mismatch/k3", "mismatch/kl", "mismatch/logp_absdiff", "mismatch/prob_absdiff")),
    ("GPU 0", ("system/gpu/0/util",)),
)
"""Charts at the top of the page, each for the first of its names that the run has."""
BANDED = frozenset({"entropy", "KL", "grad norm", "mismatch"})
"""Charts with a healthy range; the reward has none, because it should rise."""

MOST_FOUND, MOST_MORE = 24, 30
"""Most charts drawn for a search, and for a click on more."""
WARM_UP, CALM_ROWS = 0.1, 20
"""Share of the rows before the first finding that is skipped as warm-up, and the least rows for a healthy range."""


# The user's choices, kept in the address, so that they can be shared, reloaded and undone with the back button.

PIN, MORE = "pin", "open"
AXES = ("step", "time", "tokens")


class Address(Mapping[str, str]):
    """Query of a page's address, of which a name may have several values: that of Streamlit has these methods, too."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._all: dict[str, list[str]] = {}
        for name, value in pairs:
            self._all.setdefault(name, []).append(value)

    def __getitem__(self, name: str) -> str:
        return self._all[name][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def get_all(self, name: str) -> list[str]:
        """Return all values of a name."""
        return self._all.get(name, [])


@dataclass(frozen=True, slots=True)
class BoardOptions:
    """The user's choices for the charts of a run, made with the controls above them."""

    axis: str = "step"
    scales: Scales = AS_USUAL
    wanted: str = ""
    pins: tuple[str, ...] = ()
    opened: frozenset[str] = frozenset()
    at: int | None = None

    @classmethod
    def of_address(cls, project: str, address: Address) -> BoardOptions:
        """Read the choices from the page's address and the controls, for a run of ``project``."""
        asked = address.get("axis", "step")
        return cls(
            axis=asked if asked in AXES else "step",
            scales=Scales.of_address(address),
            pins=chosen_pins(project, address),
            opened=frozenset(address.get_all(MORE)),
            at=board.at_step(address),
        )


def chosen_pins(project: str, address: Address | None = None) -> tuple[str, ...]:
    """Return the pinned charts in the page's ``address``, which may be an empty list, else those of the project.

    ``address``: by default that of the page that is drawn.
    """
    given = (st.query_params if address is None else address).get_all(PIN)
    return tuple(dict.fromkeys(filter(None, given))) if given else pinned.pins_of(project)


def live() -> bool:
    """Return True if the user has live updates switched on."""
    return bool(st.session_state.get("live", st.query_params.get("live") != "false"))


def find() -> str:
    """Draw the search field over all metrics and return its text."""
    return st.text_input(
        "Search metrics",
        key="q",
        bind="query-params",
        placeholder="Search metrics by name or meaning",
        label_visibility="collapsed",
        icon=":material/search:",
    )


# Requests of a click or a drag on the charts.

LEAVE = "leave-for-step"
ANEW = "draw-page-anew"
ASKED = "zoom-asked"


def on_ask(asked: Mapping[str, Any], run_id: str, axis: str) -> None:
    """Handle a request of a chart of the run (zoom, click, pin, and so on); most requests change the page's address.

    ``axis``: the kind of axis that is drawn.
    """
    address = st.query_params
    kind = asked.get("kind")
    if kind == "zoom":
        _zoom(asked.get("range"), run_id, "step" if asked.get("steps") else axis)
    elif kind == "at":
        place = _place(run_id, "step" if asked.get("steps") else axis)
        _set(address, AT, None if asked.get("x") is None else str(place.step(float(asked["x"]))))
    elif kind == "more":
        _set_all(address, MORE, _turned(address.get_all(MORE), str(asked.get("section"))))
    elif kind == "pin":
        project = queries.run(run_id).project
        keep(project, _turned(chosen_pins(project), str(asked.get("name"))))
    elif kind == "arrange":
        keep(queries.run(run_id).project, [str(name) for name in asked.get("names", ())])
    elif kind == "go":
        st.session_state[LEAVE] = int(asked["step"])


def _turned(names: Sequence[str], name: str) -> list[str]:
    """Toggle the name: remove it if it is present, else append it."""
    return [one for one in names if one != name] if name in names else [*names, name]


def keep(project: str, names: Sequence[str]) -> None:
    """Pin the charts ``names``: in the page's address, and for all users of the project if this user
    may make changes.
    """
    who = layout.principal()
    st.query_params[PIN] = list(names) or [""]
    if not who.may_command:
        return
    try:
        pinned.keep_pins(queries.store(), project, names, who)
    except RLWatchError as error:
        st.toast(f"Pinned in this URL only: {fmt.shorten(str(error), 200)}")


def _zoom(asked: Sequence[float] | None, run_id: str, axis: str) -> None:
    outline = queries.outline(queries.run(run_id))
    end = charts.slider_end(outline.last)
    place = _place(run_id, axis)
    low, high = (0, end) if asked is None else (place.step(float(asked[0])), place.step(float(asked[1])))
    high = max(high, low + 1)
    charts.write_window(st.query_params, low, high, 0, outline.last)
    if end <= charts.FARTHEST:
        st.session_state[charts.slider_key(run_id, end)] = (max(low, 0), min(high, end))
    st.session_state[ASKED] = (run_id, asked)
    st.session_state[ANEW] = True


def _place(run_id: str, axis: str) -> board.StepAxis:
    run = queries.run(run_id)
    return smoothing.place_of(run, axis) or _by_step(run)


def _by_step(run: RunInfo) -> board.StepAxis:
    outline = queries.outline(run)
    return board.by_step(outline.first, outline.last)


def _set(address: MutableMapping[str, str], name: str, value: str | None) -> None:
    if value is None:
        address.pop(name, None)
    else:
        address[name] = value


def _set_all(address: Any, name: str, values: Sequence[str]) -> None:
    if values:
        address[name] = list(values)
    else:
        address.pop(name, None)


# From metrics to charts.


@dataclass(frozen=True, slots=True)
class Drawing:
    """A run, and the choices for drawing its charts. ``live``: the browser fetches new rows."""

    run: RunInfo
    look: BoardOptions
    outline: Outline
    window: tuple[int, int]
    findings: Sequence[Finding]
    ink: Ink
    live: bool
    last: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def chart(self, panel: MetricChart, lines: Branches, rows: Series | None = None) -> board.BoardChart:
        """Return one metric as a chart; ``rows``: rows of a metric that is computed and not in the store.

        ``panel``: the metric. ``lines``: its curves over all attempts. The alarms of its family are marked in it.
        """
        every = self.look.scales.every_axis([lines.current.values], panel.limits)
        ends, scale = every[2 * self.look.scales.log + (not self.look.scales.clip)]
        level = health.baselines(self.findings).get(panel.canonical or panel.name)
        return board.BoardChart(
            name=panel.name,
            title=panel.title,
            lines=lines_of(lines, self.ink, self.smooth(panel.name, rows)),
            range=ends,
            sub=panel.subtitle(self.run.source),
            about=panel.about,
            family=family_of(panel.canonical or panel.name, self.run.source).value,
            scale=scale,
            pinned=panel.name in self.look.pins,
            rules=() if level is None or not np.isfinite(level) else ((level, "baseline"),),
            last=self.last[panel.name][1] if panel.name in self.last else None,
            ends=[(*held, kind) for held, kind in every],
            usual=board.usual_range(lines.current.values),
        )

    def smooth(self, name: str, rows: Series | None = None) -> Any:
        """Return the smoothed curve of the metric ``name``, or None if smoothing is off.

        ``rows``: rows of a metric that is computed and not in the store.
        """
        scales = self.look.scales
        if not scales.smooths:
            return None
        one = queries.whole(self.run, (name,))[name] if rows is None else rows
        return smoothing.smooth_curve(one, self.outline.starts, self.window, scales.smooth, clip=scales.clip)


def healthy_range(run: RunInfo, name: str, findings: Sequence[Finding]) -> tuple[float, float] | None:
    """Return the range of nine tenths of a metric's rows before the first finding; None if there are too few rows.

    For a long run it is computed again once the run has grown by one part in :data:`queries.REFRESH_SHARE`.
    """
    first = min((finding.onset_step for finding in findings), default=None)
    last = run.last_step or 0
    progress = (run.attempt, last // max(1, last // queries.REFRESH_SHARE))
    return _healthy_range(queries.store_url(), run.run_id, progress, name, first)


@st.cache_data(show_spinner=False, max_entries=500)
def _healthy_range(
    url: str,  # noqa: ARG001  (part of the key, as the next but one)
    run_id: str,
    progress: tuple[int, int],  # noqa: ARG001
    name: str,
    first: int | None,
) -> tuple[float, float] | None:
    one = queries.store().series(run_id, [name])[name]
    calm = one.values if first is None else one.values[one.steps < first]
    calm = calm[int(WARM_UP * len(calm)) :]
    calm = calm[np.isfinite(calm)]
    if len(calm) < CALM_ROWS:
        return None
    low, high = np.quantile(calm, (0.05, 0.95))
    return float(low), float(high)


def strip(drawing: Drawing, panels: Sequence[MetricChart]) -> list[board.BoardChart]:
    """Return the charts for the top of the page: those of ``panels`` whose metrics are most important and recorded in
    the run.
    """
    known = {panel.canonical: panel for panel in panels if panel.canonical}
    known |= {panel.name: panel for panel in panels if not panel.canonical}
    chosen = [(title, next((known[name] for name in names if name in known), None)) for title, names in STRIP]
    shown = [(title, panel) for title, panel in chosen if panel is not None]
    read = queries.traces(drawing.run, drawing.window, [panel.name for _, panel in shown])
    found = []
    for title, panel in shown:
        made = replace(drawing.chart(panel, read[panel.name]), family="")  # marked by every alarm
        banded = healthy_range(drawing.run, panel.name, drawing.findings) if title in BANDED else None
        rules = ((1.0, "alarm"),) if title == "risk" else ()
        found.append(_titled(made, title, banded, rules))
    return found


def _titled(
    made: board.BoardChart, title: str, band: tuple[float, float] | None, rules: Sequence[tuple[float, str]]
) -> board.BoardChart:
    def with_rules(low: float, high: float) -> tuple[float, float]:
        levels = [level for level, _ in rules]
        return min([low, *levels]), max([high, *(1.1 * level for level in levels)])

    unit, ends = (
        " × alarm" if title == "risk" else "",
        [(*with_rules(low, high), kind) for low, high, kind in made.ends],
    )
    held = with_rules(*made.range)
    return replace(made, title=title, band=band, rules=rules, range=held, sub=made.title, unit=unit, ends=ends)


def shown_sections(drawing: Drawing, names: Sequence[str], panels: Sequence[MetricChart]) -> list[board.ChartSection]:
    """Return the sections of charts: pinned charts, then the search results or the metric families.

    ``names``: all metric names of the run. ``panels``: the metrics to draw.
    """
    look, run = drawing.look, drawing.run
    arranged = _arranged(drawing, names, _by_name(panels))
    if look.wanted.strip():
        hits = found_by(names, panels, look.wanted)
        title = f"{len(hits)} of {len(names)} metrics match" if hits else f"None of {len(names)} metrics matches"
        rest = f"and {len(hits) - MOST_FOUND} more: refine the search" if len(hits) > MOST_FOUND else ""
        return [*arranged, *_drawn(drawing, [(board.ChartSection("found", title, (), rest), hits[:MOST_FOUND])])]
    suspects = {finding.metric for finding in drawing.findings}
    families = [_family(look, one) for one in sections(panels, queries.extents(run), run.source, suspects)]
    drawn = _drawn(drawing, families)
    forecast = run_forecast.forecast_section(run, drawing.window, drawing.ink)
    layers = run_charts.layer_section(run, drawing.window)
    return list(filter(None, [*arranged, forecast, *drawn, layers]))


def _arranged(drawing: Drawing, names: Sequence[str], by_name: Mapping[str, MetricChart]) -> list[board.ChartSection]:
    """Return the section of the pinned charts, if there are any, in their order and sizes."""
    read = [pinned.PinnedChart.parse(pin, set(names)) for pin in drawing.look.pins]
    shown = [one for one in read if one is not None]
    if not shown:
        return []
    wanted = sorted({name for one in shown for name in one.metrics})
    lines = queries.traces(drawing.run, drawing.window, wanted)
    made = []
    for one in shown:
        metrics = [by_name.get(name, MetricChart(name)) for name in one.metrics]
        if one.ratio:
            chart = _ratio(drawing, metrics)
        else:
            charts_of = [drawing.chart(metric, lines[metric.name]) for metric in metrics]
            chart = charts_of[0] if len(charts_of) == 1 else _together(charts_of)
        made.append(replace(chart, pin=one.pin, columns=one.span, pinned=True))
    span = min(3, sum(chart.columns for chart in made))
    return [board.ChartSection("pinned", "Pinned", made, span=span)]


def _together(both: Sequence[board.BoardChart]) -> board.BoardChart:
    """Return one chart of two metrics, each on an axis of its own."""
    title = " and ".join(chart.title for chart in both)
    return board.BoardChart(title, title, both[0].lines, both[0].range, pair=both)


def _ratio(drawing: Drawing, metrics: Sequence[MetricChart]) -> board.BoardChart:
    """Return the chart of a ratio, from all rows of both metrics."""
    title = pinned.DIVIDED.join(metric.title for metric in metrics)
    read = queries.whole(drawing.run, tuple(metric.name for metric in metrics))
    one = pinned.ratio(title, *(read[metric.name] for metric in metrics))
    curves = branches(one, dict(drawing.outline.starts), drawing.window, queries.BUCKETS)
    return replace(drawing.chart(MetricChart(title), curves, one), made=True, family="")


def _by_name(panels: Sequence[MetricChart]) -> dict[str, MetricChart]:
    return {panel.name: panel for panel in panels}


Planned = tuple[board.ChartSection, Sequence[MetricChart]]
"""A section, and the metrics to be read for its charts."""


def _family(look: BoardOptions, section: MetricSection) -> Planned:
    opened = section.family.name in look.opened
    others = section.more[:MOST_MORE] if opened else []
    notes = [unchanging_words(section)]
    if opened and len(section.more) > MOST_MORE:
        notes.append(f"and {len(section.more) - MOST_MORE} more: search by name")
    note = " · ".join(filter(None, notes))
    family = section.family
    made = board.ChartSection(family.name, family.value, (), note, more=len(section.more), open=opened)
    return made, [*section.shown, *others]


def _drawn(drawing: Drawing, planned: Sequence[Planned]) -> list[board.ChartSection]:
    """Return the sections with their charts; all metrics are read together."""
    wanted = sorted({panel.name for _, panels in planned for panel in panels})
    read = queries.traces(drawing.run, drawing.window, wanted)
    return [
        replace(one, panels=[drawing.chart(panel, read[panel.name]) for panel in panels]) for one, panels in planned
    ]


# Fragments of the page.


CHARTS_SHOW = "charts-show"
"""Session key of the facts for which the charts were drawn; absent before that. The browser fetches new rows itself."""
LONGER = 8
"""Charts are redrawn once the run has grown by one part in this many, because appended rows are not thinned."""


def _drawn_of(run: RunInfo) -> tuple[object, ...]:
    """Return the facts that change marks, sections or the thinning of charts; new rows alone do not."""
    last = run.last_step or 0
    read = (queries.findings, queries.events, queries.commands, queries.notes)
    counts = tuple(len(of(run.run_id)) for of in read)
    fired = tuple(sorted((alert.alert_id, alert.state.value) for alert in queries.alerts(run.run_id)))
    divided = any(pinned.DIVIDED in pin for pin in chosen_pins(run.project))
    grown = last if divided else int(np.log(max(last, 100)) / np.log1p(1 / LONGER))
    return (run.run_id, run.attempt, run.state.value, len(queries.metric_names(run)), grown, counts, fired)


def watch(run_id: str) -> None:
    """Rerun the page if its charts are outdated (new marks, findings, events or spike tokens); draw nothing."""
    with layout.readable("This run"), queries.store().at_once(run_id):
        if st.session_state.get(CHARTS_SHOW) not in (None, _drawn_of(queries.run(run_id))):
            st.session_state.pop(CHARTS_SHOW)
            st.rerun()


def show_history(run_id: str, go_to_tokens: GoToTokens) -> None:
    """Draw the tables of findings and events of a run; ``go_to_tokens`` opens the page with the tokens of a step."""
    with layout.readable("This run"), queries.store().at_once(run_id):
        events = queries.events(run_id)
        run_history.show_findings(
            queries.findings_and_updates(run_id), run_history.Localised.of(run_id, events), go_to_tokens
        )
        run_history.show_events(events)


def show_charts(run_id: str, go_to_tokens: GoToTokens) -> None:
    """Draw the main charts of a run, and below them every metric with the map of layers.

    ``go_to_tokens`` opens the page with the tokens of a step.
    """
    if st.session_state.pop(ANEW, False):
        st.rerun()  # the rest of the page shows the range, too
    step = st.session_state.pop(LEAVE, None)
    if step is not None:
        go_to_tokens(run_id, step)
    with layout.readable("This run"), queries.store().at_once(run_id):
        run = queries.run(run_id)
        address = Address([(name, value) for name in st.query_params for value in st.query_params.get_all(name)])
        drawing = drawing_of(run, address, layout.ink(), live=live())
        if not queries.metric_names(run):
            st.caption("No metrics logged yet.")
        if smoothing.place_of(run, drawing.look.axis) is None:
            st.caption(f"This run did not log {drawing.look.axis}; showing steps.")
        if queries.metric_names(run):
            _boards(drawing)
        st.session_state[CHARTS_SHOW] = _drawn_of(run)


def drawing_of(run: RunInfo, address: Address, ink: Ink, *, live: bool) -> Drawing:
    """Return a run with the choices in its page's ``address``; ``live``: new rows are followed if it is not over."""
    outline = queries.outline(run)
    window = charts.read_window(address, outline.first, outline.last)
    return Drawing(
        run,
        BoardOptions.of_address(run.project, address),
        outline,
        (window.low, window.high),
        queries.findings(run.run_id),
        ink,
        live and run.state is RunState.RUNNING,
        queries.last_values(run.run_id),
    )


def _boards(drawing: Drawing) -> None:
    run_id = drawing.run.run_id
    asked = st.session_state.get(ASKED)
    bare, axis = bare_board(drawing), drawing.look.axis

    def ask(what: Mapping[str, Any]) -> None:
        on_ask(what, run_id, axis)

    bare.asked = asked[1] if asked and asked[0] == run_id else None
    board.show(strip_board(drawing, bare), STRIP_KEY, ask)
    drawing = replace(drawing, look=replace(drawing.look, wanted=find()))
    board.show(all_board(drawing, bare), ALL_KEY, ask)


STRIP_KEY, ALL_KEY = "board-strip", "board-all"
"""Widget keys of the charts at the top, and of those below."""


def strip_board(drawing: Drawing, bare: Board) -> Board:
    """Return ``bare`` with the charts at the top of the page of a run that has metrics."""
    names = queries.metric_names(drawing.run)
    panels = all_panels(names, drawing.run.source)
    risk = [MetricChart(name) for name in names if name == f"{FORECAST}risk" and name not in _by_name(panels)]
    return replace(bare, strip=strip(drawing, [*panels, *risk]))


def all_board(drawing: Drawing, bare: Board) -> Board:
    """Return ``bare`` with the charts of all metrics of a run, or of those that match the search."""
    names = queries.metric_names(drawing.run)
    shown = shown_sections(drawing, names, all_panels(names, drawing.run.source))
    return replace(bare, sections=shown, pins=drawing.look.pins)


def bare_board(drawing: Drawing) -> Board:
    """Return the board of a run without charts: its axis, marks, range and choices."""
    run, look = drawing.run, drawing.look
    place = smoothing.place_of(run, look.axis) or _by_step(run)
    return Board(
        key=run.run_id,
        window=drawing.window,
        whole=(drawing.outline.first, drawing.outline.last),
        ink=drawing.ink,
        place=place,
        marks=marks_of_run(
            queries.alerts(run.run_id),
            drawing.findings,
            queries.events(run.run_id),
            drawing.outline.starts,
            queries.notes(run.run_id),
            recoveries=queries.store().recoveries(run.run_id),
        ),
        at=look.at,
        looks={
            "run": run.run_id,
            "axis": place.kind,
            "smooth": look.scales.smooth,
            "clip": look.scales.clip,
            "smooths": smoothing.SMOOTHS,
            "live": drawing.live,
            "whole": queries.is_whole(drawing.window),
            "attempt": run.attempt,
            "after": str(queries.store().judged(run.run_id)[1]),
            "api": f"{base_path()}/api/runs/{quote(run.run_id, safe='')}",
        },
    )
