"""Exact entropy of the next-token distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.sides import Sides
from rlwatch.tensors.softmax import blocks, softmax_of
from rlwatch.tensors.spread import Quantile
from rlwatch.tensors.tokens import TokenBatch


def token_entropy(logits: Tensor, *, temperature: float = 1.0, tile: int | None = None) -> Tensor:
    """H = -sum p log p of softmax(``logits`` / ``temperature``), in nats, within [0, ln V].

    ``logits`` (..., V) of any floating dtype, padded or jagged; the result has shape (...), float32 or float64.
    Only ``tile`` elements are widened at a time. A logit of -inf (a token that cannot be sampled) contributes
    nothing; a row with NaN, +inf or nothing but -inf is NaN. Keeps no graph. Raises ``ValueError`` for a
    temperature or a tile that is not positive.

    >>> round(token_entropy(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)).item(), 12)
    0.83239558184
    """
    if logits.is_nested:
        return _jagged(token_entropy(logits.values(), temperature=temperature, tile=tile), logits)
    with torch.no_grad():
        parts = [softmax_of(rows, temperature=temperature, tile=tile).entropy for rows in blocks(logits)]
        return torch.cat(parts).view(logits.shape[:-1])


def token_logp_entropy(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens ``ids`` (...) under softmax(``logits`` / ``temperature``), and its entropy, both (...).

    The log-probs are those of ``log_softmax`` and ``gather``, in nats, <= 0; NaN for an id outside [0, V), such as
    the -100 that marks padding. Otherwise as :func:`token_entropy`.
    """
    if logits.is_nested:
        flat_ids = ids.values() if ids.is_nested else ids.flatten()
        logp, entropy = token_logp_entropy(logits.values(), flat_ids, temperature=temperature, tile=tile)
        return _jagged(logp, logits), _jagged(entropy, logits)
    with torch.no_grad():
        rows = list(blocks(logits))
        parts = [softmax_of(block, temperature=temperature, tile=tile) for block in rows]
        pieces = torch.split(ids.flatten(), [block.shape[0] for block in rows])
        each = zip(parts, rows, pieces, strict=True)
        chosen = [part.logp(block, piece, temperature) for part, block, piece in each]
        return torch.cat(chosen).view(ids.shape), torch.cat([part.entropy for part in parts]).view(ids.shape)


def _jagged(values: Tensor, like: Any) -> Tensor:
    """``values`` (n,) as the jagged tensor with the rows of ``like``."""
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def core(batch: TokenBatch) -> Stats:
    """``policy/entropy``, and apart for tokens of positive and of negative advantage.

    Exploding entropy grows almost wholly from tokens of negative advantage.
    """
    if batch.entropy is None:
        return {}
    stats: Stats = {"policy/entropy": Mean.of(batch.entropy, batch.mask)}
    if batch.token_advantages is not None:
        sides = Sides.of(batch.token_advantages, batch.mask)
        stats["policy/entropy_pos"] = Mean.of(sides.known(batch.entropy), sides.positive)
        stats["policy/entropy_neg"] = Mean.of(sides.known(batch.entropy), sides.negative)
    return stats


def full(batch: TokenBatch) -> Stats:
    """``policy/entropy_p10`` and ``policy/entropy_p90``, which need sorting."""
    if batch.entropy is None:
        return {}
    return {
        "policy/entropy_p10": Quantile.of(batch.entropy, batch.mask, 0.1),
        "policy/entropy_p90": Quantile.of(batch.entropy, batch.mask, 0.9),
    }
