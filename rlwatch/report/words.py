"""Numbers, steps and moments as a person reads them."""

from __future__ import annotations

import math
import time

from rlwatch.catalogue import entry
from rlwatch.records import JSON


def number(value: float | None) -> str:
    """Three significant digits; NaN and the infinities by name; a dash for what was not measured.

    >>> number(0.41364), number(-2.0e-5), number(float("nan")), number(None)
    ('0.414', '-2e-05', 'NaN', '-')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def step(value: int | None) -> str:
    r"""A step, exact.

    >>> step(12480)
    '12\u202f480'
    """
    return "-" if value is None else f"{value:,}".replace(",", "\u202f")


def moment(ts: float | None) -> str:
    """Date and time in UTC; a dash where it is not known."""
    if not ts or not math.isfinite(ts) or not 0 < ts < 2e11:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ts))


def words(kind: str) -> str:
    """A kind of finding, event or command as a person says it.

    >>> words("kl_drift"), words("reset-reference")
    ('drift from the reference', 'reset reference')
    """
    return entry(kind).label


def cell(value: JSON) -> str:
    """Any value of a row."""
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    return number(float(value)) if isinstance(value, float) else str(value)


def cut(text: str, longest: int) -> str:
    """``text``, with an ellipsis where it is longer than that."""
    return text if len(text) <= longest else text[: longest - 1] + "…"
