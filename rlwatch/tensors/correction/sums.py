"""Means as verl takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import keep

SAFETY = 20.0
"""verl clamps log-ratios to +-20 before it exponentiates them for weights, chi2 and rejection (but not for KL)."""


def total(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of each response's tokens (B,); 0 for a response without tokens."""
    return keep(x, mask, 0.0).sum(-1)


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask, 0-d, with verl's 1e-8 beside the count (which only a float64 ``mask`` can hold)."""
    return keep(x, mask, 0.0).sum() / (mask.sum() + 1e-8)


def mean_of_each(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each response's tokens (B,); 0 for a response without tokens, as in verl."""
    return total(x, mask) / (mask.sum(-1) + 1e-8)


def spread(x: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Population deviation over the mask of ``x`` clamped to [low, high], 0-d; 0 for a single token."""
    clamped = x.clamp(low, high)
    variance = mean(clamped.square(), mask) - mean(clamped, mask).square()
    return torch.where(mask.sum() > 1, variance.clamp(min=0.0).sqrt(), 0.0)


def sample_deviation(values: Tensor, measured: Tensor) -> Tensor:
    """Sample deviation (ddof 1) of the measured ``values`` (B,), 0-d; 0 for a single one."""
    n = measured.sum()
    middle = keep(values, measured, 0.0).sum() / n
    squares = keep((values - middle).square(), measured, 0.0).sum()
    return torch.where(n > 1, (squares / (n - 1).clamp(min=1)).sqrt(), 0.0)


def clamped(log_ratio: Tensor) -> Tensor:
    """Within verl's safety bound."""
    return log_ratio.clamp(-SAFETY, SAFETY)
