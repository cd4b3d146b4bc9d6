"""Reading the rows other trackers are given: which entries are numbers, and which is the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlwatch.seam import Contained, by_a_signal

LARGEST = 2.0**53
"""Beyond it a float no longer tells one integer from the next."""
DEEPEST = 16
"""Levels of dicts inside a row that are read."""


def flatten(row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The entries of ``row``; those of a dict inside it are named ``outer.inner``, as wandb names them.

    A row may hold anything: an entry that raises when it is looked at, or that lies deeper than any name, is left out.

    >>> dict(flatten({"loss": 1.0, "reward": {"math": 0.5}}))
    {'loss': 1.0, 'reward.math': 0.5}
    """
    for name, value in row.items():
        with Contained(lambda _error: None):
            if not isinstance(value, Mapping):
                yield f"{prefix}{name}", value
            elif depth < DEEPEST:
                yield from list(flatten(value, f"{prefix}{name}.", depth + 1))


def scalars(row: Mapping[str, Any], *, null: float | None = None) -> dict[str, Any]:
    """The entries of ``row`` that are one number: floats, ints, numpy scalars, tensors of one element.

    Nothing waits for a device: a tensor stays one. Flags, text, lists, histograms, images and tables are left out.
    ``None`` reads as ``null``, and is left out if that is None.
    """
    named = ((name, null if value is None else readable(value)) for name, value in flatten(row))
    return {name: value for name, value in named if value is not None}


def readable(value: Any) -> Any:
    """:func:`number`; None also for what raises when it is looked at: a row may hold anything."""
    try:
        return number(value)
    except Exception as error:
        if by_a_signal(error):
            raise
        return None


def number(value: Any) -> Any:
    """``value`` if it is one number, else None."""
    if isinstance(value, bool | str | bytes):
        return None
    if isinstance(value, int | float):
        return value
    if hasattr(value, "detach"):
        return value if value.numel() == 1 else None
    if not hasattr(value, "__float__") or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        return None
    shape = getattr(value, "shape", ())
    if not shape:
        return value
    return value.reshape(()) if math.prod(shape) == 1 else None


def snapshot(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` as it is now: its tensors may be overwritten before they are recorded."""
    kept = {}
    for name, value in row.items():
        with Contained(lambda _error: None):
            kept[name] = value.detach().clone() if hasattr(value, "detach") else value
    return kept


def step_index(value: Any) -> int | None:
    """``value`` as a step: an integer >= 0, also as ``12.0``. None for anything else; a device is not asked.

    >>> step_index(12.0), step_index(0.5), step_index(-1), step_index(True)
    (12, None, None, None)
    """
    with Contained(lambda _error: None):
        if isinstance(value, bool) or hasattr(value, "detach") or not hasattr(value, "__float__"):
            return None
        read = float(value)
        return int(value) if 0 <= read < LARGEST and read == int(read) else None
    return None
