"""Importance ratios r = pi / pi_old of tokens and of whole responses: raw, before anything is clipped or masked."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.growth import Growth
from rlwatch.tensors.masked import keep, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.spread import Ess, Quantile
from rlwatch.tensors.tokens import TokenBatch


def ratio_stats(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Stats:
    """Token ratios r between ``logp`` and ``old_logp`` (B, T), over ``mask`` (B, T); x = log r.

    ``ratio/mean``, ``max``, ``min`` are unitless and >= 0 (inf where exp overflows); ``ratio/ess`` is the
    effective sample size over the number of tokens; ``ratio/chi2`` is <r^2> - 1, which may be negative on a sample;
    ``ratio/m2`` is <x^2> (M2PO, arXiv 2510.01161) and ``ratio/log_absmax`` the largest |x|, in nats;
    ``policy/kl_old`` is <-x>, nats per token.
    """
    x = widen(logp) - widen(old_logp)
    ratio = x.exp()
    return {
        "ratio/mean": Mean.of(ratio, mask),
        "ratio/max": Max.of(ratio, mask),
        "ratio/min": Min.of(ratio, mask),
        "ratio/ess": Ess.of(x, mask),
        "ratio/chi2": Mean.of(chi2(x), mask),
        "ratio/m2": Mean.of(x.square(), mask),
        "ratio/log_absmax": Max.of(x.abs(), mask),
        "policy/kl_old": Mean.of(-x, mask),
    }


def chi2(log_weight: Tensor) -> Tensor:
    """w^2 - 1 of the weight w = exp(``log_weight``): its mean is chi^2(pi || pi_old) if <w> = 1. Any shape."""
    return torch.expm1(2 * widen(log_weight))


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


def response_stats(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Stats:
    """Both ratios a response can have, whatever the loss: the geometric mean of its tokens' and their product.

    ``ratio/geo_mean``, ``geo_max``, ``geo_min``; ``ratio/product_ess``, the effective sample size of products over
    their number; ``ratio/log_var_growth`` (nats^2 per token), by which it falls with length. All of raw ratios.
    """
    total = sequence_log_ratio(logp, old_logp, mask)
    length, measured = mask.bool().sum(-1), mask.bool().any(-1)
    geometric = (total / length).exp()
    return {
        "ratio/geo_mean": Mean.of(geometric, measured),
        "ratio/geo_max": Max.of(geometric, measured),
        "ratio/geo_min": Min.of(geometric, measured),
        "ratio/product_ess": Ess.of(total, measured),
        "ratio/log_var_growth": Growth.of(widen(logp) - widen(old_logp), mask),
    }


def core(batch: TokenBatch) -> Stats:
    """Without a measured old policy the ratio is 1 by definition: nothing to report."""
    if batch.old_logp is None:
        return {}
    return {
        **ratio_stats(batch.logp, batch.old_logp, batch.mask),
        **response_stats(batch.logp, batch.old_logp, batch.mask),
        **nonfinite_stats("old_logp", batch.old_logp, batch.mask),
    }


def full(batch: TokenBatch) -> Stats:
    """``ratio/p99``: 99th percentile of token ratios."""
    if batch.old_logp is None:
        return {}
    return {"ratio/p99": Quantile.of((widen(batch.logp) - widen(batch.old_logp)).exp(), batch.mask, 0.99)}
