# ruff: noqa: E501  (one row of the table is one line or two)
"""The rollout engine against the trainer: the same weights, two sets of log-probs."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, nats, proxy, same

# fmt: off

ROWS: tuple[Metric, ...] = (
    nats("mismatch/kl", Family.MISMATCH, "KL(rollout || trainer) on the sampled tokens", estimator="k1", aliases=(
        same("rollout_corr/kl", "verl", "k1"), same("vllm_kl", "openrlhf", "k1"),
        proxy("ppo_actor/update/behave_approx_kl/avg", "areal"))),
    nats("mismatch/k3", Family.MISMATCH, "the same by the k3 estimator", low=0.0, estimator="k3", aliases=(
        same("rollout_corr/k3_kl", "verl", "k3"), same("mismatch_kl/all/mean", "prime-rl", "k3"),
        same("mismatch_k3"), same("gen_kl_error", "nemo-rl", "k3"),
        proxy("kl", "trl/async", "k3", "current policy against the sampling one"))),
    nats("mismatch/logp_absdiff", Family.MISMATCH, "mean |log trainer - log rollout|", low=0.0, aliases=(
        same("sampling/sampling_logp_difference/mean"), same("train/train_rollout_logprob_abs_diff", "slime"),
        proxy("rollout_corr/log_ppl_abs_diff", "verl", aggregator="sequence mean"))),
    nats("mismatch/logp_absdiff_max", Family.MISMATCH, "largest |log trainer - log rollout|", low=0.0, aggregator="maximum",
           aliases=(same("sampling/sampling_logp_difference/max"),)),
    Metric("mismatch/prob_absdiff", Family.MISMATCH, "probability", "mean |p trainer - p rollout| (not log-probs)", 0.0, 1.0, aliases=(
        same("training/rollout_probs_diff_mean", "verl"),)),
    Metric("mismatch/is_ratio", Family.MISMATCH, "", "mean trainer/rollout weight after truncation or masking", 0.0, aliases=(
        same("sampling/importance_sampling_ratio/mean"), same("rollout_corr/rollout_is_mean", "verl"),
        same("train/tis", "slime"), same("mismatch/is_ratio_mean"))),
    fraction("mismatch/ess", Family.MISMATCH, "effective sample size of raw trainer/rollout weights over their number", aliases=(
        proxy("rollout_corr/rollout_is_eff_sample_size", "verl", aggregator="after truncation"),)),
)
# fmt: on
