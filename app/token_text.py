"""Token text made inert: what cannot be seen is shown, what could move or join other text cannot.

A piece of a token is ``(text, mark)``; a mark stands for something that has no look of its own (``·`` for a space).
Whatever is returned is drawn as text nodes, or escaped.
"""

from __future__ import annotations

import unicodedata
from itertools import groupby

LIMIT = 40
"""Characters of one token that are shown."""

MOST_COMBINING = 3
"""Accents on one letter; more would climb over the lines above."""

Piece = tuple[str, bool]

_MARKS = {" ": "·", "\n": "↵", "\t": "⇥"}
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and symbols without ink."""
_UNSEEN = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})


def pieces(text: str, limit: int = LIMIT) -> list[Piece]:
    r"""``text`` as it may be shown, at most ``limit`` of its characters.

    >>> pieces(" the\n")
    [('·', True), ('the', False), ('↵', True)]
    >>> pieces("\u202e" + chr(0x301) + "a")
    [('‹U+202E›', True), ('◌́a', False)]
    """
    shown = [_shown(char) for char in _tamed(text[:limit])]
    if len(text) > limit:
        shown.append((f"… {len(text)} characters", True))
    return [("".join(part for part, _ in group), mark) for mark, group in groupby(shown, key=lambda piece: piece[1])]


def inert(text: str, limit: int = LIMIT) -> str:
    r"""The same in one string, for tables and sentences.

    >>> inert("\tfi")
    '⇥fi'
    """
    return "".join(part for part, _ in pieces(text, limit))


def _shown(char: str) -> Piece:
    if char in _MARKS:
        return _MARKS[char], True
    if char in _BLANK or unicodedata.category(char) in _UNSEEN:
        return f"‹U+{ord(char):04X}›", True
    return char, False


def _tamed(text: str) -> str:
    """Combining characters keep to this token: never first or after what is not drawn, and few on one letter."""
    kept: list[str] = []
    accents, base = 0, False
    for char in text:
        combining = unicodedata.category(char).startswith("M")
        accents = accents + 1 if combining else 0
        if combining and not base:
            kept.append("◌")
        if accents <= MOST_COMBINING:
            kept.append(char)
        base = combining or not _shown(char)[1]
    return "".join(kept)
