# ruff: noqa: E501  (one row of the table is one line or two)
"""How far the policy moves: from the reference, and from the policy that sampled."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, nats, proxy, same

# fmt: off

ROWS: tuple[Metric, ...] = (
    nats("policy/kl_ref", Family.TRUST_REGION, "KL to the reference policy", estimator="k3", aliases=(
        same("kl", "trl/grpo", "k3", "token mean, times pi/pi_old with use_bias_correction_kl"), proxy("kl", "trl/rloo", "k1"),
        proxy("kl", "openrlhf", "k1|k2|k3"), proxy("kl", "trl/kto", "k1", "sequence sum of mismatched pairs, at least 0"),
        proxy("objective/kl", "trl", "k1", "sequence sum"), same("kl", "", "k3"),
        same("actor/kl_loss", "verl", "kl_loss_type"), proxy("actor/reward_kl_penalty", "verl"),
        proxy("critic/kl", "verl"), same("train/kl_loss", "slime"), same("kl_ref"), same("kl_loss"))),
    nats("policy/kl_ref_k1", Family.TRUST_REGION, "KL to the reference, k1 = x, x = log(pi/ref); may be negative", aliases=(
        proxy("logprobs_diff", "openrlhf", "k1", "token mean, or sequence mean where KL is part of the reward; 0 without a reference"),)),
    nats("policy/kl_ref_k2", Family.TRUST_REGION, "KL to the reference, k2 = x^2/2", low=0.0),
    nats("policy/kl_ref_k3", Family.TRUST_REGION, "KL to the reference, k3 = exp(-x) - 1 + x", low=0.0),
    nats("policy/kl_ref_weighted", Family.TRUST_REGION, "k3 times pi/pi_old: unbiased on samples of the old policy", estimator="V3.2"),
    nats("policy/kl_ref_max", Family.TRUST_REGION, "largest k3 of a token", low=0.0, aggregator="maximum"),
    nats("policy/kl_ref_p99", Family.TRUST_REGION, "99th percentile of k3", low=0.0, aggregator="99th percentile"),
    fraction("policy/kl_ref_far", Family.TRUST_REGION, "tokens more than twice or less than half as likely as under the reference"),
    fraction("policy/kl_ref_saturated", Family.TRUST_REGION, "tokens with k3 > 10, where verl clamps it: no gradient pulls them back"),
    fraction("policy/kl_ref_neg_share", Family.TRUST_REGION, "share of the k3 sum that tokens of negative advantage hold", aggregator="share of the sum"),
    fraction("policy/kl_ref_unlikely_share", Family.TRUST_REGION, "share of the k3 sum that tokens hold whose old probability was below 0.1",
           aggregator="share of the sum"),
    nats("policy/kl_old", Family.TRUST_REGION, "k1 between the policy before and during the update", estimator="k1", aliases=(
        same("actor/ppo_kl", "verl", "k1"), same("ppo_kl", "", "k1"), same("train/ppo_kl", "slime"),
        same("approx_kl"), same("actor/approxkl", "roll"), same("policy/approxkl_avg", "trl"))),
    Metric("policy/kl_coef", Family.TRUST_REGION, "", "weight of the KL term (beta)", 0.0, aliases=(same("actor/kl_coef"), same("beta"))),
    Metric("ratio/mean", Family.TRUST_REGION, "", "mean importance ratio pi/pi_old", 0.0, aliases=(same("ratio"), same("val/ratio"))),
    Metric("ratio/max", Family.TRUST_REGION, "", "largest importance ratio", 0.0, aggregator="maximum"),
    Metric("ratio/min", Family.TRUST_REGION, "", "smallest importance ratio", 0.0, aggregator="minimum"),
    Metric("ratio/p99", Family.TRUST_REGION, "", "99th percentile of token ratios", 0.0, aggregator="99th percentile"),
    nats("ratio/log_absmax", Family.TRUST_REGION, "largest |log ratio| of a token", low=0.0, aggregator="maximum"),
    Metric("ratio/m2", Family.TRUST_REGION, "nats^2", "mean squared log-ratio (M2PO holds it below 0.04)", 0.0),
    Metric("ratio/chi2", Family.TRUST_REGION, "", "<ratio^2> - 1 of raw token ratios"),
    fraction("ratio/ess", Family.TRUST_REGION, "effective sample size of raw token ratios over their number"),
    fraction("ratio/ess_clipped", Family.TRUST_REGION, "the same of ratios cut at the bounds of the loss's clip: looks healthy when much is cut"),
    Metric("ratio/geo_mean", Family.TRUST_REGION, "", "mean over responses of the geometric mean of their token ratios", 0.0, aggregator="sequence mean"),
    Metric("ratio/geo_max", Family.TRUST_REGION, "", "largest geometric mean of a response", 0.0, aggregator="maximum"),
    Metric("ratio/geo_min", Family.TRUST_REGION, "", "smallest geometric mean of a response", 0.0, aggregator="minimum"),
    fraction("ratio/product_ess", Family.TRUST_REGION, "effective sample size of the products of responses' token ratios over their number", aggregator="sequences"),
    Metric("ratio/log_var_growth", Family.TRUST_REGION, "nats^2/token", "growth of a response's log-ratio variance with its length", aggregator="regression slope"),
    Metric("ratio/seq_mean", Family.TRUST_REGION, "", "mean ratio of whole responses, as a sequence-level loss takes it", 0.0, aggregator="sequence mean"),
    Metric("ratio/seq_max", Family.TRUST_REGION, "", "largest ratio of a whole response", 0.0, aggregator="maximum"),
    fraction("ratio/seq_ess", Family.TRUST_REGION, "effective sample size of the ratios of responses over their number", aggregator="sequences"),
    fraction("ratio/clipfrac", Family.TRUST_REGION, "tokens whose ratio is clipped", aliases=(
        same("clip_ratio/region_mean", "", aggregator="token fraction, sign-aware"), same("actor/pg_clipfrac", "verl"),
        same("ppo_clip_ratio", "openrlhf"), same("pg_clipfrac"), same("train/pg_clipfrac", "slime"),
        same("actor/ppo_ratio_clipfrac", "roll"), same("clip_ratio"), same("policy/clipfrac_avg", "trl"),
        proxy("clip_ratio/region_mean", "trl/rloo", aggregator="sequence fraction"), proxy("cispo_clip_ratio", "trl"))),
    fraction("ratio/clipfrac_low", Family.TRUST_REGION, "tokens clipped below (advantage < 0)", aliases=(
        same("clip_ratio/low_mean"), proxy("clip_ratio/low_mean", "trl/rloo", aggregator="sequence fraction"),
        same("actor/ppo_ratio_low_clipfrac", "roll"))),
    fraction("ratio/clipfrac_high", Family.TRUST_REGION, "tokens clipped above (advantage > 0)", aliases=(
        same("clip_ratio/high_mean"), proxy("clip_ratio/high_mean", "trl/rloo", aggregator="sequence fraction"),
        same("actor/ppo_ratio_high_clipfrac", "roll"))),
    fraction("ratio/clipfrac_dual", Family.TRUST_REGION, "tokens beyond the dual clip (advantage < 0, ratio > c)", aliases=(
        proxy("actor/pg_clipfrac_lower", "verl", aggregator="0 where the loss has no dual clip"),)),
    fraction("offpolicy/masked", Family.TRUST_REGION, "responses that V3.2's off-policy mask drops, at the loss's threshold or 0.5 nats/token",
           aggregator="sequence fraction", aliases=(proxy("train/opsm_clipfrac", "slime", aggregator="sequences, counted"),)),
    fraction("offpolicy/masked_neg", Family.TRUST_REGION, "the same, of responses of negative advantage", aggregator="sequence fraction"),
    nats("offpolicy/kl_neg_max", Family.TRUST_REGION, "largest mean of log sampling - log policy over a response of negative advantage", aggregator="maximum"),
)
# fmt: on
