"""The numbers a finding, an alert or an event carries, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlwatch.records import JSON, Event

from . import format as fmt


def lines(body: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Name and value of each entry."""
    return [(name.replace("_", " "), value(entry)) for name, entry in body.items()]


def one_line(body: Mapping[str, JSON], limit: int = 400) -> str:
    """``optimizer clear · kl 0.310``, at most ``limit`` characters."""
    return fmt.shorten(" · ".join(f"{name} {entry}" for name, entry in lines(body)), limit)


def of_event(event: Event) -> tuple[str, str]:
    """What happened and the words to it: of a command what came of it, by whom and why; else the entries."""
    report = event.body.get("report")
    if event.kind != "command" or not isinstance(report, Mapping):
        return fmt.words(event.kind), one_line(event.body)
    summary = report.get("summary") or one_line(report)
    by, why = str(event.body.get("by") or ""), str(event.body.get("why") or "")
    parts = [str(summary), f"by {by}" if by else "", why]
    return fmt.words(str(event.body.get("command", "command"))), fmt.shorten(" · ".join(filter(None, parts)), 400)


def value(entry: JSON) -> str:
    """One entry: numbers as everywhere, text as it is, the rest as JSON."""
    if isinstance(entry, bool) or entry is None:
        return {True: "yes", False: "no", None: "none"}[entry]
    if isinstance(entry, int):
        return fmt.step(entry)
    if isinstance(entry, float):
        return fmt.number(entry)
    return entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)
