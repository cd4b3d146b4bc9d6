"""What a mismatch between rollout engine and trainer means in absolute terms, from what runs have published."""

from __future__ import annotations

from dataclasses import dataclass

from rlwatch.detectors.rise import Limit, log_size, spread_of_ess


def shortfall(share: float) -> float:
    """By how much a share or a correlation falls short of 1."""
    return max(1.0 - share, 0.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Below ``noise`` engines merely round differently, above ``severe`` the gradient is off-policy whatever the run's
    own history. Both count from ``zero``, the value of engines that agree.
    """

    noise: float
    severe: float
    zero: float = 0.0


SCALES = {
    "mismatch/k3": Scale(noise=0.005, severe=0.05),
    "mismatch/kl": Scale(noise=0.01, severe=0.1),
    "mismatch/logp_absdiff": Scale(noise=0.02, severe=0.1),
    "mismatch/prob_absdiff": Scale(noise=0.015, severe=0.05),
    "mismatch/log_ppl_absdiff": Scale(noise=0.04, severe=0.25),
    "mismatch/mult_prob_error": Scale(noise=0.02, severe=0.1, zero=1.0),
}
"""Healthy: bf16 sampler mean |d| 0.0014-0.004, MoE 0.027, probability 0.006-0.008; k3 dense below 1e-3, MoE to 1e-1;
log-perplexity 0.003-0.07. Alarmed elsewhere: |kl| 0.1 (verl's example), logprob difference 0.1 (slime's gate),
multiplicative error past 1.01 to 1.02, and 1.05 to 1.1 fails (NeMo-RL). A public collapse went from 0.069 to 0.38 in
log-perplexity."""

BANDS = (
    Limit("mismatch/k3", 0.1, 0.0),
    Limit("mismatch/kl", 0.1, 0.0),
    Limit("mismatch/logp_absdiff", 0.1, 0.0),
    Limit("mismatch/prob_absdiff", 0.05, 0.0),
    Limit("mismatch/log_ppl_absdiff", 0.1, 0.0),
    Limit("mismatch/mult_prob_error", 1.05, 0.0, log_size),
    Limit("mismatch/prob_corr", 0.98, 0.0, shortfall),
    Limit("mismatch/ess", 0.3, 0.0, spread_of_ess),
    Limit("mismatch/chi2", 1.0, 0.0),
    Limit("mismatch/is_ratio", 0.5, 0.0, log_size),
    Limit("mismatch/is_ratio_std", 1.0, 0.0),
)
"""Levels others alarm at whatever the history (verl's examples, slime's and NeMo-RL's gates, smoke tests of
correlation), on both sides where a ratio has two."""
