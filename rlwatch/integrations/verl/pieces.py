"""A step's tokens piece by piece: verl's whole batch as one padded tensor, and all that is computed of it, is large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from rlwatch.tensors.tokens import TokenBatch

CELLS = 2**19
"""Tokens of a piece, padding counted; a longer response is a piece of its own."""


def pieces(batch: TokenBatch, lengths: Sequence[int]) -> Iterator[TokenBatch]:
    """Rows of ``batch`` in order, each piece cut at the longest of its ``lengths``. Statistics merge exactly."""
    for rows, width in _spans(lengths):
        parts = {one.name: getattr(batch, one.name) for one in fields(batch)}
        cut: Any = {name: _cut(part, rows, width) for name, part in parts.items() if isinstance(part, Tensor)}
        yield replace(batch, **cut)


def _cut(part: Tensor, rows: slice, width: int) -> Tensor:
    return part[rows] if part.dim() == 1 else part[rows, :width]


def _spans(lengths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    first, width = 0, 0
    for row, length in enumerate(lengths):
        longest = max(width, length)
        if row > first and (row + 1 - first) * longest > CELLS:
            yield slice(first, row), width
            first, longest = row, length
        width = longest
    if first < len(lengths):
        yield slice(first, len(lengths)), width
