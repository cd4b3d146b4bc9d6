"""Several runs in one panel: ECharts options on the frame of :mod:`charts`, with a line each, or a mean and a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlwatch.compare import Axis

from .charts import Ink, Option, Plot, Scale, family_option, points
from .thinning import Branches, Curve, Floats

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A7A00", "#7A7A7A")
"""Okabe and Ito's, without black and with a yellow that reads on white."""
DASHES = ("solid", "dashed", "dotted")
UNITS = {Axis.STEP: 1.0, Axis.TOKENS: 1e6, Axis.TIME: 3600.0, Axis.CRASH: 1.0}
LABELS = {
    Axis.STEP: "step {value}",
    Axis.TOKENS: "{value} M tokens",
    Axis.TIME: "{value} h",
    Axis.CRASH: "{value} from the crash",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One run, or the mean of a group with its standard deviation: ``band`` (2, N) low and high at each of its places.

    ``place`` decides colour and dashes: the same run looks the same in every panel.
    """

    name: str
    place: int
    curve: Curve
    band: Floats | None = None

    @property
    def colour(self) -> str:
        """Colour of the run."""
        return COLOURS[self.place % len(COLOURS)]

    @property
    def fill(self) -> str:
        """Colour inside of its swatch: none where the dashes tell it from another of its colour."""
        return self.colour if self.dash == "solid" else "none"

    @property
    def dash(self) -> str:
        """Dashes of the run: solid until the colours are used up."""
        return DASHES[self.place // len(COLOURS) % len(DASHES)]


@dataclass(frozen=True, slots=True)
class Overlay:
    """One metric of several runs."""

    title: str
    subtitle: str
    lines: Sequence[Line]

    @property
    def plot(self) -> Plot:
        """The panel's frame: its scale is one on which all lines can be seen."""
        curves = [line.curve for line in self.lines]
        steps, values, breaks = (
            np.concatenate([getattr(curve, name) for curve in curves]) for name in ("steps", "values", "breaks")
        )
        return Plot(self.title, self.subtitle, Branches(Curve(steps, values, breaks)))


def overlay_option(overlays: Sequence[Overlay], axis: Axis, ink: Ink, columns: int) -> Option:
    """The option of all panels, on one range of places."""
    unit = UNITS[axis]
    plots = [overlay.plot for overlay in overlays]
    places = [place for plot in plots for place in plot.lines.current.steps.tolist()]
    places += [at for overlay in overlays for line in overlay.lines for at, _ in line.curve.bad]
    low, high = min(places, default=0) / unit, max(places, default=1) / unit
    option = family_option(plots, [], (0, 1), ink, columns)
    for x in option["xAxis"]:
        x |= {"min": low, "max": high if high > low else low + 1, "minInterval": 0 if unit > 1 else 1}
        x["axisPointer"] = {"label": {"formatter": LABELS[axis], "precision": 2 if unit > 1 else 0}}
    option["series"] = [
        series
        for place, (overlay, plot) in enumerate(zip(overlays, plots, strict=True))
        for line in overlay.lines
        for series in _drawn(place, line, plot.scale, unit)
    ]
    return option


def _drawn(place: int, line: Line, scale: Scale, unit: float) -> list[Option]:
    common: dict[str, Any] = {"xAxisIndex": place, "yAxisIndex": 2 * place, "itemStyle": {"color": line.colour}}
    data = [[pair[0] / unit, *pair[1:]] for pair in points(line.curve, scale) if pair[0] is not None]
    drawn: Option = {
        **common,
        "type": "line",
        "name": line.name,
        "data": data,
        "showSymbol": len(line.curve) <= 2,
        "lineStyle": {"width": 1.5, "color": line.colour, "type": line.dash},
    }
    if not scale.plain:
        drawn |= {"dimensions": ["place", "height", "value"], "encode": {"x": 0, "y": 1, "tooltip": [2]}}
    found = [drawn, *(_band(line, scale, unit, common) if line.band is not None and not scale.logarithmic else [])]
    if line.curve.bad:
        found.append(
            {
                **common,
                "yAxisIndex": 2 * place + 1,
                "type": "scatter",
                "name": line.name,
                "symbol": "rect",
                "symbolSize": [2, 12],
                "symbolOffset": [0, -5],
                "dimensions": ["place", "height", {"name": "value", "type": "ordinal"}],
                "encode": {"x": 0, "y": 1, "tooltip": [2]},
                "data": [[at / unit, 0, word] for at, word in line.curve.bad],
            }
        )
    return found


def _band(line: Line, scale: Scale, unit: float, common: dict[str, Any]) -> list[Option]:
    """The area between low and high: an unseen line, and the height above it stacked on that."""
    if line.band is None:
        return []
    low, high = (np.array([scale.height(float(value)) for value in side], dtype=np.float64) for side in line.band)
    stack = {
        **common,
        "type": "line",
        "stack": f"{common['xAxisIndex']}-{line.place}",
        "stackStrategy": "all",
        "showSymbol": False,
        "silent": True,
        "tooltip": {"show": False},
        "lineStyle": {"opacity": 0},
    }
    x = (line.curve.steps / unit).tolist()
    return [
        {**stack, "name": f"{line.name} (low)", "data": [list(pair) for pair in zip(x, low.tolist(), strict=True)]},
        {
            **stack,
            "name": f"{line.name} (high)",
            "areaStyle": {"color": line.colour, "opacity": 0.15},
            "data": [list(pair) for pair in zip(x, (high - low).tolist(), strict=True)],
        },
    ]
