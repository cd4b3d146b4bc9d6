"""What a batch holds about the mismatch."""

from __future__ import annotations

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.mismatch.advantage import advantage_stats
from rlwatch.tensors.mismatch.divergences import divergence_stats
from rlwatch.tensors.mismatch.gap import Gap, gap_stats
from rlwatch.tensors.mismatch.responses import response_stats
from rlwatch.tensors.mismatch.routing import routing_stats
from rlwatch.tensors.mismatch.tails import tail_stats
from rlwatch.tensors.mismatch.thresholds import USUAL
from rlwatch.tensors.tokens import TokenBatch


def core(batch: TokenBatch) -> Stats:
    """Trainer against rollout engine, where the engine reported log-probs: level, raw weights, probabilities."""
    if batch.rollout_logp is None:
        return {}
    gap = Gap.of(batch.trainer_logp, batch.rollout_logp, batch.mask)
    stats = {
        **gap_stats(gap, USUAL.capped_as(batch.truncation)),
        **nonfinite_stats("rollout_logp", batch.rollout_logp, batch.mask),
    }
    if batch.truncation is not None:
        stats["mismatch/is_ratio"] = Mean.of(gap.weight.clamp(max=batch.truncation), gap.scored)
    return stats


def full(batch: TokenBatch) -> Stats:
    """The rest: kinds of divergence, tails, gradient, whole responses, and experts where both routings are known."""
    gap = None if batch.rollout_logp is None else Gap.of(batch.trainer_logp, batch.rollout_logp, batch.mask)
    return {**_gap_stats(batch, gap), **_routing_stats(batch, gap)}


def _gap_stats(batch: TokenBatch, gap: Gap | None) -> Stats:
    if gap is None:
        return {}
    at = USUAL.capped_as(batch.truncation)
    stats = {**divergence_stats(gap), **tail_stats(gap, at, batch.entropy), **response_stats(gap, at)}
    if batch.token_advantages is not None:
        stats |= advantage_stats(gap, batch.token_advantages)
    return stats


def _routing_stats(batch: TokenBatch, gap: Gap | None) -> Stats:
    if batch.experts is None or batch.rollout_experts is None:
        return {}
    if gap is None:
        return routing_stats(batch.experts, batch.rollout_experts, batch.mask)
    return routing_stats(batch.experts, batch.rollout_experts, batch.mask, gap.d.abs(), gap.scored)
