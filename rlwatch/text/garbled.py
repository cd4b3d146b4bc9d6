"""Characters no writer writes: of broken decoding, of a model that has lost its language."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

REPLACEMENT = "�"
"""What a decoder puts in place of bytes that are no UTF-8."""

_NEVER_WRITTEN = {"Cc", "Co", "Cn", "Cs"}  # control, private use, unassigned, surrogate
_LAYOUT = set("\t\n\r")
_ONE_SCRIPT = {"CJK": "EAST ASIAN", "HIRAGANA": "EAST ASIAN", "KATAKANA": "EAST ASIAN", "BOPOMOFO": "EAST ASIAN"}
_NO_SCRIPT = {
    "MATHEMATICAL",
    "FULLWIDTH",
    "HALFWIDTH",
    "DOUBLE-STRUCK",
    "SCRIPT",
    "MODIFIER",
    "FEMININE",
    "MASCULINE",
    "MICRO",
}
"""First words of names of letters that every script borrows."""


@dataclass(frozen=True, slots=True)
class Garbled:
    """Of one text: share of its characters that no writer writes; that are U+FFFD; script changes per 100."""

    garbled: float
    replacement: float
    script_switches: float

    @classmethod
    def of(cls, text: str) -> Garbled | None:
        """None for an empty text."""
        if not text:
            return None
        replaced = text.count(REPLACEMENT)
        broken = replaced + sum(map(_never_written, text))
        return cls(broken / len(text), replaced / len(text), 100 * switches(text) / len(text))


def switches(text: str) -> int:
    """How often a letter is of another writing system than the letter before it.

    Han, kana and bopomofo are one system; letters of mathematics and full-width forms are of none.

    >>> switches("the кот sat 猫 on")
    4
    """
    return sum(here != before for before, here in pairwise(_scripts(text)))


def _scripts(text: str) -> Iterator[str]:
    """The writing system of each letter."""
    for character in text:
        script = _script(character)
        if script is not None:
            yield script


@lru_cache(maxsize=16_384)
def _script(character: str) -> str | None:
    """The first word of a letter's Unicode name, which is its script; None if it is no letter, or any script's."""
    if unicodedata.category(character) not in {"Lu", "Ll", "Lt", "Lo"}:
        return None
    word = unicodedata.name(character, "").partition(" ")[0]
    return None if not word or word in _NO_SCRIPT else _ONE_SCRIPT.get(word, word)


def _never_written(character: str) -> bool:
    return character not in _LAYOUT and unicodedata.category(character) in _NEVER_WRITTEN
