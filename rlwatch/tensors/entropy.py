"""Exact entropy of the next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.spread import Quantile
from rlwatch.tensors.tokens import TokenBatch


def token_entropy(logits: Tensor, *, chunk: int = 2048) -> Tensor:
    """H = -sum p log p of softmax(``logits``), in nats, within [0, ln V].

    ``logits`` (..., V) at the sampling temperature, of any floating dtype; the result has shape (...).
    Rows are taken ``chunk`` at a time, so no float32 copy of all logits ever exists. A logit of -inf
    (a token that cannot be sampled) contributes nothing; a NaN in a row makes that row NaN.

    >>> round(token_entropy(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)).item(), 12)
    0.83239558184
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 row, got {chunk}")
    rows = logits.detach().reshape(-1, logits.shape[-1])
    parts = [torch.special.entr(widen(part).softmax(-1)).sum(-1) for part in torch.split(rows, chunk)]
    return torch.cat(parts).reshape(logits.shape[:-1])


def entropy_stats(entropy: Tensor, mask: Tensor) -> Stats:
    """Token mean and 10th and 90th percentile of ``entropy`` (B, T), nats, over ``mask`` (B, T)."""
    return {
        "policy/entropy": Mean.of(entropy, mask),
        "policy/entropy_p10": Quantile.of(entropy, mask, 0.1),
        "policy/entropy_p90": Quantile.of(entropy, mask, 0.9),
    }


def core(batch: TokenBatch) -> Stats:
    """Entropy of the sampled tokens, where it was computed."""
    return {} if batch.entropy is None else entropy_stats(batch.entropy, batch.mask)
