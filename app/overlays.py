"""Several runs, or several quantiles, in one chart: colours and dashes of the lines, and their common range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlwatch.metrics import metric_of

from .board import BoardChart, ChartLine
from .scales import AS_USUAL, Scales
from .thinning import Floats, ThinnedCurve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A7A00", "#7A7A7A")
"""Okabe and Ito's colours, without black and with a yellow that is legible on white."""
ON_DARK = ("#56B4E9", "#F0824A", "#1DBF91", "#E29AC4", "#F0BE4F", "#9CD2F4", "#C9B83A", "#A6A6A6")
"""The same hues, lighter; the two blues differ in lightness."""
DASHES: tuple[tuple[int, int] | None, ...] = (None, (6, 4), (2, 3))
STYLES = ("solid", "dashed", "dotted")
"""Names of the dashes in a style sheet."""


def line(
    name: str, place: int, curve: ThinnedCurve, area: Floats | None = None, *, dark: bool = False, **look: Any
) -> ChartLine:
    """Return one of several lines. Its ``place`` sets colour and dashes, so that a run looks the same in every chart.

    ``look``: further fields of :class:`~app.board.ChartLine`.
    """
    return ChartLine(curve, _colour(place, dark=dark), name, dash=DASHES[_round(place)], area=area, **look)


def swatch(place: int, *, dark: bool = False) -> str:
    """Return the style of a line's sign in a legend: hollow if another line has the same colour."""
    colour = _colour(place, dark=dark)
    fill = "none" if _round(place) else colour
    return f"background:{fill};border:2px {STYLES[_round(place)]} {colour}"


def _colour(place: int, *, dark: bool) -> str:
    return (ON_DARK if dark else COLOURS)[place % len(COLOURS)]


def _round(place: int) -> int:
    return place // len(COLOURS) % len(DASHES)


def overlay(
    name: str, lines: Sequence[ChartLine], title: str = "", sub: str = "", scales: Scales = AS_USUAL
) -> BoardChart:
    """Return the chart of these lines; a single outlier is marked at the edge instead of flattening the others."""
    areas = [line.area for line in lines if line.area is not None and line.area.size]
    metric = metric_of(name)
    limits = (None, None) if metric is None else (metric.low, metric.high)
    bottom, top = (-np.inf if limits[0] is None else limits[0]), (np.inf if limits[1] is None else limits[1])
    # The band of a standard deviation may exceed the metric's limits; the axis must not.
    ends = [(max(float(area[0].min()), bottom), min(float(area[1].max()), top)) for area in areas]
    held, scale = scales.axis([line.curve.values for line in lines], limits, ends)
    return BoardChart(name, title or name, lines, held, sub, scale=scale)
