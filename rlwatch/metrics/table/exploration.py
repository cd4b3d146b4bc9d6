# ruff: noqa: E501  (one row of the table is one line or two)
"""How much the policy still explores."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, nats, other, proxy, same

# fmt: off

_OF_A_DATASET = ("trl/sft", "trl/dpo", "trl/kto", "trl/tpo", "trl/distillation")
"""Trainers whose entropy is that of tokens they were given: it falls as they learn them, and nothing is explored."""

ROWS: tuple[Metric, ...] = (
    nats("policy/entropy", Family.EXPLORATION, "full-softmax entropy at rollout temperature", low=0.0, aliases=(
        same("entropy"), same("actor/entropy", "verl", aggregator="loss_agg_mode, old policy"),
        same("entropy/mean"), same("entropy/all/mean", "prime-rl"), same("ppo_actor/update/entropy/avg", "areal"),
        same("critic/entropy/mean", "roll"), same("policy/entropy_avg", "trl"),
        proxy("actor/entropy_loss", "verl", aggregator="update pass"), proxy("entropy_loss", "openrlhf"),
        proxy("train/entropy_loss", "slime"),
        *(other("entropy", source) for source in _OF_A_DATASET))),
    nats("policy/entropy_pos", Family.EXPLORATION, "entropy of the tokens of positive advantage", low=0.0),
    nats("policy/entropy_neg", Family.EXPLORATION, "entropy of the tokens of negative advantage: it is these that explode", low=0.0),
    nats("policy/entropy_p10", Family.EXPLORATION, "10th percentile of token entropy", low=0.0),
    nats("policy/entropy_p90", Family.EXPLORATION, "90th percentile of token entropy", low=0.0),
    Metric("policy/vocab_size", Family.EXPLORATION, "tokens", "vocabulary size: entropy cannot exceed its logarithm", 1.0),
    nats("policy/logp_mean", Family.EXPLORATION, "mean log-prob of the sampled tokens", high=0.0,
           aliases=(same("train/log_probs", "slime"),)),
    nats("policy/logp_min", Family.EXPLORATION, "lowest log-prob of a sampled token", high=0.0, aggregator="minimum"),
    Metric("policy/cov", Family.EXPLORATION, "nats", "covariance c of log-prob and advantage over tokens: a step lowers entropy in proportion to it"),
    Metric("policy/cov_top", Family.EXPLORATION, "nats", "mean c of the 0.2 % of tokens where it is largest", aggregator="mean of the top 0.2 %"),
    fraction("policy/cov_positive", Family.EXPLORATION, "tokens with c > 0, whose update lowers entropy"),
    fraction("policy/cov_candidates", Family.EXPLORATION, "tokens with c within (1, 5) that PPO does not clip: candidates of Clip-Cov"),
)
OPEN: tuple[Metric, ...] = (
    nats("policy/entropy_by_task/", Family.EXPLORATION, "mean entropy of the responses to one task or data source", low=0.0,
           aggregator="sequence mean"),
)
# fmt: on
