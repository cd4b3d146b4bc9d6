"""From what a log prints to numbers: only numbers become metrics, and nothing is rescaled."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from rlwatch.importers.bounds import LARGEST_STEP, shown
from rlwatch.importers.reading import Skips

STEP_FIELDS = (
    "step",
    "global_step",
    "train/global_step",
    "global_step/max_steps",
    "trainer/global_step",
    "training/global_step",
    "_step",
    "iteration",
)
"""Where a row may say its step, first match wins; ``"1/3820"`` is step 1."""
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[nN]a[nN]|[iI]nf(?:inity)?)"
_NUMBER = re.compile(NUMBER)
_CALL = re.compile(rf"[A-Za-z_][\w.]*\(\s*({NUMBER})\s*(?:,[^()]*)?\)")
_NULLS = frozenset({"null", "None"})


def number(text: str) -> float | None:
    """The number that ``text`` is, or None. Sees through ``np.float64(...)`` and ``tensor(..., device=...)``.

    >>> number("np.float64(-0.5)"), number("nan"), number("True")
    (-0.5, nan, None)
    """
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    call = _CALL.fullmatch(text)
    return float(call.group(1)) if call else None


def value_of(value: object) -> float | None:
    """A number for a JSON value, a string that is a number, or null; None for anything else.

    null means NaN: every trainer whose logs hold nulls (verl's orjson, TRL's all-NaN means) writes null for a value
    that it measured and that was not finite; what was not measured is absent.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, str):
        return math.nan if value in _NULLS else number(value)
    return None


def metrics_of(items: Mapping[str, object], skips: Skips, line: int) -> dict[str, float]:
    """The entries of ``items`` that are numbers; the others are counted in ``skips``."""
    metrics: dict[str, float] = {}
    for name, raw in items.items():
        value = value_of(raw)
        if value is None:
            skips.add(f"{shown(name)} is not a number", line)
        else:
            metrics[name] = value
    return metrics


def step_of(value: object) -> int:
    """The step that ``value`` says: an integer >= 0, also as ``12.0``, ``"12"`` or ``"12/500"``.

    Raises ``ValueError`` with what is wrong with it.
    """
    text = value.split("/", 1)[0] if isinstance(value, str) else value
    read = value_of(text) if text is not None else None
    if read is None or not math.isfinite(read) or read != int(read):
        raise ValueError(f"the step must be an integer, got {shown(value)}")
    if read < 0:
        raise ValueError(f"the step must be >= 0, got {shown(value)}")
    if read >= LARGEST_STEP:
        raise ValueError(f"the step must be below 2**53, got {shown(value)}")
    return int(read)
