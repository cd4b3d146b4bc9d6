"""Recorded tokens, read from the columns of spike batches, with their text made safe to display."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from rlwatch.records import CULPRITS, RESPONSES, SpikeBatch

LIMIT = 40
"""Most characters shown of one token."""

MOST_COMBINING = 3
"""Most combining characters on one letter; more would overlap the lines above."""

Piece = tuple[str, bool]

_MARKS = {" ": "·", "\n": "↵", "\t": "⇥"}
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and symbols without ink."""
_UNSEEN = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})


def pieces(text: str, limit: int = LIMIT) -> list[Piece]:
    r"""Split ``text`` for display, at most ``limit`` characters of it, into (piece, True if it is a symbol).

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
    r"""Return ``text`` made safe to display as one string, with symbols for control characters, at most ``limit``
    characters.

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
    """Limit combining characters: none at the start or after an invisible character, and few on one letter."""
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


NUMBERS = (
    "share", "contribution", "own_norm", "screen", "coefficient", "ratio", "advantage", "reward", "entropy",
    "logp", "old_logp", "rollout_logp", "ref_logp",
)  # fmt: skip
"""Columns of floats, in display order."""

LABELS = {
    "share": "share of norm",
    "own_norm": "own norm",
    "coefficient": "dL/dlogp",
    "logp": "logp now",
    "old_logp": "logp old",
    "rollout_logp": "logp rollout",
    "ref_logp": "logp reference",
}
"""Labels of columns whose names are not self-explanatory."""

_WORDS = ("cause", "why", "before", "after")


@dataclass(frozen=True, slots=True)
class Token:
    """One token of one step. Numbers that were not measured are absent; NaN is a measured value.

    ``text`` is None if it was not recorded. ``layers``: share of each layer in the token's own squared gradient norm.
    """

    rank: int
    microbatch: int
    sequence: int
    position: int
    token_id: int | None = None
    text: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Key of the token in an address: ``rank.microbatch.sequence.position``."""
        return f"{self.rank}.{self.microbatch}.{self.sequence}.{self.position}"

    @property
    def label(self) -> str:
        """Text of the token, made safe to display, or its id if there is no text."""
        if self.text or self.token_id is None:
            return inert(self.text or "") or "(no text)"
        return f"id {self.token_id}"


def tokens(batch: SpikeBatch, rows: Iterable[int] | None = None) -> list[Token]:
    """Return the tokens of ``batch`` in ``rows`` (None: all), in order."""
    return [_token(batch, row) for row in (range(len(batch)) if rows is None else rows)]


def _token(batch: SpikeBatch, row: int) -> Token:
    columns = batch.columns
    whole = {name: int(columns[name][row]) for name in ("microbatch", "sequence", "position") if name in columns}
    verified = "verified" not in columns or bool(columns["verified"][row])
    names = [name for name in NUMBERS if name in columns and (verified or name != "own_norm")]
    return Token(
        batch.rank,
        whole.get("microbatch", 0),
        whole.get("sequence", 0),
        whole.get("position", 0),
        int(columns["token_id"][row]) if "token_id" in columns else None,
        str(columns["text"][row]) if "text" in columns else None,
        {name: float(columns[name][row]) for name in names},
        {name: str(columns[name][row]) for name in _WORDS if name in columns},
        _layers(columns, row),
    )


def _layers(columns: Mapping[str, np.ndarray | Sequence[str]], row: int) -> dict[str, float]:
    """Parse the JSON of the column ``layers``; empty if it is absent or invalid."""
    try:
        found = json.loads(str(columns["layers"][row])) if "layers" in columns else {}
        return {str(name): float(share) for name, share in found.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def culprits_of(batches: Sequence[SpikeBatch]) -> list[Token]:
    """Return the culprit tokens (those that dominate a gradient spike) in ``batches``, of all ranks, the largest
    contribution first.

    Tokens that push against the gradient come last, because they cancel a part of it.
    """
    culprit_batches = [batch for batch in batches if batch.reason == CULPRITS]
    found = [token for batch in culprit_batches for token in tokens(batch)]
    worst = found if len(culprit_batches) < 2 else sorted(found, key=_badness, reverse=True)
    return sorted(worst, key=lambda token: token.numbers.get("share", 0.0) < 0)


def _badness(token: Token) -> float:
    """Return the larger of contribution and own norm; NaN counts as the worst."""
    sizes = [abs(token.numbers[name]) for name in ("contribution", "own_norm") if name in token.numbers]
    return math.inf if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


@dataclass(frozen=True, slots=True)
class Response:
    """The recorded tokens of one response: ``rows`` (N,) of ``batch``, by ``positions`` (N,), each once."""

    batch: SpikeBatch
    rows: np.ndarray
    positions: np.ndarray

    def column(self, name: str) -> np.ndarray | None:
        """Return the numbers of the column ``name`` for the response's tokens, (N,) float64, or None if it was not
        measured.
        """
        column = self.batch.columns.get(name)
        return None if column is None else np.asarray(column, dtype=np.float64)[self.rows]


def response_of(batches: Sequence[SpikeBatch], token: Token) -> Response | None:
    """Return the recorded response in ``batches`` that contains ``token``; None if it was not recorded."""
    for batch in batches:
        if batch.reason != RESPONSES or batch.rank != token.rank or not len(batch):
            continue
        same = np.ones(len(batch), dtype=bool)
        for name, value in (("microbatch", token.microbatch), ("sequence", token.sequence)):
            same &= np.asarray(batch.columns.get(name, np.full(len(batch), value))) == value
        rows = np.flatnonzero(same)
        if len(rows):
            found, first = np.unique(np.asarray(batch.columns["position"])[rows], return_index=True)
            return Response(batch, rows[first], found)
    return None
