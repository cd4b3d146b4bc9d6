"""How the values of a chart become heights.

ECharts writes the labels of an axis itself, 0.0000001 in full, and takes no function of ours: tiny values are drawn as
multiples of a power of ten, and on a logarithmic axis as exponents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .buckets import Curve, Floats

LOG_SPREAD = 200.0
"""A positive metric whose largest value is this many times its median is drawn on a logarithmic axis."""
TINY, HUGE = 1e-4, 1e6
"""Numbers below and from here on are written with an exponent everywhere in the app."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``power``: heights are multiples of 10**power; ``exponents``: they are decimal logarithms."""

    logarithmic: bool = False
    exponents: bool = False
    power: int = 0

    @property
    def plain(self) -> bool:
        """Whether a value is its own height."""
        return not self.exponents and not self.power

    @property
    def note(self) -> str:
        """What a reader must know of it; empty for most."""
        if self.logarithmic:
            return "log scale"
        return f"× 1e{self.power}".replace("-", "−") if self.power else ""

    def height(self, value: float) -> float | None:
        """Where ``value`` is drawn, six significant digits; None where it has no place (no logarithm)."""
        if self.exponents:
            return round(math.log10(value), 6) if value > 0 else None
        return float(f"{value / 10.0**self.power:.6g}")

    def axis(self) -> Mapping[str, Any]:
        """The type of the axis and how its labels read."""
        if self.exponents:
            return {"type": "value", "minInterval": 1, "axisLabel": {"fontSize": 11, "formatter": "1e{value}"}}
        return {"type": "log" if self.logarithmic else "value", "axisLabel": {"fontSize": 11}}


PLAIN = Scale()


def scale_of(curve: Curve) -> Scale:
    """The scale on which all of ``curve`` is to be seen and its axis is readable."""
    values = curve.values
    if _spread(values):
        return Scale(logarithmic=True, exponents=bool(values.min() < TINY or values.max() >= HUGE))
    largest = float(np.abs(values).max()) if len(values) else 0.0
    return Scale(power=math.floor(math.log10(largest)) if 0 < largest < TINY else 0)


def _spread(values: Floats) -> bool:
    """Whether a linear axis would flatten everything but a few points."""
    if len(values) < 8 or values.min() <= 0:
        return False
    return bool(values.max() > LOG_SPREAD * np.median(values))
