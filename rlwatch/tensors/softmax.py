"""Log-probs and entropy of a softmax over a large vocabulary, in a workspace of fixed size.

Logits of 8 x 4096 tokens and 151,936 entries are 10 GB in bfloat16; their float32 copy would be 20 GB more. Here
rows and vocabulary are cut into tiles, and only one tile at a time is widened: the first pass finds the largest
logit of each row, the second sums exp(t) and t exp(t), where t is how far a logit lies below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.masked import widen

COLUMNS = 8192
"""Vocabulary entries of a tile."""
CPU_TILE, DEVICE_TILE = 2**17, 2**24
"""Elements of a tile: within a core's cache; large enough that launching kernels does not dominate."""
_ZERO = -1e4
"""exp of it is 0 in float32 and float64, and unlike -inf it stays 0 when multiplied by that."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """What n rows of logits sum up to: ``top`` (n,) the largest logit, ``log_total`` (n,) log sum exp(t), and
    ``entropy`` (n,) in nats.
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
    """Of ``rows`` (n, V) over ``temperature``; ``tile`` is the number of elements widened at a time.

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
