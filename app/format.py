"""Text of the pages: numbers, times and words from :mod:`rlwatch.wording`, evidence, and truncation."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from rlwatch.records import JSON, STALLED, Event
from rlwatch.wording import NOTHING, THIN, age, chance, duration, number, percent, plural, step, words

__all__ = [
    "NOTHING", "THIN", "age", "chance", "duration", "event_words", "evidence_line", "evidence_lines", "evidence_value",
    "names_step", "number", "percent", "plural", "shorten", "step", "words",
]  # fmt: skip

_TURNS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def shorten(text: str, limit: int) -> str:
    """Truncate text to ``limit`` characters, with an ellipsis.

    Line ends, control characters and marks that change the reading direction become spaces.

    >>> shorten("a very long name", 8)
    'a very …'
    """
    clean = "".join(" " if unicodedata.category(c) == "Cc" or c in _TURNS else c for c in text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def names_step(text: str, at: int) -> bool:
    r"""Return whether ``text`` names the step ``at``, not only a longer number that begins with its digits.

    >>> [names_step(text, 12) for text in ("at step 12: why", "at step 120", "at step 12\u202f480")]
    [True, False, False]
    """
    return re.search(rf"\bstep {step(at)}(?!{THIN}?\d)", text) is not None


# The numbers of a finding, an alert or an event, as text.


def evidence_lines(body: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Return the name and the formatted value of each entry of ``body``, the evidence of a finding or event."""
    return [(name.replace("_", " "), evidence_value(entry)) for name, entry in body.items()]


def evidence_line(body: Mapping[str, JSON], limit: int = 400) -> str:
    """Return ``body``, the evidence of a finding or event, on one line of at most ``limit`` characters, as ``optimizer
    clear · kl 0.310``.
    """
    return shorten(" · ".join(f"{name} {entry}" for name, entry in evidence_lines(body)), limit)


def event_words(event: Event) -> tuple[str, str]:
    """Return the name and description of an event: for a command its result, author and reason, else its entries."""
    report = event.body.get("report")
    if event.kind == STALLED:
        return words(event.kind), shorten(str(event.body.get("says", "")), 400)
    if event.kind != "command" or not isinstance(report, Mapping):
        return words(event.kind), evidence_line(event.body)
    summary = report.get("summary") or evidence_line(report)
    by, why = str(event.body.get("by") or ""), str(event.body.get("why") or "")
    parts = [str(summary), f"by {by}" if by else "", why]
    return words(str(event.body.get("command", "command"))), shorten(" · ".join(filter(None, parts)), 400)


def evidence_value(entry: JSON) -> str:
    """Return one evidence value as text: numbers in the usual format, text unchanged, lists and tables in words.

    >>> evidence_value({"layer": 3, "norms": [0.5, 0.25]})
    'layer 3, norms 0.5, 0.25'
    """
    if isinstance(entry, bool) or entry is None:
        return {True: "yes", False: "no", None: "none"}[entry]
    if isinstance(entry, int):
        return step(entry)
    if isinstance(entry, float):
        return number(entry)
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {evidence_value(value)}" for name, value in entry.items()) or "none"
    return ", ".join(map(evidence_value, entry)) or "none"
