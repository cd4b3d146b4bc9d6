"""Boards: charts that share an axis and a cursor, as plain JSON that ``board.js`` draws with uPlot (``vendor/``).

Every drawn point was measured; a NaN or an infinity is a mark on the axis with its word in the tooltip; a value beyond
the range is a triangle at the edge with its value. No HTML is built here, and every name is drawn as text.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from rlwatch.wording import number

from . import charts
from .charts import Ink
from .endpoint import module_address, modules
from .marks import ChartMark
from .page_script import base_path, page_script
from .thinning import Branches, Floats, ThinnedCurve

Json = dict[str, Any]
DIGITS = 6
LINEAR, LOG, ASINH = 0, 1, 2


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart: its points and its style. ``mute``: not in the tooltip.

    ``area`` (2, N): low and high ends of the shaded area around its points; ``dots``: size of the points if no line
    joins them; ``shown`` (N,): values for the tooltip if not the heights of the points. ``place``: its entry
    of the legend, if several runs are drawn; ``smooth``: it is a smoothed line.
    """

    curve: ThinnedCurve
    colour: str
    name: str = ""
    width: float = 1.5
    alpha: float = 1.0
    dash: tuple[int, int] | None = None
    fill: str = ""
    mute: bool = False
    area: Floats | None = None
    dots: int = 0
    shown: Floats | None = None
    place: int | None = None
    smooth: bool = False


@dataclass(frozen=True, slots=True)
class Cells:
    """A heat map in place of lines: a row for each of ``names``, a column from each of ``starts`` (C + 1) to the next.

    ``values`` (R, C), NaN where nothing was measured; the colour of a cell is its value divided by the ``usual`` (R,)
    value of its row, and blank if that is NaN. ``bad`` (R, C): cells that were not finite, drawn in a colour of their
    own.
    """

    names: Sequence[str]
    starts: Sequence[int]
    values: Floats
    usual: Floats
    bad: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Shades:
    """A density map under the lines: the share of each column, from one of ``starts`` (C + 1) to the next, in each row.

    ``shares`` (R, C) in [0, 1], NaN where nothing is known; ``ends`` (R + 1,) of the rows, lowest first; ``ticks``:
    positions among the rows and their labels.
    """

    starts: Sequence[int]
    shares: Floats
    ends: Floats
    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class BoardChart:
    """One chart of a board. ``name`` identifies it; ``rules`` are horizontal lines with their labels.

    ``ends``: range and scale of the chart's axis for each view (linear or logarithmic, each with outliers cut and not),
    if the browser chooses; ``usual``: the range beyond which values are outliers. ``pin``: the text of a pinned chart
    (``pinned.py``), ``columns`` wide; ``pair``: two charts in one; ``made``: computed from other metrics, so the
    browser cannot fetch its rows.
    """

    name: str
    title: str
    lines: Sequence[ChartLine]
    range: tuple[float, float]
    sub: str = ""
    about: str = ""
    family: str = ""
    scale: int = LINEAR
    pinned: bool = False
    band: tuple[float, float] | None = None
    rules: Sequence[tuple[float, str]] = ()
    last: float | None = None
    unit: str = ""
    cells: Cells | None = None
    shades: Shades | None = None
    height: int = 150
    ends: Sequence[tuple[float, float, int]] = ()
    usual: tuple[float, float] | None = None
    pin: str = ""
    columns: int = 1
    pair: Sequence[BoardChart] = ()
    made: bool = False


@dataclass(frozen=True, slots=True)
class ChartSection:
    """Charts under one heading; ``more`` of them are folded behind a click, and ``open``: unfolded.

    ``span``: width in thirds of the page, by default its number of charts.
    """

    key: str
    title: str
    panels: Sequence[BoardChart]
    note: str = ""
    more: int = 0
    open: bool = False
    span: int = 0


@dataclass(frozen=True, slots=True)
class StepAxis:
    """Mapping from steps to positions on a chart's axis, by ``steps`` and ``places`` (N,), or the identity if both are
    None.

    ``kind`` is ``step``, ``crash`` (steps from the crash), ``time`` (hours), ``tokens`` (millions) or ``chance`` (per
    cent). ``origin``: the step from which positions are counted, if steps exceed the integers that a browser holds
    exactly.
    """

    kind: str = "step"
    steps: Floats | None = None
    places: Floats | None = None
    origin: int = 0

    def of(self, steps: Any) -> Floats:
        """Return the positions of ``steps`` on the axis."""
        if self.steps is None or self.places is None:
            counted = np.asarray(steps)
            return (counted - self.origin if self.origin else counted).astype(np.float64)
        return np.interp(np.asarray(steps, dtype=np.float64), self.steps, self.places)

    def step(self, place: float) -> int:
        """Return the step nearest to the position ``place`` on the axis."""
        if self.steps is None or self.places is None:
            return min(round(place) + self.origin, LAST)
        return round(float(np.interp(place, self.places, self.steps)))


LAST = 2**63 - 1
"""The largest step that a store can hold."""


def by_step(first: int, last: int) -> StepAxis:
    """Return the axis whose positions are the steps from ``first`` to ``last``."""
    return StepAxis(origin=first if last > charts.FARTHEST else 0)


@dataclass(slots=True)
class Board:
    """Charts of a part of a page that share an axis. Boards with equal ``key`` share a cursor; ``window`` is in steps.

    ``looks``: the drawn view (scale, smoothing) and the run, if the browser draws other views by itself (``look.js``).
    ``legend``: the runs of a comparison, which the browser hides and shows; ``study``: their settings and results.
    """

    key: str
    window: tuple[int, int]
    whole: tuple[int, int]
    ink: Ink
    place: StepAxis = field(default_factory=StepAxis)
    strip: Sequence[BoardChart] = ()
    sections: Sequence[ChartSection] = ()
    marks: Sequence[ChartMark] = ()
    at: int | None = None
    asked: Sequence[float] | None = None
    pins: Sequence[str] | None = None
    looks: Mapping[str, Any] | None = None
    legend: Sequence[Mapping[str, Any]] | None = None
    study: Mapping[str, Any] | None = None

    def data(self) -> Json:
        """Return the input of ``board.js`` as strict JSON, for any measured values."""
        return {
            "key": self.key,
            "axis": self.place.kind,
            "origin": str(self.place.origin),
            "window": self._ends(self.window),
            "whole": self._ends(self.whole),
            "asked": None if self.asked is None else list(self.asked),
            "at": None if self.at is None else _digits(float(self.place.of(self.at))),
            "ink": {
                "line": self.ink.line, "quiet": self.ink.quiet, "grid": self.ink.grid, "band": self.ink.band,
                "text": self.ink.text, "bad": self.ink.bad,
            },
            "pins": None if self.pins is None else list(self.pins),
            **({} if self.looks is None else {"looks": dict(self.looks)}),
            **({} if self.legend is None else {"legend": [dict(entry) for entry in self.legend]}),
            **({} if self.study is None else {"study": dict(self.study)}),
            "marks": [self._mark(mark) for mark in self.marks],
            "strip": [self._panel(panel) for panel in self.strip],
            "sections": [
                {
                    "key": section.key, "title": section.title, "note": section.note, "more": section.more,
                    "open": section.open,
                    "span": section.span,
                    "panels": [self._panel(panel) for panel in section.panels],
                }
                for section in self.sections
            ],
        }  # fmt: skip

    def _ends(self, window: tuple[int, int]) -> list[float]:
        low, high = (_digits(end) for end in self.place.of(window).tolist())
        return [low, high if high > low else low + 1]

    def _mark(self, mark: ChartMark) -> Json:
        return {
            "x": _digits(float(self.place.of(mark.step))), "step": _whole(mark.step), "shape": mark.shape,
            "colour": mark.colour, "text": mark.text, "more": mark.more, "dashed": mark.dashed,
            "families": sorted(mark.families), "rank": mark.rank,
            "until": None if mark.until is None else _digits(float(self.place.of(mark.until))),
            "lines": [list(line) for line in mark.lines],
            "go": {"to": mark.go, "step": _whole(mark.step), "label": mark.go_label} if mark.go else None,
        }  # fmt: skip

    def _panel(self, panel: BoardChart) -> Json:
        low, high = panel.range
        bad = [(*point, line.name) for line in panel.lines for point in line.curve.bad]
        return {
            "name": panel.name,
            "title": panel.title,
            "sub": panel.sub,
            "about": panel.about,
            "family": panel.family,
            "pinned": panel.pinned,
            "log": panel.scale,
            "scale": {LOG: "log scale", ASINH: "log scale, both ways"}.get(panel.scale, ""),
            "range": [_digits(low), _digits(high)],
            "band": None if panel.band is None else [_digits(end) for end in panel.band],
            "rules": [[_digits(level), words] for level, words in panel.rules],
            "last": None if panel.last is None else f"{number(panel.last)}{panel.unit}",
            **({"unit": panel.unit} if panel.unit else {}),
            "lastBad": panel.last is not None and not math.isfinite(panel.last),
            "bad": [[_digits(float(self.place.of(at))), word, name] for at, word, name in dict.fromkeys(bad)],
            "beyond": [point for line in panel.lines if not line.mute for point in self._beyond(line, low, high)],
            "lines": [self._line(line) for line in panel.lines],
            "height": panel.height,
            **(
                {"ends": [[_digits(low), _digits(high), scale] for low, high, scale in panel.ends]}
                if panel.ends
                else {}
            ),
            **({} if panel.usual is None else {"usual": [_digits(end) for end in panel.usual]}),
            **({"pin": panel.pin, "columns": panel.columns} if panel.pin else {}),
            **({"pair": [self._panel(one) for one in panel.pair]} if panel.pair else {}),
            **({"made": True} if panel.made else {}),
            **({} if panel.cells is None else {"cells": self._cells(panel.cells)}),
            **({} if panel.shades is None else {"shades": self._shades(panel.shades)}),
        }

    def _beyond(self, line: ChartLine, low: float, high: float) -> list[list[float | str]]:
        curve = line.curve
        outside = (curve.values < low) | (curve.values > high)
        if not outside.any():
            return []
        places = self.place.of(curve.steps[outside]).tolist()
        values = curve.values[outside].tolist()
        return [[_digits(x), _digits(y), line.name, line.colour] for x, y in zip(places, values, strict=True)]

    def _cells(self, cells: Cells) -> Json:
        return {
            "names": list(cells.names),
            "starts": [_digits(at) for at in self.place.of(cells.starts).tolist()],
            "values": [_finite(value) for value in cells.values.ravel().tolist()],
            "usual": [_finite(value) for value in cells.usual.tolist()],
            "bad": np.flatnonzero(cells.bad).tolist(),
        }

    def _shades(self, shades: Shades) -> Json:
        """Encode cells by column, in hundredths of the root of the share of ``most``: short, and rare values show."""
        shares = np.nan_to_num(shades.shares)
        most = float(shares.max(initial=0.0)) or 1.0
        return {
            "starts": [_digits(at) for at in self.place.of(shades.starts).tolist()],
            "cells": np.ceil(100 * np.sqrt(shares / most)).astype(int).T.ravel().tolist(),
            "most": _finite(most),
            "ends": [_digits(end) for end in shades.ends.tolist()],
            "ticks": [[_digits(at), words] for at, words in shades.ticks],
        }

    def _line(self, line: ChartLine) -> Json:
        xs, ys = points(line.curve, self.place)
        look = {"name": line.name, "colour": line.colour, "width": line.width, "alpha": line.alpha, "mute": line.mute}
        if line.dash:
            look["dash"] = list(line.dash)
        if line.fill:
            look["fill"] = line.fill
        if line.dots:
            look["dots"] = line.dots
        if line.place is not None:
            look["place"] = line.place
        if line.smooth:
            look["smooth"] = True
        if line.shown is not None:
            look["shown"] = points(replace(line.curve, values=line.shown), self.place)[1]
        if line.area is not None:
            ends = (replace(line.curve, values=end) for end in line.area)
            look["low"], look["high"] = (points(end, self.place)[1] for end in ends)
        if all(isinstance(x, int) for x in xs):  # steps: their distances are shorter to write
            return {**look, "dx": [after - before for before, after in pairwise([0, *xs])], "y": ys}
        return {**look, "x": xs, "y": ys}


def points(curve: ThinnedCurve, place: StepAxis) -> tuple[list[float], list[float | None]]:
    """Return the positions and values of a curve's points, with a None between two points where the line must break.

    Rows of one step are placed a thousandth of a step apart, or only one of them would be drawn.
    """
    places = place.of(curve.steps)
    if len(places) > 1 and place.steps is None and (np.diff(places) == 0).any():
        first = np.maximum.accumulate(np.where(np.diff(places, prepend=places[0] - 1) > 0, np.arange(len(places)), 0))
        places = places + 1e-3 * np.minimum(np.arange(len(places)) - first, 400)
    xs: list[float] = _all_digits(places)
    ys: list[float | None] = [*_all_digits(curve.values)]
    for i in reversed(np.flatnonzero(curve.breaks).tolist()):
        if i:
            xs.insert(i, _digits((xs[i - 1] + float(places[i])) / 2))
            ys.insert(i, None)
    return xs, ys


EXACT = (1e-12, 1e9)
"""Bounds of the absolute values that are rounded to decimals by an exact power of ten."""


def _all_digits(values: Floats) -> list[float]:
    """Apply :func:`_digits` to each of ``values`` (N,)."""
    size = np.abs(values)
    size[size == 0] = 1.0
    if not ((size > EXACT[0]) & (size < EXACT[1])).all():
        return [_digits(value) for value in values.tolist()]
    unit = 10.0 ** (np.where(size < 1e5, DIGITS, 10) - 1 - np.floor(np.log10(size)))
    rounded: list[float] = (np.rint(values * unit) / unit).tolist()
    return [int(value) if value.is_integer() else value for value in rounded]


def _finite(value: float) -> float | None:
    """Round a cell's value to three digits; None if it is not finite."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _whole(step: int) -> int | str:
    """Return a step, as a string where a browser would round it."""
    return step if step <= charts.FARTHEST else str(step)


def _digits(value: float) -> float | int:
    """Round a value to six significant digits, a large one to ten, an integer not at all; short in JSON."""
    if value == (whole := round(value)):
        return whole if abs(value) < 2**53 else value
    return float(f"{value:.{DIGITS}g}") if abs(value) < 1e5 else float(f"{value:.10g}")


# Ranges of axes.

LOG_SPREAD = 200.0
"""Ratio of the largest value to the median from which a positive metric is drawn on a logarithmic axis."""
ROOM = 0.06
"""Margin above and below the values, as a share of their span."""
EDGE, BEYOND = 0.02, 2.0
"""Largest share of the rows at either end that may be outliers, and their least distance from the rest
in spans of it.
"""
FARTHEST_END = 1e306
"""Largest magnitude of an end of an axis: the length of the axis, and its margins, are numbers as well."""
RUN = 3
"""Most neighbouring rows that may be outliers together; more are a change, not a spike."""


def usual_range(values: Floats) -> tuple[float, float]:
    """Return the lowest and highest of ``values`` (N,), without single outliers.

    Values that last for more than a few rows are never left out, and the last row is always included.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if len(finite) < 20:
        return low, high
    inner = np.quantile(finite, (EDGE, 1 - EDGE))
    span = float(inner[1] - inner[0]) or max(abs(float(inner[1])), 1e-12) * 0.05
    return (
        _end(finite, inner[0] - BEYOND * span, low, sign=-1),
        _end(finite, inner[1] + BEYOND * span, high, sign=1),
    )


def _end(values: Floats, limit: float, extreme: float, sign: int) -> float:
    """Return the extreme, or the one within the limit if the rows beyond it are single outliers."""
    beyond = sign * values > sign * limit
    if not beyond.any() or beyond[-1] or beyond.mean() > EDGE:
        return extreme
    edges = np.flatnonzero(np.diff(np.concatenate(([0], beyond.astype(np.int8), [0]))))
    if (edges[1::2] - edges[::2]).max() > RUN:
        return extreme
    kept = values[~beyond]
    return float(kept.max() if sign > 0 else kept.min())


def wide(values: Floats) -> bool:
    """Return True if a linear axis would flatten all but a few of ``values`` (N,)."""
    return len(values) >= 8 and bool(values.min() > 0 and values.max() > LOG_SPREAD * np.median(values))


def axis_range(
    ends: tuple[float, float], scale: int = LINEAR, limits: tuple[float | None, float | None] = (None, None)
) -> tuple[float, float]:
    """Return the axis range for values within ``ends``: with a margin, clipped to the metric's ``limits``.

    ``scale``: linear or logarithmic.

    >>> axis_range((0.0, 0.5), limits=(0.0, 1.0))
    (0.0, 0.53)
    >>> axis_range((2.0, 2.0))
    (1.9, 2.1)
    """
    low, high = (min(max(end, -FARTHEST_END), FARTHEST_END) for end in ends)
    if scale == LOG:
        factor = max(min(high / low, sys.float_info.max) ** ROOM, 1.1)
        return max(low / factor, sys.float_info.min), min(high * factor, FARTHEST_END)
    room = ROOM * (high - low) or 0.05 * abs(high) or 0.5
    bottom, top = low - room, high + room
    if limits[0] is not None and low >= limits[0]:
        bottom = max(bottom, limits[0])
    if limits[1] is not None and high <= limits[1]:
        top = min(top, limits[1])
    if bottom == top:
        bottom, top = bottom - 0.5, top + 0.5
    return bottom, top


# The component.


def library() -> None:
    """Send the drawing library to the browser, once a page and before any board."""
    _mounted("rlwatch_board_library", _library())(key="board-library", height=1)


AT = "at"
"""Query parameter with the step that was clicked."""


def at_step(params: Mapping[str, str]) -> int | None:
    """Return the clicked step in ``params``, the query of the page's address, or None."""
    text = params.get(AT, "")
    return int(text) if text.lstrip("-").isdigit() else None


def show_by_address(board: Board) -> None:
    """Draw a board whose range and selected position are kept in the page's address."""
    params, key, asked_key = st.query_params, board.key, f"{board.key}-asked"
    board.at, board.asked = at_step(params), st.session_state.get(asked_key)

    def heed(asked: Mapping[str, Any]) -> None:
        if asked.get("kind") == "zoom":
            ends = asked.get("range")
            low, high = board.whole if ends is None else (board.place.step(float(end)) for end in ends)
            charts.write_window(params, low, max(high, low + 1), *board.whole)
            st.session_state[asked_key] = ends
        elif asked.get("kind") == "at" and asked.get("x") is not None:
            params[AT] = str(board.place.step(float(asked["x"])))
        elif asked.get("kind") == "at":
            params.pop(AT, None)

    show(board, key, heed)


def show(board: Board, key: str, on_ask: Callable[[Mapping[str, Any]], None] | None = None) -> None:
    """Draw a board; ``on_ask`` receives the request of a click or a drag before the page is redrawn."""

    def on_change() -> None:
        asked = getattr(st.session_state.get(key), "ask", None)
        if asked and on_ask is not None:
            on_ask(asked)

    _mounted("rlwatch_board", STUB)(key=key, data=board.data(), on_ask_change=on_change)


STUB = """export default function (component) {
  if (globalThis.rlwatchBoards) globalThis.rlwatchBoards.draw(component);
  else (globalThis.rlwatchWaiting ??= new Map()).set(component.parentElement, component);
  return () => globalThis.rlwatchBoards?.drop(component.parentElement);
}
"""


@cache
def _library() -> str:
    """Return a script that fetches the library once, and again if the connection fails."""
    address = json.dumps(module_address("board.js", base_path()))
    others = json.dumps([module_address(name, base_path()) for name in modules()])
    return f"""{page_script()}
for (const address of {others}) {{ // all at once, not one after the other as each names the next
  const link = document.createElement("link");
  link.rel = "modulepreload";
  link.href = location.origin + address;
  document.head.append(link);
}}
function load(tries) {{
  const again = tries ? `?again=${{tries}}` : "";
  import(location.origin + {address} + again).catch(() => setTimeout(load, 1000, tries + 1));
}}
load(0);
export default function () {{}}
"""


@cache
def _mounted(name: str, script: str) -> Callable[..., Any]:
    mounted: Callable[..., Any] = st.components.v2.component(name, js=script)
    return mounted


def lines_of(branches: Branches, ink: Ink, smooth: ThinnedCurve | None = None) -> list[ChartLine]:
    """Return the lines of a metric: the current branch, and the branches that a restart replaced, dimmed.

    ``ink``: colours. With a smoothed line in ``smooth``, the current branch is drawn pale below it.
    """
    raw = ChartLine(branches.current, ink.line, width=1.0 if smooth else 1.5, alpha=0.35 if smooth else 1.0)
    found = [] if smooth is None else [ChartLine(smooth, ink.line, "smoothed", width=1.8)]
    old = [ChartLine(curve, ink.quiet, "replaced", width=1.0, alpha=0.5, mute=True) for curve in branches.replaced]
    return [raw, *found, *old]
