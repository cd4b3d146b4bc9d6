"""Lengths of responses."""

from __future__ import annotations

import torch

from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.tokens import TokenBatch


def core(batch: TokenBatch) -> Stats:
    """``len/mean``, ``max``, ``min``, ``clipped``, only where it is known which responses were cut.

    A mask alone may hide whole responses.
    """
    if batch.cut is None:
        return {}
    length, every = batch.mask.bool().sum(-1).float(), torch.ones_like(batch.cut, dtype=torch.bool)
    return {
        "len/mean": Mean.of(length, every),
        "len/max": Max.of(length, every),
        "len/min": Min.of(length, every),
        "len/clipped": Mean.of(batch.cut.float(), every),
    }
