"""Finding rows of one table in another, without comparing all with all: that would be B x N x T truths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ODD = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
"""Factors of 64 bits (those of xxHash, as signed integers)."""


def places_of(rows: Sequence[Tensor], known: Sequence[Tensor]) -> Tensor | None:
    """(B,) the first row of ``known`` that has the same ids; -1 where none has, None where the widths differ.

    Tables may come in parts (B, L) and (N, L), whole numbers of one device each. Rows are compared by a hash, and with
    the one row that has the same: nothing larger than B x N is made, and nobody waits for the device.

    >>> places_of([torch.tensor([[3, 4], [9, 9]])], [torch.tensor([[1, 2], [3, 4]])]).tolist()
    [1, -1]
    """
    if any(ours.dim() != 2 or ours.shape[1:] != theirs.shape[1:] for ours, theirs in zip(rows, known, strict=True)):
        return None
    count, many = rows[0].shape[0], known[0].shape[0]
    if not many:
        return torch.full((count,), -1, dtype=torch.int64, device=rows[0].device)
    same = _hash(rows)[:, None] == _hash(known)[None]
    at = same.to(torch.uint8).argmax(1)
    right = [(ours == theirs[at]).all(1) for ours, theirs in zip(rows, known, strict=True)]
    return torch.where(torch.stack(right).all(0), at, -1)


def _hash(parts: Sequence[Tensor]) -> Tensor:
    """(B,) of whole rows; sums wrap around."""
    total = torch.zeros(parts[0].shape[0], dtype=torch.int64, device=parts[0].device)
    for number, part in enumerate(parts):
        place = torch.arange(part.shape[1], dtype=torch.int64, device=part.device) + 1
        mixed = (part.to(torch.int64) + place * _ODD[0] + number) * _ODD[1]
        total += ((mixed ^ (mixed >> 29)) * _ODD[2]).sum(1)
    return total
