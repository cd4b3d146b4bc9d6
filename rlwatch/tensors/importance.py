"""Importance ratios r = pi / pi_old of the sampled tokens: raw, before anything is clipped or masked."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.masked import keep, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.spread import Ess
from rlwatch.tensors.tokens import TokenBatch


def ratio_stats(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Stats:
    """Token ratios between ``logp`` and ``old_logp`` (B, T), over ``mask`` (B, T).

    ``ratio/mean``, ``max``, ``min`` are unitless and >= 0 (inf where exp overflows); ``ratio/ess`` is the
    effective sample size over the number of tokens; ``policy/kl_old`` is E[log old - log new], nats per token.
    """
    x = widen(logp) - widen(old_logp)
    ratio = x.exp()
    return {
        "ratio/mean": Mean.of(ratio, mask),
        "ratio/max": Max.of(ratio, mask),
        "ratio/min": Min.of(ratio, mask),
        "ratio/ess": Ess.of(x, mask),
        "policy/kl_old": Mean.of(-x, mask),
    }


def clip_stats(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float) -> Stats:
    """Fraction of tokens the PPO clip binds, by the sign of the advantage.

    Below ``1 - low`` only where the advantage is negative, above ``1 + high`` only where it is positive.
    ``logp``, ``old_logp``, ``mask`` (B, T); ``advantages`` (B, T) or (B, 1). A token whose ratio is NaN makes the
    fraction NaN: comparisons with NaN are false, and would report a reassuring 0.
    """
    ratio = (widen(logp) - widen(old_logp)).exp()
    unknown = ratio.isnan() | advantages.isnan()
    below = ((ratio < 1 - low) & (advantages < 0)).to(ratio.dtype).masked_fill(unknown, torch.nan)
    above = ((ratio > 1 + high) & (advantages > 0)).to(ratio.dtype).masked_fill(unknown, torch.nan)
    return {"ratio/clipfrac_low": Mean.of(below, mask), "ratio/clipfrac_high": Mean.of(above, mask)}


def sequence_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, *, per_token: bool = False) -> Tensor:
    """Sum over the tokens of a response of log pi - log pi_old, shape (B,), nats.

    ``per_token`` divides by the number of tokens: the exponential is then the geometric mean of GSPO
    (arXiv 2507.18071); NaN for a response without tokens.
    """
    total = keep(widen(logp) - widen(old_logp), mask, 0.0).sum(-1)
    return total / mask.bool().sum(-1) if per_token else total


def sequence_ratio_stats(log_ratio: Tensor, measured: Tensor) -> Stats:
    """Ratios of whole responses: ``ratio/seq_mean``, ``seq_max``, ``seq_ess`` (effective sample size over B).

    ``log_ratio`` (B,) nats; ``measured`` (B,) which responses have tokens at all.
    """
    ratio = widen(log_ratio).exp()
    return {
        "ratio/seq_mean": Mean.of(ratio, measured),
        "ratio/seq_max": Max.of(ratio, measured),
        "ratio/seq_ess": Ess.of(log_ratio, measured),
    }


def core(batch: TokenBatch) -> Stats:
    """Without a measured old policy the ratio is 1 by definition: nothing to report."""
    if batch.old_logp is None:
        return {}
    stats = {
        **ratio_stats(batch.logp, batch.old_logp, batch.mask),
        **nonfinite_stats("old_logp", batch.old_logp, batch.mask),
    }
    advantages = batch.token_advantages
    if batch.clip is not None and advantages is not None:
        low, high = batch.clip
        stats |= clip_stats(batch.logp, batch.old_logp, advantages, batch.mask, low=low, high=high)
    return stats
