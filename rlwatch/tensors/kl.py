"""Estimators of KL(pi || ref) from tokens sampled by pi: k1, k2, k3 of http://joschu.net/blog/kl-approx.html.

All take the log-ratio x = log pi - log ref per token, in nats, any shape. E[k1] = E[k3] = KL; k2 is biased
but low in variance. k1 may be negative; k2 and k3 never are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.tokens import TokenBatch


def k1(x: Tensor) -> Tensor:
    """The log-ratio itself."""
    return x


def k2(x: Tensor) -> Tensor:
    """Half the square of the log-ratio."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x, accurate near 0; inf where exp(-x) overflows (nothing is clamped)."""
    return torch.expm1(-x) + x


def kl_ref_stats(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Stats:
    """Token means of k1, k2, k3 between ``logp`` and ``ref_logp`` (B, T), nats per token, over ``mask`` (B, T)."""
    x = widen(logp) - widen(ref_logp)
    return {
        "policy/kl_ref_k1": Mean.of(k1(x), mask),
        "policy/kl_ref_k2": Mean.of(k2(x), mask),
        "policy/kl_ref_k3": Mean.of(k3(x), mask),
    }


def core(batch: TokenBatch) -> Stats:
    """KL to the reference, where there is one."""
    if batch.ref_logp is None:
        return {}
    return {
        **kl_ref_stats(batch.logp, batch.ref_logp, batch.mask),
        **nonfinite_stats("ref_logp", batch.ref_logp, batch.mask),
    }
