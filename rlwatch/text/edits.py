"""Levenshtein distance of two sequences of ids."""

from __future__ import annotations

from collections.abc import Sequence


def levenshtein(first: Sequence[int], second: Sequence[int]) -> int:
    """Fewest insertions, deletions and substitutions that make ``second`` of ``first``.

    Hyyrö's bit-parallel form (2001) of Myers' algorithm (1999), a whole column of the table in the bits of one
    integer: about 0.1 s for two sequences of 8,000 that have nothing in common, nothing for equal ends.

    >>> levenshtein([1, 2, 3, 4], [1, 9, 4])
    2
    """
    first, second = _without_equal_ends(first, second)
    if not first:
        return len(second)
    column = (1 << len(first)) - 1
    top = 1 << (len(first) - 1)
    equal: dict[int, int] = {}
    for place, token in enumerate(first):
        equal[token] = equal.get(token, 0) | 1 << place
    up, down, distance = column, 0, len(first)  # where the column rises and falls by one
    for token in second:
        match = equal.get(token, 0)
        diagonal = ((((match & up) + up) ^ up) | match | down) & column
        right_up, right_down = down | (~(diagonal | up) & column), diagonal & up
        distance += bool(right_up & top) - bool(right_down & top)
        right_up, right_down = (right_up << 1 | 1) & column, right_down << 1 & column
        up, down = right_down | (~(diagonal | right_up) & column), right_up & diagonal
    return distance


def _without_equal_ends(first: Sequence[int], second: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    start = first_difference(first, second)
    if start is None:
        return (), ()
    first, second = first[start:], second[start:]
    same = 0
    while same < min(len(first), len(second)) and first[-1 - same] == second[-1 - same]:
        same += 1
    return first[: len(first) - same], second[: len(second) - same]


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first position at which the two differ or one has ended; None if they are equal."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return None if len(first) == len(second) else min(len(first), len(second))
