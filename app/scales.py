"""Smoothing, scale and outliers of charts: the switches above them and their effect on values, on every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import streamlit as st

from . import smoothing
from .board import ASINH, LINEAR, LOG, axis_range, usual_range, wide
from .thinning import Floats

Ends = tuple[float, float]
Axis = tuple[Ends, int]
"""Range and scale of an axis."""


@dataclass(frozen=True, slots=True)
class Scales:
    """The user's choices.

    ``smooth``: one of :data:`smoothing.SMOOTHS`; ``log``: logarithmic axes; ``clip``: single outliers are cut.
    """

    smooth: str = smoothing.OFF
    log: bool = False
    clip: bool = True

    @classmethod
    def chosen(cls) -> Scales:
        """Read the choices from the switches, or from the address before they are drawn."""
        state = st.session_state
        return cls(state.get("smooth", smoothing.OFF), bool(state.get("log")), bool(state.get("clip", True)))

    @classmethod
    def of_address(cls, params: Mapping[str, str]) -> Scales:
        """Read the choices from the address, for switches drawn by the browser; invalid values become the default."""
        smooth = params.get("smooth", smoothing.OFF)
        known = smooth if smooth in smoothing.SMOOTHS else smoothing.OFF
        return cls(known, params.get("log") == "true", params.get("clip") != "false")

    def every_axis(
        self, lines: Sequence[Floats], limits: tuple[float | None, float | None] = (None, None)
    ) -> list[Axis]:
        """Return :meth:`axis` for each view: linear and logarithmic, each with outliers cut and not."""
        looks = [(log, clip) for log in (False, True) for clip in (True, False)]
        return [replace(self, log=log, clip=clip).axis(lines, limits) for log, clip in looks]

    @property
    def smooths(self) -> bool:
        """Return True if lines are smoothed."""
        return self.smooth != smoothing.OFF

    def axis(
        self,
        lines: Sequence[Floats],
        limits: tuple[float | None, float | None] = (None, None),
        areas: Sequence[Ends] = (),
    ) -> Axis:
        """Return range and scale of the axis for ``lines``, each of finite values (N,), and the ends of ``areas``.

        The scale is also logarithmic if a linear one would flatten nearly all values and no outlier is cut. A requested
        logarithmic scale is symmetric around zero if not all values are positive.
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
"""The default choices."""


def controls() -> None:
    """Draw the switches."""
    st.selectbox("Smooth", smoothing.SMOOTHS, key="smooth", bind="query-params", width=140)
    st.toggle("Log", key="log", bind="query-params", width="content")
    st.toggle("Clip outliers", value=True, key="clip", bind="query-params", width="content")
