"""Estimators of KL(pi || ref) from tokens sampled by pi: k1, k2, k3 of http://joschu.net/blog/kl-approx.html.

All take the log-ratio x = log pi - log ref per token, in nats, any shape. E[k1] = E[k3] = KL; k2 is biased
but low in variance. k1 may be negative; k2 and k3 never are.

As a loss they differ again: the gradient of k2 is that of KL(pi || ref), that of k3 the one of KL(ref || pi), that of
k1 zero in expectation (arXiv 2510.01555). So all three are recorded, whichever the run puts into its loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlwatch.tensors.masked import indicator, keep, widen
from rlwatch.tensors.mergeable import Max, Mean, ShareStat, Stats, nonfinite_stats
from rlwatch.tensors.spread import Quantile
from rlwatch.tensors.tokens import TokenBatch

FAR = math.log(2)
"""|x| above this (nats): the reference finds a token more than twice, or less than half, as likely."""
UNLIKELY = math.log(0.1)
"""Log-prob of a token below which the policy that sampled it hardly expected it."""

SATURATED = 10.0
"""verl clamps k3 here (and |x| at 20, which is further out): beyond it the penalty has no gradient."""
_FINITE = -1e30
"""Added to the infinity of exp(-x), where -inf would make NaN of it."""


def k1(x: Tensor) -> Tensor:
    """Estimate KL by the log-ratio itself."""
    return x


def k2(x: Tensor) -> Tensor:
    """Estimate KL by half the square of the log-ratio."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x, accurate near 0; inf where exp(-x) overflows (nothing is clamped: an overflow is to be seen)."""
    # Near 0 the value is x^2 / 2. In float32 exp(-x) - 1 is off by 6e-8, more than the whole value at x = 1e-4; expm1
    # is off by 6e-12. The clamp touches x = -inf only (a token the policy itself finds impossible), where inf + -inf is
    # NaN.
    return torch.expm1(-x) + x.clamp(min=_FINITE)


def of_responses(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Mean k3 of the tokens of each response, nats a token, (B,); all (B, T). 0 for a response without tokens."""
    on = mask.bool()
    return keep(k3(widen(logp) - widen(ref_logp)), on, 0.0).sum(-1) / on.sum(-1).clamp(min=1)


def weighted_k3(estimate: Tensor, log_ratio: Tensor) -> Tensor:
    """``estimate`` (k3) times the importance ratio exp(``log_ratio``) = pi / pi_old, any shape.

    Unbiased for KL(pi || ref) on samples of the old policy (DeepSeek-V3.2, arXiv 2512.02556); what TRL logs as ``kl``
    with ``use_bias_correction_kl``.
    """
    return widen(log_ratio).exp() * estimate


def _estimates(x: Tensor, estimate: Tensor, mask: Tensor) -> Stats:
    return {
        "policy/kl_ref_k1": Mean.of(k1(x), mask),
        "policy/kl_ref_k2": Mean.of(k2(x), mask),
        "policy/kl_ref_k3": Mean.of(estimate, mask),
        "policy/kl_ref_max": Max.of(estimate, mask),
        "policy/kl_ref_far": Mean.of(indicator(x.abs() > FAR, x), mask),
        "policy/kl_ref_saturated": Mean.of(indicator(estimate > SATURATED, x), mask),
    }


def observe_kl(batch: TokenBatch) -> Stats:
    """KL to the reference, where there is one, and which tokens carry it."""
    if batch.ref_logp is None:
        return {}
    x = widen(batch.logp) - widen(batch.ref_logp)
    estimate = k3(x)
    stats = _estimates(x, estimate, batch.mask) | nonfinite_stats("ref_logp", batch.ref_logp, batch.mask)
    if batch.old_logp is not None:
        weighted = weighted_k3(estimate, widen(batch.logp) - widen(batch.old_logp))
        stats["policy/kl_ref_weighted"] = Mean.of(weighted, batch.mask)
    return stats | _shares(batch, estimate)


def _shares(batch: TokenBatch, estimate: Tensor) -> Stats:
    """Shares of the k3 sum that tokens of negative advantage hold, and tokens of old probability below 0.1."""
    old = widen(batch.trainer_logp)
    part = indicator(old < UNLIKELY, old) * estimate
    stats: Stats = {"policy/kl_ref_unlikely_share": ShareStat.of(part, estimate, batch.mask)}
    if batch.token_advantages is not None:
        a = batch.token_advantages
        stats["policy/kl_ref_neg_share"] = ShareStat.of(indicator(a < 0, a) * estimate, estimate, batch.mask)
    return stats


def observe_kl_quantiles(batch: TokenBatch) -> Stats:
    """``policy/kl_ref_p99``: 99th percentile of k3 over tokens, nats."""
    if batch.ref_logp is None:
        return {}
    return {"policy/kl_ref_p99": Quantile.of(k3(widen(batch.logp) - widen(batch.ref_logp)), batch.mask, 0.99)}
