"""Runs beside each other: what parted first, their curves on one axis, their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import streamlit as st

from rlwatch.compare import (
    Absent,
    Axis,
    Comparison,
    Setting,
    Side,
    compare,
    config_diff,
    judged_metrics,
    subject_of_run,
)
from rlwatch.metrics import BY_NAME, TABLE
from rlwatch.records import RunInfo
from rlwatch.wording import cell

from . import format as fmt
from . import layout, queries, table
from .charts import height
from .layout import GoToRun
from .markup import Markup, el, joined
from .overlays import Line, Overlay, overlay_option
from .queries import Version, store, store_url, version
from .thinning import Curve, thin

MOST_RUNS, MOST_PANELS, FIRST_PANELS = 24, 12, 6
BUCKETS = 150
"""Two points a bucket, of each run in each panel."""
COLUMNS = 3
CHOSEN = "compared-runs"
NOT_GROUPED, BY_PROJECT, BY_NAME_STEM, BY_TAGS = "each run", "project", "name without its last number", "tags"
AXES = {Axis.STEP: "step", Axis.TOKENS: "tokens", Axis.TIME: "time", Axis.CRASH: "distance to the crash"}


def page(go_to_run: GoToRun) -> None:
    """Choose runs, here or in the list of runs, and see them on one axis."""
    with layout.readable():
        known = queries.runs_by_id()
        chosen = _chosen(known)
        if len(chosen) < 2:
            st.caption("Choose two runs or more, here or by their boxes in the list of runs.")
            return
        _compared(chosen, go_to_run)


def _chosen(known: Mapping[str, RunInfo]) -> list[RunInfo]:
    """The runs that the address names, by their ids: it can be shared, and names may be given twice."""
    asked = [run_id for run_id in dict.fromkeys(st.query_params.get_all("runs")) if run_id in known]
    st.session_state.setdefault(CHOSEN, asked[:MOST_RUNS])
    ids = st.multiselect(
        "Runs; the first is held against each of the others",
        list(known),
        key=CHOSEN,
        format_func=lambda run_id: called(known[run_id]) if run_id in known else run_id,
        max_selections=MOST_RUNS,
        placeholder="runs",
        on_change=_choose,
    )
    return [known[run_id] for run_id in ids if run_id in known]


def _choose() -> None:
    """Put the choice into the address."""
    st.query_params["runs"] = st.session_state[CHOSEN]


def called(run: RunInfo) -> str:
    """Name of a run among others: two may have the same, so its id goes with it."""
    return fmt.shorten(run.name or run.run_id, 60) if not run.name else fmt.shorten(f"{run.name} · {run.run_id}", 80)


def _compared(runs: Sequence[RunInfo], go_to_run: GoToRun) -> None:
    differing = config_diff([run.config for run in runs])
    left, right = st.columns(2)
    axis = Axis(left.selectbox("Aligned by", [axis.value for axis in AXES], key="by", bind="query-params"))
    grouped = right.selectbox(
        "Grouped by",
        [NOT_GROUPED, BY_PROJECT, BY_NAME_STEM, BY_TAGS, *(setting.name for setting in differing)],
        key="group",
        bind="query-params",
    )
    pairing = Axis.STEP if axis is Axis.CRASH else axis
    comparisons = [_comparison(store_url(), version(runs[0]), version(other), pairing) for other in runs[1:]]
    show_parted(comparisons)
    _curves(runs, axis, groups_of(runs, grouped, differing), comparisons)
    show_settings(runs, differing, go_to_run)


# What parted first.


@st.cache_data(show_spinner="Comparing rows", max_entries=100)
def _comparison(url: str, left: Version, right: Version, axis: Axis) -> Comparison:  # noqa: ARG001
    source = store()
    one, other = (subject_of_run(source, source.run(version[0])) for version in (left, right))
    return compare(one, other, axis)


PARTED_COLUMNS = (
    table.Column("metric", "long"),
    table.Column("parted at", "right tight"),
    table.Column("against", "tight middling"),
    table.Column("first run", "right tight"),
    table.Column("other run", "right tight"),
    table.Column("times chance", "right tight middling"),
)


def show_parted(comparisons: Sequence[Comparison]) -> None:
    """A sentence a pair, and a table of every metric that parted."""
    st.html(el("div", "Parted first", cls="rl-family"))
    st.html(
        joined(
            *(
                el("div", el("b", f"{one.left} against {one.right}"), f"  {one.answer}", cls="rl-why")
                for one in comparisons
            )
        )
    )
    rows = [
        table.Row(
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
    """Runs that are drawn as one line: a run alone, or the mean of several."""

    name: str
    runs: tuple[RunInfo, ...]


def groups_of(runs: Sequence[RunInfo], by: str, differing: Sequence[Setting]) -> list[Group]:
    """The runs by what they share, in the order in which they were chosen."""
    if by == NOT_GROUPED:
        return [Group(called(run), (run,)) for run in runs]
    setting = next((one for one in differing if one.name == by), None)
    keys: dict[str, Callable[[int], str]] = {
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


def _curves(runs: Sequence[RunInfo], axis: Axis, groups: Sequence[Group], comparisons: Sequence[Comparison]) -> None:
    offered = _offered(store_url(), tuple(version(run) for run in runs))
    metrics = st.multiselect(
        "Metrics",
        offered,
        default=first_metrics(offered, comparisons),
        key="metrics",
        max_selections=MOST_PANELS,
        bind="query-params",
    )
    laid = {run.run_id: _laid(store_url(), version(run), axis, tuple(metrics)) for run in runs}
    absent = [called(run) for run in runs if laid[run.run_id] is None]
    if absent:
        st.caption(f"Did not record {AXES[axis]}: {', '.join(absent)}")
    drawn = [group for group in groups if any(laid[run.run_id] for run in group.runs)]
    st.html(joined(_legend(drawn)))
    overlays = [Overlay(metric, _unit(metric), lines) for metric in metrics if (lines := _lines(metric, drawn, laid))]
    if overlays:
        st.echarts_chart(
            overlay_option(overlays, axis, layout.ink(), COLUMNS),
            height=height(len(overlays), COLUMNS),
            key="overlaid",
            alt=f"{', '.join(metrics)} of {', '.join(group.name for group in drawn)} by {AXES[axis]}",
        )


def _unit(metric: str) -> str:
    return BY_NAME[metric].unit if metric in BY_NAME else ""


@st.cache_data(show_spinner=False, max_entries=100)
def _offered(url: str, versions: tuple[Version, ...]) -> list[str]:  # noqa: ARG001
    """Metrics that any of the runs has, the telling first."""
    source = store()
    names = {name for one in versions for name in judged_metrics(subject_of_run(source, source.run(one[0])))}
    rank = {metric.name: (metric.panel or 99, place) for place, metric in enumerate(TABLE)}
    return sorted(names, key=lambda name: (rank.get(name, (100, 0)), name))


def first_metrics(offered: Sequence[str], comparisons: Sequence[Comparison]) -> list[str]:
    """Metrics that parted, first first, then those that tell most."""
    parted = [one.metric for comparison in comparisons for one in comparison.partings if not one.apart_from_start]
    return [name for name in dict.fromkeys((*parted[: FIRST_PANELS // 2], *offered)) if name in offered][:FIRST_PANELS]


@dataclass(frozen=True, slots=True)
class Laid:
    """One metric of a run on the axis: thinned, and its mean in the bins of a grid that all runs share."""

    curve: Curve
    bins: tuple[int, ...]
    means: tuple[float, ...]
    width: float


@st.cache_data(show_spinner=False, max_entries=400)
def _laid(url: str, version: Version, axis: Axis, metrics: tuple[str, ...]) -> dict[str, Laid] | None:  # noqa: ARG001
    """The metrics of a run; None where it does not tell what the axis needs."""
    source = store()
    side = Side.of(subject_of_run(source, source.run(version[0])), axis)
    if side.ruler is None:
        return None
    found = {}
    for name, rows in side.rows(metrics).items():
        if not len(rows):
            continue
        span = max(float(np.ptp(rows.x)), 1.0)
        width = 10.0 ** np.floor(np.log10(span / BUCKETS)) if span > BUCKETS else 1.0
        finite = np.isfinite(rows.values)
        bins, places = np.unique(np.floor(rows.x[finite] / width), return_inverse=True)
        means = np.bincount(places, rows.values[finite], len(bins)) / np.maximum(
            np.bincount(places, minlength=len(bins)), 1
        )
        curve = thin(rows.x.astype(np.int64), rows.values, BUCKETS)
        found[name] = Laid(curve, tuple(bins.astype(int).tolist()), tuple(means.tolist()), float(width))
    return found


def _lines(metric: str, groups: Sequence[Group], laid: Mapping[str, Mapping[str, Laid] | None]) -> list[Line]:
    found = []
    for place, group in enumerate(groups):
        members = [of[metric] for run in group.runs if (of := laid[run.run_id]) and metric in of]
        if len(members) == 1:
            found.append(Line(group.name, place, members[0].curve))
        elif members:
            curve, band = mean_of(members)
            found.append(Line(group.name, place, curve, band))
    return found


def mean_of(members: Sequence[Laid]) -> tuple[Curve, np.ndarray]:
    """Mean over the runs, and mean less and plus their standard deviation (2, N), where two or more have a value.

    A row that is not finite in one of them is marked and no part of the mean.
    """
    width = max(*(one.width for one in members), _span(members) / (2 * BUCKETS))
    sums: dict[int, list[float]] = {}
    for one in members:
        own: dict[int, list[float]] = {}
        for at, mean in zip(one.bins, one.means, strict=True):
            own.setdefault(int(at * one.width // width), []).append(mean)
        for at, means in own.items():
            sums.setdefault(at, []).append(sum(means) / len(means))
    kept = sorted(at for at, means in sums.items() if len(means) > 1) or sorted(sums)
    middle = np.array([np.mean(sums[at]) for at in kept])
    spread = np.array([np.std(sums[at], ddof=1) if len(sums[at]) > 1 else 0.0 for at in kept])
    steps = np.array([at * width for at in kept]).astype(np.int64)
    bad = tuple(sorted({item for one in members for item in one.curve.bad}))
    return Curve(steps, middle, np.zeros(len(kept), dtype=np.bool_), bad), np.stack((middle - spread, middle + spread))


def _span(members: Sequence[Laid]) -> float:
    ends = [at * one.width for one in members for at in (one.bins[:1] + one.bins[-1:])]
    return max(ends, default=0.0) - min(ends, default=0.0)


def _legend(groups: Sequence[Group]) -> Markup:
    empty = Curve(np.empty(0, np.int64), np.empty(0), np.empty(0, np.bool_))
    looks = [Line(group.name, place, empty) for place, group in enumerate(groups)]
    return el(
        "div",
        *(
            el(
                "span",
                el(
                    "span",
                    cls="swatch",
                    style=f"background:{look.fill};border:2px {look.dash} {look.colour}",
                ),
                look.name + (" · mean ± std" if len(group.runs) > 1 else ""),
            )
            for look, group in zip(looks, groups, strict=True)
        ),
        cls="rl-legend",
    )


# Settings.


def written(value: object) -> str:
    """A setting's value in a cell; a dash where it was not given."""
    if isinstance(value, Absent):
        return fmt.NOTHING
    return fmt.shorten("null" if value is None else cell(value), 60)


def show_settings(runs: Sequence[RunInfo], differing: Sequence[Setting], go_to_run: GoToRun) -> None:
    """The settings in which the runs differ, a column a run; and the way to each run."""
    st.html(el("div", "Settings that differ", cls="rl-family"))
    if not differing:
        st.caption("None, as far as they are recorded.")
    columns = (table.Column("setting", "long"), *(table.Column(fmt.shorten(called(run), 30), "tight") for run in runs))
    links = table.Row([table.text("page", quiet=True), *(table.run_link(run.run_id, "", run.name) for run in runs)])
    rows = [
        table.Row([table.text(one.name), *(table.text(written(value)) for value in one.values)]) for one in differing
    ]
    opened = table.show("settings", columns, [*rows, links])
    if opened is not None:
        go_to_run(opened)
