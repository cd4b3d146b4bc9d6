"""verl's off-policy metrics: perplexity, KL, chi2."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.correction.sums import clamped, mean, mean_of_each, total


def offpolicy_metrics(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """As ``compute_offpolicy_metrics``, of (B, T) log-probs, nats; a response without tokens has perplexity 1."""
    log_ratio = old_logp - rollout_logp
    return {
        **_perplexities(mean_of_each(old_logp, mask), mean_of_each(rollout_logp, mask)),
        "kl": mean(-log_ratio, mask),
        "k3_kl": mean(log_ratio.exp() - log_ratio - 1, mask),
        "chi2_token": mean(clamped(log_ratio).exp().square(), mask) - 1.0,
        "chi2_seq": torch.exp(2.0 * clamped(total(log_ratio, mask))).mean() - 1.0,
    }


def _perplexities(trainer: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """Of mean log-probs (B,). ``log_ppl_diff`` has the sign of verl's code, not of its documentation."""
    diff = rollout - trainer
    largest, smallest = (diff.amax(), diff.amin()) if diff.numel() else (diff.sum(), diff.sum())
    return {
        "training_ppl": (-trainer).exp().mean(),
        "training_log_ppl": (-trainer).mean(),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": diff.abs().mean(),
        "log_ppl_diff_max": largest,
        "log_ppl_diff_min": smallest,
        "ppl_ratio": diff.exp().mean(),
    }
