"""Records as JSON that every parser accepts.

JSON has no NaN and no infinities: they are written as the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``. What was not measured is absent, or ``null`` where a field must exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

from rlwatch.records import JSON


def plain(value: object) -> JSON:
    """``value`` built of dict, list, str, int, finite float, bool and None only.

    >>> plain({"kl": float("inf"), "steps": (1, 2)})
    {'kl': 'Infinity', 'steps': [1, 2]}
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return _from_elsewhere(value)


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)


def _from_elsewhere(value: object) -> JSON:
    """Numpy arrays and scalars through ``tolist``, other collections as lists, the rest as its ``str``."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return plain(tolist())
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def dumps(value: object) -> str:
    """Strict JSON, indented, in ASCII (so that no terminal's encoding can break it)."""
    return json.dumps(plain(value), allow_nan=False, indent=2)
