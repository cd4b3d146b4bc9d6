"""ECharts options (plain JSON) for the charts of one family: small panels that share one step axis.

No JavaScript and no HTML is built here, and every name is drawn as text. What the charts promise: each
drawn point was measured; a NaN or an infinity is a red tick on the axis with its word in the tooltip;
what a later attempt replaced is dimmed; alarms stand at their steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import format as fmt
from .buckets import Branches, Curve
from .health import VERMILLION
from .marks import Mark
from .scales import PLAIN, Scale, scale_of

Option = dict[str, Any]

COLUMNS = 3
GAP = 1.2
"""Room between two panels, in per cent of the page's width (what Streamlit leaves between columns)."""
INSET = 1.0
"""Room for the last step's label at a panel's right, in the same unit."""

ROW_PX, HEAD_PX, FOOT_PX = 196, 50, 8


@dataclass(frozen=True, slots=True)
class Ink:
    """Colours (``#rrggbb``) that read on the theme's background."""

    line: str
    quiet: str
    grid: str
    band: str


LIGHT = Ink(line="#0072B2", quiet="#7A7A7A", grid="#EAEAEA", band="#0072B2")
DARK = Ink(line="#56B4E9", quiet="#9A9A9A", grid="#333333", band="#56B4E9")


@dataclass(frozen=True, slots=True)
class Plot:
    """One panel. ``baseline`` is the run's own healthy level, ``band`` its healthy range, if known."""

    title: str
    subtitle: str
    lines: Branches
    family: str = ""
    baseline: float | None = None
    band: tuple[float, float] | None = None

    @property
    def scale(self) -> Scale:
        """How its values become heights."""
        return scale_of(self.lines.current)


@dataclass(slots=True)
class _Panels:
    """The arrays of an option, filled panel by panel; what the panels share."""

    marks: Sequence[Mark]
    window: tuple[int, int]
    ink: Ink
    columns: int
    title: list[Option] = field(default_factory=list)
    grid: list[Option] = field(default_factory=list)
    x: list[Option] = field(default_factory=list)
    y: list[Option] = field(default_factory=list)
    series: list[Option] = field(default_factory=list)


def height(count: int, columns: int = COLUMNS) -> int:
    """Pixels that ``count`` panels need, ``columns`` to a row."""
    return -(-count // columns) * ROW_PX


def family_option(
    plots: Sequence[Plot], marks: Sequence[Mark], window: tuple[int, int], ink: Ink, columns: int = COLUMNS
) -> Option:
    """The option of one family's panels over the step ``window`` (both ends included)."""
    panels = _Panels([m for m in marks if window[0] <= m.step <= window[1]], window, ink, columns)
    for place, plot in enumerate(plots):
        _add(panels, place, plot)
    return {
        "animation": False,
        "title": panels.title,
        "grid": panels.grid,
        "xAxis": panels.x,
        "yAxis": panels.y,
        "series": panels.series,
        "axisPointer": {"link": [{"xAxisIndex": "all"}], "label": {"precision": 0}},
        "tooltip": {"trigger": "axis", "padding": [4, 8], "textStyle": {"fontSize": 11}, "transitionDuration": 0},
    }


def _add(panels: _Panels, place: int, plot: Plot) -> None:
    ink = panels.ink
    row, column = divmod(place, panels.columns)
    gap, inset = (room * COLUMNS / panels.columns for room in (GAP, INSET))
    width = (100 - gap * (panels.columns - 1)) / panels.columns
    left, top = column * (width + gap), row * ROW_PX
    panels.title.append(_title(plot, left, top + 4, ink))
    panels.grid.append(
        {
            "left": f"{left:.2f}%",
            "width": f"{width - inset:.2f}%",
            "containLabel": True,
            "top": top + HEAD_PX,
            "height": ROW_PX - HEAD_PX - FOOT_PX,
        }
    )
    panels.x.append(_step_axis(place, panels.window))
    panels.y += [_value_axis(place, plot, ink), {"gridIndex": place, "min": 0, "max": 1, "show": False}]
    panels.series.append(_line(place, plot, panels.marks, ink))
    panels.series += [_dimmed(place, plot, curve, ink) for curve in plot.lines.replaced if len(curve)]
    bad = [item for curve in (plot.lines.current, *plot.lines.replaced) for item in curve.bad]
    if bad:
        panels.series.append(_bad(place, plot, bad))


def _title(plot: Plot, left: float, top: int, ink: Ink) -> Option:
    note = " · ".join(filter(None, (plot.subtitle, plot.scale.note)))
    return {
        "text": fmt.shorten(plot.title, 60),
        "subtext": fmt.shorten(note.removeprefix(" · "), 80),
        "left": f"{left:.2f}%",
        "top": top,
        "padding": 0,
        "itemGap": 3,
        "textStyle": {"fontSize": 13, "fontWeight": 600, "lineHeight": 16},
        "subtextStyle": {"fontSize": 11, "lineHeight": 13, "color": ink.quiet},
    }


def _step_axis(place: int, window: tuple[int, int]) -> Option:
    low, high = window
    return {
        "type": "value",
        "gridIndex": place,
        "min": low,
        "max": high if high > low else low + 1,
        "minInterval": 1,
        "splitNumber": 4,
        "splitLine": {"show": False},
        "axisPointer": {"label": {"formatter": "step {value}"}},
        "axisLabel": {"formatter": "{value}", "fontSize": 11, "showMinLabel": False, "showMaxLabel": False},
    }


def _value_axis(place: int, plot: Plot, ink: Ink) -> Option:
    return {
        **plot.scale.axis(),
        "gridIndex": place,
        "scale": True,
        "splitNumber": 3,
        "splitLine": {"lineStyle": {"color": ink.grid}},
    }


def _line(place: int, plot: Plot, marks: Sequence[Mark], ink: Ink) -> Option:
    curve, scale = plot.lines.current, plot.scale
    line: Option = {
        "type": "line",
        "name": plot.title,
        "xAxisIndex": place,
        "yAxisIndex": 2 * place,
        "data": points(curve, scale),
        "showSymbol": len(curve) <= 2,
        "itemStyle": {"color": ink.line},
        "lineStyle": {"width": 1.5, "color": ink.line},
        "markLine": {
            "silent": True,
            "animation": False,
            "symbol": "none",
            "data": [*_level(plot, ink), *(_mark(mark, plot.family) for mark in marks)],
        },
    }
    if not scale.plain:
        line |= {"dimensions": ["step", "height", "value"], "encode": {"x": 0, "y": 1, "tooltip": [2]}}
    band = [scale.height(value) for value in plot.band or ()]
    if band and None not in band:
        line["markArea"] = {
            "silent": True,
            "itemStyle": {"color": ink.band, "opacity": 0.08},
            "data": [[{"yAxis": height} for height in band]],
        }
    return line


def points(curve: Curve, scale: Scale = PLAIN) -> list[list[float | int | None]]:
    """``[step, value]`` pairs; ``[step, None]`` where the line must break. On a scale that is not plain
    ``[step, height, value]``.
    """
    pairs: list[list[float | int | None]] = []
    for at, value, broken in zip(curve.steps.tolist(), curve.values.tolist(), curve.breaks.tolist(), strict=True):
        if broken:
            pairs.append([at, None])
        exact = float(f"{value:.6g}")
        pairs.append([at, exact] if scale.plain else [at, scale.height(value), exact])
    return pairs


def _dimmed(place: int, plot: Plot, curve: Curve, ink: Ink) -> Option:
    return {
        "type": "line",
        "name": f"{plot.title} (replaced)",
        "xAxisIndex": place,
        "yAxisIndex": 2 * place,
        "data": points(curve, plot.scale),
        "showSymbol": False,
        "silent": True,
        "tooltip": {"show": False},
        "itemStyle": {"color": ink.quiet},
        "lineStyle": {"width": 1, "color": ink.quiet, "opacity": 0.45},
    }


def _bad(place: int, plot: Plot, bad: Sequence[tuple[int, str]]) -> Option:
    return {
        "type": "scatter",
        "name": plot.title,
        "xAxisIndex": place,
        "yAxisIndex": 2 * place + 1,
        "symbol": "rect",
        "symbolSize": [2, 12],
        "symbolOffset": [0, -5],
        "itemStyle": {"color": VERMILLION, "opacity": 1},
        "dimensions": ["step", "place", {"name": "value", "type": "ordinal"}],
        "encode": {"x": 0, "y": 1, "tooltip": [2]},
        "data": [[step, 0, word] for step, word in bad],
    }


def _level(plot: Plot, ink: Ink) -> list[Option]:
    if plot.baseline is None or not np.isfinite(plot.baseline):
        return []
    height = plot.scale.height(plot.baseline)
    if height is None:
        return []
    style = {"color": ink.quiet, "type": "dotted", "width": 1}
    label = {"position": "insideEndTop", "formatter": "baseline", "fontSize": 10, "color": ink.quiet, "distance": 1}
    return [{"yAxis": height, "lineStyle": style, "label": label}]


def _mark(mark: Mark, family: str) -> Option:
    concerned = not mark.families or family in mark.families
    return {
        "xAxis": mark.step,
        "name": mark.text,
        "lineStyle": {
            "color": mark.colour,
            "type": "dashed" if mark.dashed else "solid",
            "width": 1,
            "opacity": 0.9 if concerned else 0.3,
        },
        "label": {"show": bool(mark.shape) and concerned, "formatter": mark.shape, "color": mark.colour, "distance": 2},
    }
