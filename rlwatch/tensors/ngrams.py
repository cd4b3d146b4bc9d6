"""n-grams of token ids: how many of them are distinct."""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 2**21
"""Larger than any vocabulary; three digits of it fit an int64."""


def windows(mask: Tensor, n: int) -> Tensor:
    """Whether ``n`` tokens in a row lie inside ``mask`` (B, T), by the first of them, (B, max(T - n + 1, 0)) bool."""
    if mask.shape[1] < n:
        return mask.new_zeros((mask.shape[0], 0), dtype=torch.bool)
    return mask.bool().unfold(1, n, 1).all(-1)


def distinct(ids: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """distinct-n: different n-grams over n-grams of a response; 1 without repetition, near 0 in a loop.

    ``ids`` (B, T) integers in [0, 2**21), ``mask`` (B, T), ``n`` 1 to 3. No n-gram reaches over a hole in the mask.
    Returns the value (B,) and whether the response has an n-gram at all (B,); the value is NaN where it has none.
    Li et al., arXiv 1510.03055.

    >>> ids = torch.tensor([[1, 2, 3, 1, 2, 3, 4]])
    >>> [round(distinct(ids, torch.ones_like(ids), n)[0].item(), 7) for n in (1, 2, 3)]
    [0.5714286, 0.6666667, 0.8]
    """
    whole, ids = windows(mask, n), ids.detach().long()
    width = whole.shape[1]
    grams = torch.zeros_like(ids[:, :width])
    for i in range(n):
        grams = grams * _BASE + ids[:, i : i + width]
    ordered = grams.masked_fill(~whole, -1).sort(-1).values
    fresh = ordered >= 0
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    total = whole.sum(-1)
    return fresh.sum(-1) / total.float(), total > 0
