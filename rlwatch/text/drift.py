"""Ids that do not survive decoding: what is trained on is then not what was sampled.

Text is ambiguous: ``<``, ``think``, ``>`` may be sampled and ``<th``, ``ink``, ``>`` encoded. A trainer that
re-encodes text computes log-probs of tokens nobody sampled, which looks like a huge mismatch of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from rlwatch.text.edits import first_difference, levenshtein

LONGEST = 8192
"""Ids of a response that are compared: the time to do it grows with their square."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer: the two methods, as Hugging Face tokenizers have them."""

    def decode(self, token_ids: Sequence[int], **kwargs: bool) -> str:
        """Text of ids."""
        ...

    def encode(self, text: str, **kwargs: bool) -> Sequence[int]:
        """Ids of text."""
        ...


def encode_again(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """encode(decode(``ids``)), with special tokens kept and none added, and nothing tidied up.

    Give it a tokenizer of its own (``copy.deepcopy``): those of Hugging Face refuse work while another thread uses
    them, which may be the one that trains.
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Drift:
    """Sampled ids against those of the same text encoded again.

    Parameters
    ----------
    exact
        Whether they are equal.
    naive
        Fraction of positions that differ, of those of the longer: one early shift makes all later ones differ.
    edits
        Levenshtein distance over the number of sampled ids, which a shift counts once.
    first
        Position of the first difference; None if there is none.
    growth
        Ids that encoding again added; negative if it needs fewer.
    """

    exact: bool
    naive: float
    edits: float
    first: int | None
    growth: int

    @classmethod
    def of(cls, sampled: Sequence[int], again: Sequence[int]) -> Drift | None:
        """None where nothing was sampled. Beyond :data:`LONGEST` ids only the first so many are compared.

        >>> Drift.of([1, 2, 3, 4], [1, 9, 4])
        Drift(exact=False, naive=0.75, edits=0.5, first=1, growth=-1)
        """
        if not sampled:
            return None
        first, growth = first_difference(sampled, again), len(again) - len(sampled)
        if first is None:
            return cls(True, 0.0, 0.0, None, growth)
        sampled, again = sampled[:LONGEST], again[:LONGEST]
        longer = max(len(sampled), len(again))
        equal = sum(one == other for one, other in zip(sampled, again, strict=False))
        return cls(False, 1 - equal / longer, levenshtein(sampled, again) / len(sampled), first, growth)


def prefix_kept(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, int]:
    """Of turns (prompt ids, response ids) of one conversation: how many prompts begin with all of the turn before.

    Also how many there are that could. A chat template that renders the history anew may not keep it.
    """
    kept = 0
    for (prompt, response), (following, _) in pairwise(turns):
        before = [*prompt, *response]
        kept += list(following[: len(before)]) == before
    return kept, max(0, len(turns) - 1)
