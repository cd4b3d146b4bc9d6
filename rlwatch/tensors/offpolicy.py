"""Responses too far from the policy that sampled them: DeepSeek-V3.2's off-policy mask, and age in versions."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import indicator, keep, widen
from rlwatch.tensors.mergeable import Max, Mean, Stats
from rlwatch.tensors.sides import response_advantages
from rlwatch.tensors.tokens import TokenBatch

DELTA = 0.5
"""Threshold where the loss has none: V3.2 publishes no number; this is the example in TRL's documentation."""


def sampling_kl(logp: Tensor, sampling_logp: Tensor, mask: Tensor) -> Tensor:
    """Mean over a response of log pi_sampling - log pi, shape (B,), nats per token; may be negative.

    ``sampling_logp`` (B, T) as the rollout engine recorded it (else the old policy's), so that staleness and mismatch
    both count. Tokens the engine could not score (NaN) add nothing, as in TRL; a NaN of ``logp`` is not hidden. NaN
    for a response without tokens.
    """
    gap = widen(sampling_logp) - widen(logp)
    return keep(gap, mask.bool() & ~sampling_logp.isnan(), 0.0).sum(-1) / mask.bool().sum(-1)


def off_policy_masked(kl: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """1.0 for a response the off-policy sequence mask drops, else 0.0: A < 0 and ``kl`` > ``delta``; shape (B,).

    DeepSeek-V3.2 (arXiv 2512.02556), equation 9; ``kl`` (B,) of :func:`sampling_kl`, ``advantages`` (B,). NaN where
    either is.
    """
    return indicator((advantages < 0) & (kl > delta), kl, advantages)


def off_policy_stats(
    logp: Tensor, sampling_logp: Tensor, advantages: Tensor, mask: Tensor, *, delta: float = DELTA
) -> Stats:
    """Over responses with a scored token: the fraction the mask drops (``offpolicy/masked``); of those with A < 0 the
    fraction (``offpolicy/masked_neg``) and the largest :func:`sampling_kl` (``offpolicy/kl_neg_max``, nats per token).

    ``logp``, ``sampling_logp``, ``mask`` (B, T); ``advantages`` (B,), (B, 1) or (B, T).
    """
    kl, a = sampling_kl(logp, sampling_logp, mask), response_advantages(advantages, mask)
    measured = (mask.bool() & ~sampling_logp.isnan()).any(-1)
    dropped = off_policy_masked(kl, a, delta)
    negative = measured & ((a < 0) | a.isnan())
    return {
        "offpolicy/masked": Mean.of(dropped, measured),
        "offpolicy/masked_neg": Mean.of(dropped, negative),
        "offpolicy/kl_neg_max": Max.of(kl.masked_fill(a.isnan(), torch.nan), negative),
    }


def core(batch: TokenBatch) -> Stats:
    """The off-policy mask where a sampling policy and advantages are known; staleness where that is known."""
    stats: Stats = {}
    if batch.staleness is not None:
        age, measured = widen(batch.staleness), batch.mask.bool().any(-1)
        stats = {"staleness/mean": Mean.of(age, measured), "staleness/max": Max.of(age, measured)}
    logp, sampling = batch.logp, batch.rollout_logp
    if sampling is None and batch.old_logp is not None:
        broken = batch.old_logp.isnan()  # a NaN of the trainer's own is no unscored token
        logp, sampling = widen(logp).masked_fill(broken, torch.nan), batch.old_logp.masked_fill(broken, 0.0)
    if sampling is None or batch.advantages is None:
        return stats
    delta = DELTA if batch.off_policy_delta is None else batch.off_policy_delta
    return stats | off_policy_stats(logp, sampling, batch.advantages, batch.mask, delta=delta)
