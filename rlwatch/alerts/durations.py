"""Durations as people type them."""

from __future__ import annotations

import re

from rlwatch.errors import ConfigError

UNITS = {"m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(min|m|h|d|w)\s*")


def seconds_of(text: str) -> float:
    """Seconds of ``90m``, ``2h``, ``1d12h``. Raises ``ConfigError`` for anything else.

    >>> seconds_of("1h30m"), seconds_of("2 d")
    (5400.0, 172800.0)
    """
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip():
        raise ConfigError(f"{text!r} is no duration; give numbers with m, h, d or w, as in 90m, 2h or 1d12h")
    return sum(float(number) * UNITS[unit] for number, unit in parts)
