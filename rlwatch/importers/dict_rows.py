"""Finding printed Python dicts of metrics in text: ``{'loss': 0.01, 'kl': nan, 'epoch': 0.1}``.

Read piece by piece rather than by ``ast.literal_eval``: a log holds ``nan`` (not a literal), dicts that lost their
leading brace when copied, and dicts cut off in the middle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_START = re.compile(r"""\{\s*(?=['"][^'"{}]+['"]\s*:)""")
_LOST_BRACE = re.compile(r"""\s*(?=['"][^'"{}]+['"]\s*:)""")
_PAIR = re.compile(
    r"""\s*(['"])(?P<key>[^'"{}]+)\1\s*:\s*(?P<value>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"
    |[A-Za-z_][\w.]*\([^()]*\)|\[[^\]]*\]|\([^)]*\)|\{[^{}]*\}|[^,{}\[\]()'"\s]+)\s*(?P<end>,|\}|$)""",
    re.VERBOSE,
)


MOST_BROKEN = 50
"""Dicts without an end in one line, each of which may be looked through to the end of the line."""


@dataclass(frozen=True, slots=True)
class DictRow:
    """A printed dict: its items as text (strings without quotes), its place, and whether it was cut off."""

    items: dict[str, str]
    start: int
    end: int
    cut: bool


def dict_rows(text: str) -> list[DictRow]:
    """The dicts printed in ``text``, left to right, also a first one without its leading brace."""
    rows: list[DictRow] = []
    lost = _LOST_BRACE.match(text)
    at = lost.end() if lost else _next_start(text, 0)
    broken = 0
    while at is not None and broken < MOST_BROKEN:
        row = _read(text, at)
        if row.items:
            rows.append(row)
        broken += row.cut
        at = _next_start(text, max(row.end, at))
    return rows


def _next_start(text: str, at: int) -> int | None:
    match = _START.search(text, at)
    return match.end() if match else None


def _read(text: str, start: int) -> DictRow:
    """The dict whose first key is at ``start``. A value at the very end of the text may be cut, so it is left out."""
    items: dict[str, str] = {}
    at = start
    while match := _PAIR.match(text, at):
        if not match["end"]:
            break
        at = match.end()
        items[match["key"]] = match["value"].strip("'\"")
        if match["end"] == "}":
            return DictRow(items, start, at, cut=False)
    return DictRow(items, start, at, cut=True)
