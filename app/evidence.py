"""The numbers a finding, an alert or an event carries, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlwatch.records import JSON

from . import format as fmt


def lines(body: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Name and value of each entry."""
    return [(name.replace("_", " "), value(entry)) for name, entry in body.items()]


def one_line(body: Mapping[str, JSON], limit: int = 400) -> str:
    """``optimizer clear · kl 0.310``, at most ``limit`` characters."""
    return fmt.shorten(" · ".join(f"{name} {entry}" for name, entry in lines(body)), limit)


def value(entry: JSON) -> str:
    """One entry: numbers as everywhere, text as it is, the rest as JSON."""
    if isinstance(entry, bool) or entry is None:
        return {True: "yes", False: "no", None: "none"}[entry]
    if isinstance(entry, int):
        return fmt.step(entry)
    if isinstance(entry, float):
        return fmt.number(entry)
    return entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)
