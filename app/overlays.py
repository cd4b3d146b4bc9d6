"""Several lines in one chart, their colours and dashes; and the smoothing, scale and outliers that a user chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlwatch.metrics import metric_of

from . import smoothing
from .board import ASINH, LINEAR, LOG, BoardChart, ChartLine, axis_range, usual_range, wide
from .thinning import Floats, ThinnedCurve

# Smoothing, scale and outliers of charts: the choices of the switches above them, and their effect on values.

Ends = tuple[float, float]
Axis = tuple[Ends, int]
"""Range and scale of a chart's vertical axis."""


@dataclass(frozen=True, slots=True)
class Scales:
    """The user's choices for drawing lines.

    ``smooth``: one of :data:`smoothing.SMOOTHS`; ``log``: logarithmic axes; ``clip``: single outliers are cut.
    """

    smooth: str = smoothing.OFF
    log: bool = False
    clip: bool = True

    @classmethod
    def of_address(cls, params: Mapping[str, str]) -> Scales:
        """Read the choices from ``params``, the query of the page's address; invalid values become the default."""
        smooth = params.get("smooth", smoothing.OFF)
        known = smooth if smooth in smoothing.SMOOTHS else smoothing.OFF
        return cls(known, params.get("log") == "true", params.get("clip") != "false")

    def every_axis(
        self,
        lines: Sequence[Floats],
        limits: tuple[float | None, float | None] = (None, None),
        areas: Sequence[Ends] = (),
    ) -> list[Axis]:
        """Return range and scale of the axis for each view: linear and logarithmic, each with outliers cut and not.

        Arguments are those of :meth:`axis`.
        """
        looks = [(log, clip) for log in (False, True) for clip in (True, False)]
        return [replace(self, log=log, clip=clip).axis(lines, limits, areas) for log, clip in looks]

    @property
    def smooths(self) -> bool:
        """True if lines are smoothed."""
        return self.smooth != smoothing.OFF

    def axis(
        self,
        lines: Sequence[Floats],
        limits: tuple[float | None, float | None] = (None, None),
        areas: Sequence[Ends] = (),
    ) -> Axis:
        """Return range and scale of the axis for ``lines``, each of finite values (N,), and the ends of ``areas``.

        The scale is also logarithmic if a linear one would flatten nearly all values and no outlier is cut. A requested
        logarithmic scale is symmetric around zero if not all values are positive. ``limits``: lowest and highest
        possible value of the metric.
        """
        drawn = [line for line in lines if len(line)]
        whole = [(float(line.min()), float(line.max())) for line in drawn]
        cut = [usual_range(line) for line in drawn] if self.clip else whole
        positive = all(low > 0 for low, _ in (*whole, *areas))
        if self.log:
            scale = LOG if positive and drawn else ASINH
        else:
            flat = bool(drawn) and cut == whole and positive and wide(np.concatenate(drawn))
            scale = LOG if flat else LINEAR
        ends = [*(cut if scale == LINEAR else whole), *areas]
        low, high = min((end[0] for end in ends), default=0.0), max((end[1] for end in ends), default=1.0)
        return axis_range((low, high), scale, limits), scale


AS_USUAL = Scales()
"""The default choices for drawing lines."""


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A7A00", "#7A7A7A")
"""Okabe and Ito's colours for lines, without black and with a yellow that is legible on white."""
ON_DARK = ("#56B4E9", "#F0824A", "#1DBF91", "#E29AC4", "#F0BE4F", "#9CD2F4", "#C9B83A", "#A6A6A6")
"""Lighter colours of equal hues for dark pages; the two blues differ in lightness."""
DASHES: tuple[tuple[int, int] | None, ...] = (None, (6, 4), (2, 3))
STYLES = ("solid", "dashed", "dotted")
"""Names of the dashes in a style sheet."""


def line(
    name: str, place: int, curve: ThinnedCurve, area: Floats | None = None, *, dark: bool = False, **look: Any
) -> ChartLine:
    """Return one line of a chart that has several; ``place``, its number among them, sets colour and dashes, equally in
    every chart.

    ``area``: ends of a shaded area around it. ``dark``: for a dark background. ``look``: further fields of
    :class:`~app.board.ChartLine`.
    """
    return ChartLine(curve, _colour(place, dark=dark), name, dash=DASHES[_round(place)], area=area, place=place, **look)


def entry(name: str, place: int, note: str = "", *, dark: bool = False) -> dict[str, Any]:
    """Return the entry of a line in the legend, as values for JSON; its sign is hollow if an earlier line has an equal
    colour.

    ``place``: number of the line, which sets its colour. ``note``: text behind the name. ``dark``: for a dark
    background.
    """
    turn = _round(place)
    return {
        "name": name, "note": note, "colour": _colour(place, dark=dark), "style": STYLES[turn], "hollow": turn > 0,
    }  # fmt: skip


def _colour(place: int, *, dark: bool) -> str:
    return (ON_DARK if dark else COLOURS)[place % len(COLOURS)]


def _round(place: int) -> int:
    return place // len(COLOURS) % len(DASHES)


def overlay(
    name: str, lines: Sequence[ChartLine], title: str = "", sub: str = "", scales: Scales = AS_USUAL
) -> BoardChart:
    """Return a chart of several lines; a single outlier is marked at the edge instead of flattening the rest.

    ``sub``: subtitle. ``scales``: the user's choices for drawing lines.
    """
    areas = [line.area for line in lines if line.area is not None and line.area.size]
    metric = metric_of(name)
    limits = (None, None) if metric is None else (metric.low, metric.high)
    bottom, top = (-np.inf if limits[0] is None else limits[0]), (np.inf if limits[1] is None else limits[1])
    # The band of a standard deviation may exceed the metric's limits; the axis must not.
    ends = [(max(float(area[0].min()), bottom), min(float(area[1].max()), top)) for area in areas]
    every = scales.every_axis([line.curve.values for line in lines], limits, ends)
    held, scale = every[2 * scales.log + (not scales.clip)]
    return BoardChart(name, title or name, lines, held, sub, scale=scale, ends=[(*of, kind) for of, kind in every])
