"""Where a loss clips importance ratios: on which side, and of how many tokens the gradient is gone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlwatch.tensors.masked import indicator, widen
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.spread import Ess
from rlwatch.tensors.tokens import TokenBatch


def clip_stats(
    x: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float, dual: float | None = None
) -> Stats:
    """Fractions of ``mask`` where the PPO clip [1 - low, 1 + high] binds r = exp(``x``), so that no gradient is left.

    ``ratio/clipfrac_low``: r < 1 - low and A < 0; ``clipfrac_high``: r > 1 + high and A > 0; ``clipfrac``: either
    (verl's ``pg_clipfrac``, TRL's ``clip_ratio/region_mean``). With ``dual`` = c > 1, of dual-clip PPO
    (arXiv 1912.09729), ``clipfrac_dual``: r > c and A < 0 (verl's ``pg_clipfrac_lower``).

    ``x`` (B, T) log-ratios of tokens, or (B, 1) of whole responses, as GSPO clips them: then ``mask`` (B, T) weighs a
    response by its tokens as verl does, (B, 1) counts each once as TRL does. ``advantages`` (B, T) or (B, 1). For
    TRL's CISPO, which caps the ratio at c: ``low=inf, high=c - 1``, and no ``clipfrac_low``. NaN where a ratio or an
    advantage is.
    """
    ratio = widen(x).exp()
    below, above = clipped_sides(ratio, advantages, low=low, high=high)
    flags = {"ratio/clipfrac_high": above, "ratio/clipfrac": below | above}
    if low < math.inf:
        flags["ratio/clipfrac_low"] = below
    if dual is not None:
        flags["ratio/clipfrac_dual"] = (ratio > dual) & (advantages < 0)
    return {name: Mean.of(indicator(flag, ratio, advantages), mask) for name, flag in flags.items()}


def clipped_sides(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where the PPO clip binds below and above, both bool in the common shape of ``ratio`` and ``advantages``."""
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def truncated(x: Tensor, *, low: float = math.inf, high: float = math.inf) -> Tensor:
    """Log-ratios ``x`` of weights truncated to [1 - low, 1 + high], same shape; NaN stays NaN."""
    return widen(x).clamp(math.log(1 - low) if low < 1 else -torch.inf, math.log(1 + high))


def core(batch: TokenBatch) -> Stats:
    """Where the loss has a token-level clip, the old policy was measured, and advantages are known."""
    advantages = batch.token_advantages
    if batch.old_logp is None or batch.clip is None or advantages is None:
        return {}
    low, high = batch.clip
    x = widen(batch.logp) - widen(batch.old_logp)
    return {
        **clip_stats(x, advantages, batch.mask, low=low, high=high, dual=batch.dual_clip),
        "ratio/ess_clipped": Ess.of(truncated(x, low=low, high=high), batch.mask),
    }
