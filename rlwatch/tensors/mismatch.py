"""Mismatch between the rollout engine and the trainer: the same weights, the same tokens, two sets of log-probs.

With d = log trainer - log rollout: k1 of KL(rollout || trainer) is -d, k3 is exp(d) - d - 1, and the raw weight of
a token is exp(d). Nothing is truncated first: statistics of truncated weights look healthy exactly when
truncation is heavy.
"""

from __future__ import annotations

from torch import Tensor

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.kl import k3
from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Max, Mean, Stats
from rlwatch.tensors.spread import Ess
from rlwatch.tensors.tokens import TokenBatch


def mismatch_stats(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Stats:
    """Token statistics of d = ``old_logp`` - ``rollout_logp`` (B, T), nats, over ``mask`` (B, T).

    A token the engine could not score (NaN in ``rollout_logp``) is left out here and counted by
    :func:`rlwatch.tensors.finite.nonfinite_stats`; a NaN of the trainer is not hidden.
    """
    d = widen(old_logp) - widen(rollout_logp)
    scored = mask.bool() & ~rollout_logp.isnan()
    return {
        "mismatch/kl": Mean.of(-d, scored),
        "mismatch/k3": Mean.of(k3(-d), scored),
        "mismatch/logp_absdiff": Mean.of(d.abs(), scored),
        "mismatch/logp_absdiff_max": Max.of(d.abs(), scored),
        "mismatch/ess": Ess.of(d, scored),
    }


def core(batch: TokenBatch) -> Stats:
    """Trainer against rollout engine, where the engine reported log-probs."""
    if batch.rollout_logp is None:
        return {}
    return {
        **mismatch_stats(batch.trainer_logp, batch.rollout_logp, batch.mask),
        **nonfinite_stats("rollout_logp", batch.rollout_logp, batch.mask),
    }
