"""Degenerate text seen on token ids: no tokenizer, no waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.tokens import TokenBatch

_BASE = 2**21
"""Larger than any vocabulary; three digits of it fit an int64."""


def repetition(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """1 - distinct 3-grams / 3-grams per response: 0 is no repetition, near 1 a loop.

    ``ids`` (B, T) integers in [0, 2**21), ``mask`` (B, T). Returns the value (B,) and whether the response has a
    3-gram at all (B,); the value is NaN where it has none.

    >>> ids = torch.tensor([[1, 2, 3, 1, 2, 3, 4]])
    >>> round(repetition(ids, torch.ones_like(ids))[0].item(), 6)  # 4 distinct of 5
    0.2
    """
    ids, on = ids.detach().long(), mask.bool()
    grams = (ids[:, :-2] * _BASE + ids[:, 1:-1]) * _BASE + ids[:, 2:]
    whole = on[:, :-2] & on[:, 1:-1] & on[:, 2:]
    ordered = grams.masked_fill(~whole, -1).sort(-1).values
    fresh = torch.cat([ordered[:, :1] >= 0, (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)], -1)
    total = whole.sum(-1)
    return 1 - fresh.sum(-1) / total.float(), total > 0


def id0_share(ids: Tensor, mask: Tensor) -> Tensor:
    """Share of a response's tokens that are id 0, shape (B,); NaN for a response without tokens.

    A sampler fed NaN logits emits id 0 for ever: "!" in Qwen2's and Llama 3's vocabularies (verl #721, #751).
    """
    on = mask.bool()
    return ((ids == 0) & on).sum(-1) / on.sum(-1).float()


def text_stats(ids: Tensor, mask: Tensor) -> Stats:
    """``text/repetition`` and ``text/id0_frac`` (responses with at least 90 % id 0) of ``ids``, ``mask`` (B, T)."""
    value, measured = repetition(ids, mask)
    return {
        "text/repetition": Mean.of(value, measured),
        "text/id0_frac": Mean.of((id0_share(ids, mask) >= 0.9).float(), mask.bool().any(-1)),
    }


def full(batch: TokenBatch) -> Stats:
    """Repetition and id-0 runs, where the token ids are known."""
    return {} if batch.ids is None else text_stats(batch.ids, batch.mask)
