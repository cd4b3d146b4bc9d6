"""Exact entropy and log-probs of the next-token distribution, in a workspace of fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlwatch.tensors.advantages import Sides
from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.spread import Quantile
from rlwatch.tensors.tokens import TokenBatch

COLUMNS = 8192
"""Vocabulary entries of a tile."""
CPU_TILE, DEVICE_TILE = 2**17, 2**24
"""Elements of a tile: within a core's cache; large enough that launching kernels does not dominate."""
_ZERO = -1e4
"""exp of it is 0 in float32 and float64, and unlike -inf it stays 0 when multiplied by that."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """Sums over the vocabulary of n rows of logits: ``top`` (n,) the largest logit, ``log_total`` (n,) log sum exp(t),
    and ``entropy`` (n,) in nats.
    """

    top: Tensor
    log_total: Tensor
    entropy: Tensor

    def logp(self, rows: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """Log-probs (n,) of the entries ``ids`` (n,) of ``rows`` (n, V); NaN where there is no such entry."""
        known = (ids >= 0) & (ids < rows.shape[-1])
        chosen = rows.gather(-1, ids.clamp(0, rows.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        return torch.where(known, (widen(chosen) - self.top) / temperature - self.log_total, torch.nan)


def softmax_of(rows: Tensor, *, temperature: float = 1.0, tile: int | None = None) -> Softmax:
    """Sum up ``rows`` (n, V) over ``temperature``; ``tile`` is the number of elements widened at a time.

    Raises ``ValueError`` for a temperature or a tile that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if tile is not None and tile < 1:
        raise ValueError(f"a tile must hold at least 1 element, got {tile}")
    size = tile or (CPU_TILE if rows.device.type == "cpu" else DEVICE_TILE)
    columns = min(COLUMNS, size, rows.shape[-1])
    parts = [_of_block(block, columns, temperature) for block in torch.split(rows.detach(), max(1, size // columns))]
    return Softmax(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _of_block(rows: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    # With t = (z - max z) / temperature and Z = sum exp(t): p = exp(t) / Z, so H = -sum p log p = log Z - sum t exp(t)
    # / Z. Two sums over the vocabulary, none of them of log p, and exp(t) <= 1 whatever the logits are.
    top = widen(rows.amax(-1, keepdim=True))
    total, moment = torch.zeros_like(top[:, 0]), torch.zeros_like(top[:, 0])
    for part in torch.split(rows, columns, -1):
        below = part - top
        if temperature != 1:
            below /= temperature
        below.clamp_(min=_ZERO)
        weight = below.exp()
        total += weight.sum(-1)
        moment += below.mul_(weight).sum(-1)
    log_total = total.log()
    return top[:, 0], log_total, log_total - moment / total


def blocks(logits: Tensor) -> Iterator[Tensor]:
    """The rows of ``logits`` (..., V) in order, as tensors (n, V) that share its memory."""
    try:
        yield logits.view(-1, logits.shape[-1])
    except RuntimeError:
        for part in logits.unbind(0):
            yield from blocks(part)


# Exact entropy of the next-token distribution.


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


def observe_entropy(batch: TokenBatch) -> Stats:
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


def observe_entropy_quantiles(batch: TokenBatch) -> Stats:
    """``policy/entropy_p10`` and ``policy/entropy_p90``, which need sorting."""
    if batch.entropy is None:
        return {}
    return {
        "policy/entropy_p10": Quantile.of(batch.entropy, batch.mask, 0.1),
        "policy/entropy_p90": Quantile.of(batch.entropy, batch.mask, 0.9),
    }
