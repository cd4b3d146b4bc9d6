"""Page that compares runs: the metrics that diverged first, their curves on one axis, and their settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import streamlit as st

from rlwatch.compare import (
    Absent,
    Axis,
    Comparison,
    ConfigOption,
    MetricSeries,
    Ruler,
    SeedGroup,
    compare,
    compare_groups,
    config_diff,
    group_of,
    judged_metrics,
    rows_that_count,
    ruler,
    subject_of_run,
)
from rlwatch.compare.alignment import names_of
from rlwatch.errors import ConfigError
from rlwatch.metrics import TABLE, unit_of
from rlwatch.records import RunInfo, RunState
from rlwatch.wording import cell

from . import board, charts, layout, overlays, queries, smoothing, table
from . import format as fmt
from .board import LAST, Board, BoardChart, ChartLine, ChartSection, StepAxis, by_step
from .charts import DARK
from .layout import GoToRun
from .markup import el, joined
from .overlays import Scales
from .queries import Version, store, store_url, version
from .thinning import Floats, ThinnedCurve, thin

MOST_RUNS, MOST_PANELS, FIRST_PANELS = 24, 12, 6
BUCKETS = 150
"""Buckets of each run in each chart; a bucket has two points."""
CHOSEN = "compared-runs"
NOT_GROUPED, BY_PROJECT, BY_NAME_STEM, BY_TAGS = "each run", "project", "name without its last number", "tags"
BY_SEEDS = "seeds of one configuration"
GRAIN = {Axis.TIME: 1000.0}
"""Integer positions for each unit of an axis; time is in milliseconds, so that short steps do not coincide."""
UNITS = {Axis.STEP: 1.0, Axis.TOKENS: 1e6, Axis.TIME: 3600e3, Axis.CRASH: 1.0}
SCALED = {Axis.TOKENS: ", millions", Axis.TIME: ", hours"}
AXES = {Axis.STEP: "step", Axis.TOKENS: "tokens", Axis.TIME: "time", Axis.CRASH: "distance to the crash"}


def page(go_to_run: GoToRun) -> None:
    """Draw the page that compares runs, which are chosen on it or in the list of runs; ``go_to_run`` opens the page of
    a run.
    """
    with layout.readable():
        known = queries.runs_by_id()
        chosen = _chosen(known)
        if len(chosen) < 2:
            st.caption("Select two or more runs here or in the list of runs.")
            return
        _compared(chosen, go_to_run)


def _chosen(known: Mapping[str, RunInfo]) -> list[RunInfo]:
    """Return the runs in the address. It has ids, because names need not be unique."""
    asked = [run_id for run_id in dict.fromkeys(st.query_params.get_all("runs")) if run_id in known]
    st.session_state.setdefault(CHOSEN, asked[:MOST_RUNS])
    names = labels(known.values())
    ids = st.multiselect(
        "Runs (the first is compared with each of the others)",
        list(known),
        key=CHOSEN,
        format_func=lambda run_id: names.get(run_id, run_id),
        max_selections=MOST_RUNS,
        placeholder="runs",
        on_change=_choose,
    )
    return [known[run_id] for run_id in ids if run_id in known]


def _choose() -> None:
    """Put the choice into the address."""
    st.query_params["runs"] = st.session_state[CHOSEN]


def labels(runs: Collection[RunInfo]) -> dict[str, str]:
    """Return the label of each run by its id: its name, with the id where several of ``runs`` have that name."""
    count = Counter(run.name for run in runs)
    return {
        run.run_id: fmt.shorten(f"{run.name} · {run.run_id}", 80)
        if run.name and count[run.name] > 1
        else fmt.shorten(run.name or run.run_id, 60)
        for run in runs
    }


def _compared(runs: Sequence[RunInfo], go_to_run: GoToRun) -> None:
    differing = config_diff([run.config for run in runs])
    with st.container(key="filters"):
        left, middle, right = st.columns([1, 1, 2])
    axis = Axis(left.selectbox("Align by", [axis.value for axis in AXES], key="by", bind="query-params"))
    grouped = middle.selectbox(
        "Group by",
        [NOT_GROUPED, BY_SEEDS, BY_PROJECT, BY_NAME_STEM, BY_TAGS, *(setting.name for setting in differing)],
        key="group",
        bind="query-params",
    )
    pairing = Axis.STEP if axis is Axis.CRASH else axis
    comparisons = [_comparison(store_url(), version(runs[0]), version(other), pairing) for other in runs[1:]]
    with right:
        metrics = _metrics(runs, comparisons)
    drawn = groups_of(runs, grouped, differing)
    groups = [(one.name, tuple(run.run_id for run in one.runs)) for one in drawn]
    if len(drawn) == 2 and all(len(one.runs) > 1 for one in drawn):
        answer = _noise_or_not(
            store_url(), tuple((one.name, tuple(version(run) for run in one.runs)) for one in drawn), pairing
        )
        st.html(joined(el("div", "Is the difference noise?", cls="rl-family"), el("div", answer, cls="rl-why")))
    live = any(run.state is RunState.RUNNING for run in runs)
    board.library()
    with st.container():
        st.fragment(show_curves, run_every=layout.REFRESH_S if live else None)(groups, axis, metrics)
    show_parted(comparisons)
    show_settings(runs, differing, go_to_run)


# Metrics that diverged, in order.


@st.cache_data(show_spinner="Comparing rows", max_entries=100)
def _comparison(url: str, left: Version, right: Version, axis: Axis) -> Comparison:  # noqa: ARG001
    source = store()
    one, other = (subject_of_run(source, source.run(version[0])) for version in (left, right))
    return compare(one, other, axis)


@st.cache_data(show_spinner="Comparing seeds", max_entries=100)
def _noise_or_not(
    url: str,  # noqa: ARG001
    groups: tuple[tuple[str, tuple[Version, ...]], ...],
    axis: Axis,
) -> str:
    """Return the result of comparing the seeds of two groups, or the reason why there is none."""
    source = store()
    one, other = (
        SeedGroup(name, tuple(subject_of_run(source, source.run(run_id)) for run_id, *_ in versions))
        for name, versions in groups
    )
    try:
        return compare_groups(one, other, axis).answer
    except ConfigError as error:
        return f"{error}."


PARTED_COLUMNS = (
    table.TableColumn("metric", "long"),
    table.TableColumn("diverged at", "right tight"),
    table.TableColumn("compared with", "tight middling"),
    table.TableColumn("first run", "right tight"),
    table.TableColumn("other run", "right tight"),
    table.TableColumn("x noise", "right tight middling"),
)


def show_parted(comparisons: Sequence[Comparison]) -> None:
    """Draw a sentence for each pair of runs in ``comparisons``, and a table of every metric that diverged.

    Pairs with the same answer share a sentence.
    """
    st.html(el("div", "First divergence", cls="rl-family"))
    answers: dict[tuple[str, str], list[str]] = {}
    for one in comparisons:
        answers.setdefault((one.left, one.answer), []).append(one.right)
    st.html(
        joined(
            *(
                el("div", el("b", f"{left} vs {', '.join(others)}"), f"  {answer}", cls="rl-why")
                for (left, answer), others in answers.items()
            )
        )
    )
    rows = [
        table.TableRow(
            [
                table.text(parted.metric),
                table.text("from the start" if parted.apart_from_start else one.axis.place(parted.at)),
                table.text(fmt.shorten(one.right, 40), quiet=True),
                table.text(fmt.number(parted.left)),
                table.text(fmt.number(parted.right)),
                table.text(fmt.number(parted.times)),
            ],
            quiet=parted.apart_from_start or parted.until is not None,
        )
        for one in comparisons
        for parted in one.partings
    ]
    if rows:
        table.show("parted", PARTED_COLUMNS, rows)


# Curves on one axis.


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that are drawn as one line of a chart: a single run, or the mean of several."""

    name: str
    runs: tuple[RunInfo, ...]


def groups_of(runs: Sequence[RunInfo], by: str, differing: Sequence[ConfigOption]) -> list[Group]:
    """Divide runs into groups by the property ``by`` (seeds, project, name, tags or a setting), in the given order.

    ``differing``: the settings in which the runs differ.
    """
    if by == NOT_GROUPED:
        names = labels(runs)
        return [Group(names[run.run_id], (run,)) for run in runs]
    setting = next((one for one in differing if one.name == by), None)
    keys: dict[str, Callable[[int], str]] = {
        BY_SEEDS: lambda place: group_of(runs[place]),
        BY_PROJECT: lambda place: runs[place].project,
        BY_NAME_STEM: lambda place: (runs[place].name or runs[place].run_id).rstrip("0123456789").rstrip("-_ ."),
        BY_TAGS: lambda place: ", ".join(sorted(runs[place].tags)) or "no tags",
    }

    def of_setting(place: int) -> str:
        return f"{by} {written(setting.values[place])}" if setting else by

    key = keys.get(by, of_setting)
    found: dict[str, list[RunInfo]] = {}
    for place, run in enumerate(runs):
        found.setdefault(key(place), []).append(run)
    return [Group(name if len(of) == 1 else f"{name} ({len(of)} runs)", tuple(of)) for name, of in found.items()]


def _metrics(runs: Sequence[RunInfo], comparisons: Sequence[Comparison]) -> list[str]:
    """Draw the choice of metrics and return it."""
    offered = _offered(store_url(), tuple(version(run) for run in runs))
    return st.multiselect(
        "Metrics",
        offered,
        default=first_metrics(offered, comparisons),
        key="metrics",
        max_selections=MOST_PANELS,
        bind="query-params",
    )


def show_curves(groups: Sequence[tuple[str, Sequence[str]]], axis: Axis, metrics: Sequence[str]) -> None:
    """Draw every metric of all runs on one axis; ``groups`` are names and the ids of their runs.

    A dragged range and a clicked position are kept in the address, in the units of :data:`GRAIN`.
    """
    with layout.readable():
        runs = {run_id: queries.run(run_id) for _, ids in groups for run_id in ids}
        laid = {run_id: _laid(store_url(), version(run), axis) for run_id, run in runs.items()}
        absent = [labels(runs.values())[run_id] for run_id, one in laid.items() if one is None]
        if absent:
            st.caption(f"{AXES[axis]} not logged by {', '.join(absent)}")
        known = [one for one in laid.values() if one is not None]
        drawn = [Group(name, tuple(runs[i] for i in ids if laid[i])) for name, ids in groups if any(map(laid.get, ids))]
        if not known:
            return
        whole = (min(one.first for one in known), max(one.last for one in known))
        window = charts.read_window(st.query_params, *whole)
        shown = (window.low, window.high)
        looks = Scales.of_address(st.query_params)
        lines = _lines(drawn, axis, metrics, shown, looks)
        panels = [
            overlays.overlay(name, lines[name], sub=unit_of(name), scales=looks) for name in metrics if lines[name]
        ]
        made = _board(axis, whole, shown, panels, drawn)
        made.study = study_of(drawn, [name for name in metrics if lines[name]])
        board.show_by_address(made)


def _board(
    axis: Axis, whole: tuple[int, int], shown: tuple[int, int], panels: Sequence[BoardChart], drawn: Sequence[Group]
) -> Board:
    looks, dark, notes = Scales.of_address(st.query_params), layout.ink() is DARK, ("", "mean ± std")
    return Board(
        key=f"compared-by-{axis}",
        window=shown,
        whole=whole,
        ink=layout.ink(),
        place=_place(axis, whole),
        sections=[ChartSection("overlaid", f"By {AXES[axis]}{SCALED.get(axis, '')}", panels, span=3)],
        looks={"smooth": looks.smooth, "clip": looks.clip, "smooths": smoothing.SMOOTHS},
        legend=[
            overlays.entry(group.name, place, notes[len(group.runs) > 1], dark=dark)
            for place, group in enumerate(drawn)
        ],
    )


LAST_PART = 10
"""The result of a run is the mean of the last one in this many of its finite rows."""


def study_of(groups: Sequence[Group], metrics: Sequence[str]) -> dict[str, Any] | None:
    """Return settings and results of several runs for a chart of results by setting, as plain values for JSON.

    Returns None without metrics, with fewer than two runs, or if no setting differs.
    """
    runs = [(place, run) for place, group in enumerate(groups) for run in group.runs]
    differing = config_diff([run.config for _, run in runs])
    if not differing or not metrics or len(runs) < 2:
        return None
    everything = (-EVERYWHERE, EVERYWHERE, None)
    read = [_rows(store_url(), version(run), Axis.STEP, tuple(metrics), everything) for _, run in runs]
    return {
        "names": list(labels([run for _, run in runs]).values()),
        "places": [place for place, _ in runs],
        "settings": [{"name": one.name, "values": [_coordinate(value) for value in one.values]} for one in differing],
        "results": [{"name": name, "values": [_result(of.get(name)) for of in read]} for name in metrics],
    }


def _coordinate(value: object) -> float | str | None:
    """Return a setting as a number or a text; None if it is missing."""
    if isinstance(value, Absent):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < EVERYWHERE:
        return float(value) if math.isfinite(value) else str(value)
    return written(value)


def _result(rows: MetricSeries | None) -> float | None:
    finite = np.empty(0) if rows is None else rows.values[np.isfinite(rows.values)]
    return float(f"{finite[-max(1, len(finite) // LAST_PART) :].mean():.4g}") if len(finite) else None


def _place(axis: Axis, whole: tuple[int, int]) -> StepAxis:
    if axis is Axis.STEP:
        return by_step(*whole)
    ends = np.array([whole[0], max(whole[1], whole[0] + 1)], dtype=np.float64)
    return StepAxis(axis.value, ends, ends / UNITS[axis])


@st.cache_data(show_spinner=False, max_entries=100)
def _offered(url: str, versions: tuple[Version, ...]) -> list[str]:  # noqa: ARG001
    """Return the metrics that any of the runs has, the most informative first."""
    source = store()
    names = {name for one in versions for name in judged_metrics(subject_of_run(source, source.run(one[0])))}
    rank = {metric.name: (metric.panel or 99, place) for place, metric in enumerate(TABLE)}
    return sorted(names, key=lambda name: (rank.get(name, (100, 0)), name))


def first_metrics(offered: Sequence[str], comparisons: Sequence[Comparison]) -> list[str]:
    """Return the metrics in ``offered`` to draw first: those that diverged by ``comparisons``, earliest first, then the
    most informative others.
    """
    parted = [one.metric for comparison in comparisons for one in comparison.partings if not one.apart_from_start]
    return [name for name in dict.fromkeys((*parted[: FIRST_PANELS // 2], *offered)) if name in offered][:FIRST_PANELS]


@dataclass(frozen=True, slots=True)
class Laid:
    """A run on an axis: its ruler (mapping from rows to positions), and its first and last position in units of
    :data:`GRAIN`.
    """

    ruler: Ruler
    first: int
    last: int


@st.cache_data(show_spinner=False, max_entries=400)
def _laid(url: str, version: Version, axis: Axis) -> Laid | None:  # noqa: ARG001  (url: part of the key)
    """Return a run on the axis, or None if it does not log what the axis needs."""
    source = store()
    run = source.run(version[0])
    outline = queries.outline(run)
    found = ruler(subject_of_run(source, run), axis, outline.last, outline.starts)
    if found is None:
        return None
    if axis is Axis.STEP:
        return Laid(found, outline.first, outline.last)
    first, last = np.interp((outline.first, outline.last), found.steps, found.places * GRAIN.get(axis, 1.0)).tolist()
    return Laid(found, math.floor(first), math.ceil(last))


@st.cache_data(show_spinner=False, max_entries=400)
def _rows(
    url: str,
    version: Version,
    axis: Axis,
    metrics: tuple[str, ...],
    part: tuple[int, int, int | None],
) -> dict[str, MetricSeries]:
    """Return current rows by position, within a range; thinned to extremes if ``part`` ends in a number of buckets."""
    one = _laid(url, version, axis)
    source = store()
    run = source.run(version[0])
    names = names_of(source.metric_names(run.run_id), run.source)
    held = {metric: names[metric] for metric in metrics if metric in names}
    if one is None or not held:
        return {}
    grain = GRAIN.get(axis, 1.0)
    low, high = np.interp(part[:2], one.ruler.places * grain, one.ruler.steps).tolist()
    steps = (max(math.floor(low), -LAST), min(math.ceil(high), LAST))
    read = source.series(run.run_id, sorted(set(held.values())), steps=steps, points=part[2])
    starts = queries.outline(run).starts
    rows = {metric: one.ruler.laid(rows_that_count(read[name], starts)) for metric, name in held.items()}
    return {metric: MetricSeries(of.x * grain, of.values) for metric, of in rows.items() if len(of)}


def _lines(
    groups: Sequence[Group], axis: Axis, metrics: Sequence[str], window: tuple[int, int], looks: Scales
) -> dict[str, list[ChartLine]]:
    """Return the lines of each metric: a single run by its extremes, several runs by the mean of their rows.

    Below a smoothed line, or the mean of a long run, the values of a single run are drawn pale.
    """
    found: dict[str, list[ChartLine]] = {metric: [] for metric in metrics}
    dark = layout.ink() is DARK
    for place, group in enumerate(groups):
        part = (*window, BUCKETS if len(group.runs) == 1 else None)
        read = [_rows(store_url(), version(run), axis, tuple(metrics), part) for run in group.runs]
        smooth = [_smoothed(version(run), axis, tuple(metrics), window, looks) for run in group.runs]
        means = (
            {} if looks.smooths or len(group.runs) > 1 else _long(version(group.runs[0]), axis, tuple(metrics), window)
        )
        for metric in metrics:
            members = [of[metric] for of in read if metric in of]
            smoothed = [of[metric] for of in smooth if metric in of]
            if len(members) == 1:
                raw = overlays.line(group.name, place, curve_of(members[0]), dark=dark)
                found[metric] += [
                    overlays.line(group.name, place, curve_of(one), dark=dark, smooth=True) for one in smoothed
                ]
                if metric in means:
                    middle = replace(mean_of([means[metric]])[0], bad=())
                    above = overlays.line(group.name, place, middle, dark=dark, smooth=True)
                    found[metric].append(replace(above, mute=True))  # the tooltip has what was measured
                pale = smoothed or metric in means
                found[metric].append(replace(raw, width=1.0, alpha=0.3) if pale else raw)
            elif members:
                made = mean_of(smoothed or members)
                found[metric].append(overlays.line(group.name, place, *made, dark=dark, smooth=bool(smoothed)))
    return found


EVERYWHERE = 2**53
"""A number beyond every position on an axis."""


def _smoothed(
    version: Version, axis: Axis, metrics: tuple[str, ...], window: tuple[int, int], looks: Scales
) -> dict[str, MetricSeries]:
    """Return the rows within ``window``, smoothed over the whole run; empty if smoothing is off."""
    if not looks.smooths:
        return {}
    whole = _rows(store_url(), version, axis, metrics, (-EVERYWHERE, EVERYWHERE, None))
    found = {}
    for metric, rows in whole.items():
        values = smoothing.smoothed(rows.values, looks.smooth, clip=looks.clip)
        inside = (rows.x >= window[0]) & (rows.x <= window[1]) & np.isfinite(values)
        found[metric] = MetricSeries(rows.x[inside], values[inside])
    return {metric: rows for metric, rows in found.items() if len(rows)}


ENOUGH = 4
"""Least number of rows for each point of a mean: of fewer, the rows are the better picture."""


def _long(version: Version, axis: Axis, metrics: tuple[str, ...], window: tuple[int, int]) -> dict[str, MetricSeries]:
    """Return all rows within ``window`` of the metrics that have many more rows than a chart has points."""
    whole = _rows(store_url(), version, axis, metrics, (-EVERYWHERE, EVERYWHERE, None))
    found = {}
    for metric, rows in whole.items():
        inside = (rows.x >= window[0]) & (rows.x <= window[1])
        if np.isfinite(rows.values[inside]).sum() >= ENOUGH * BUCKETS:
            found[metric] = MetricSeries(rows.x[inside], rows.values[inside])
    return found


def curve_of(rows: MetricSeries) -> ThinnedCurve:
    """Return the rows of a metric of one run, thinned to a drawable curve."""
    return thin(rows.x.astype(np.int64), rows.values, BUCKETS)


def mean_of(members: Sequence[MetricSeries]) -> tuple[ThinnedCurve, Floats]:
    """Return the mean of a metric over runs, and mean ± standard deviation (2, N), at places where two or more have a
    value.

    The rows of a run are first averaged within each of :data:`BUCKETS` buckets; values that are not finite are marked
    and left out of the mean.
    """
    low, high = min(float(of.x.min()) for of in members), max(float(of.x.max()) for of in members)
    width = max((high - low) / BUCKETS, 1.0)
    stretches = int((high - low) // width) + 1
    means = np.full((len(members), stretches), np.nan)
    for own, of in zip(means, members, strict=True):
        finite = np.isfinite(of.values)
        at = ((of.x[finite] - low) // width).astype(np.int64)
        rows = np.bincount(at, minlength=stretches)
        sums = np.bincount(at, of.values[finite], minlength=stretches)
        own[rows > 0] = sums[rows > 0] / rows[rows > 0]
    runs = np.isfinite(means).sum(axis=0)
    kept = np.flatnonzero(runs > 1) if (runs > 1).any() else np.flatnonzero(runs)
    middle = np.nanmean(means[:, kept], axis=0)
    spread = np.sqrt(np.nansum((means[:, kept] - middle) ** 2, axis=0) / np.maximum(runs[kept] - 1, 1))
    bad = tuple(sorted({item for of in members for item in curve_of(of).bad}))
    curve = ThinnedCurve((low + kept * width).astype(np.int64), middle, np.zeros(len(kept), dtype=np.bool_), bad)
    return curve, np.stack((middle - spread, middle + spread))


# Settings.


def written(value: object) -> str:
    """Return a setting's value as text for a table cell, a dash if it is missing."""
    if isinstance(value, Absent):
        return fmt.NOTHING
    return fmt.shorten("null" if value is None else cell(value), 60)


def show_settings(runs: Sequence[RunInfo], differing: Sequence[ConfigOption], go_to_run: GoToRun) -> None:
    """Draw a table of the settings in which the runs differ, one column a run, with a link to each run.

    ``differing``: these settings. ``go_to_run`` opens the page of a run.
    """
    st.html(el("div", "Settings that differ", cls="rl-family"))
    if not differing:
        st.caption("No differences in the recorded settings.")
    columns = (
        table.TableColumn("setting", "long"),
        *(table.TableColumn(fmt.shorten(label, 30), "tight") for label in labels(runs).values()),
    )
    links = table.TableRow([table.text("page", quiet=True), *(table.run_link(run.run_id, "", "open") for run in runs)])
    rows = [
        table.TableRow([table.text(one.name), *(table.text(written(value)) for value in one.values)])
        for one in differing
    ]
    opened = table.show("settings", columns, [*rows, links])
    if opened is not None:
        go_to_run(opened)
