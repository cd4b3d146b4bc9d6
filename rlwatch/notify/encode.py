"""Payloads as JSON any receiver can parse: NaN and the infinities become strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlwatch.records import JSON


def json_safe(value: Any) -> JSON:
    """``value`` with only what strict JSON knows.

    ``nan``, ``inf``, ``-inf`` become ``"NaN"``, ``"Infinity"``, ``"-Infinity"``; numpy scalars and arrays
    become numbers and lists; what JSON has no word for becomes its text.

    >>> json_safe({"kl": float("nan"), "range": (0, float("-inf"))})
    {'kl': 'NaN', 'range': [0, '-Infinity']}
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _words(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item) for item in value]
    tolist = getattr(value, "tolist", None)
    return json_safe(tolist()) if callable(tolist) else str(value)


def encode(payload: Mapping[str, JSON]) -> bytes:
    """The payload as UTF-8 JSON; equal payloads give equal bytes, so that signatures can be compared."""
    text = json.dumps(json_safe(payload), allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


def _words(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def one_line(text: str) -> str:
    """``text`` without line breaks and control characters: nobody writes a log line of their own through it."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
