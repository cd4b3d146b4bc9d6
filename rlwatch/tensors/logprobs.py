"""Log-probs of the sampled tokens under the policy being updated."""

from __future__ import annotations

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.mergeable import Mean, Min, Stats
from rlwatch.tensors.tokens import TokenBatch


def core(batch: TokenBatch) -> Stats:
    """``policy/logp_mean`` and ``policy/logp_min``, nats, and how many are not finite."""
    return {
        "policy/logp_mean": Mean.of(batch.logp, batch.mask),
        "policy/logp_min": Min.of(batch.logp, batch.mask),
        **nonfinite_stats("logp", batch.logp, batch.mask),
    }
