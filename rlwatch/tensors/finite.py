"""Counting what is not a number, where it matters: inside the mask."""

from __future__ import annotations

from torch import Tensor

from rlwatch.tensors.mergeable import Stats, Total


def nonfinite(x: Tensor) -> Tensor:
    """1.0 where ``x`` is NaN or infinite, else 0.0; shape of ``x``, float32."""
    return (~x.isfinite()).float()


def nonfinite_stats(name: str, x: Tensor, mask: Tensor) -> Stats:
    """``nonfinite/<name>``: how many elements of ``x`` inside ``mask`` (same shape) are NaN or infinite."""
    return {f"nonfinite/{name}": Total.of(nonfinite(x), mask)}
