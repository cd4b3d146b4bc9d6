# ruff: noqa: E501  (one row of the table is one line or two)
"""The rollout engine against the trainer: the same weights, two sets of log-probs.

Throughout, d = log trainer - log rollout of a sampled token, and its weight is exp(d), raw unless a row says otherwise.
"""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, nats, proxy, same

# fmt: off

_ANY_BAND = "at the run's own threshold, of tokens or of responses"
_EMPTY = "sequence mean; a response without tokens counts as perplexity 1"
_RESPONSES = "mean of responses' means"

_LEVEL: tuple[Metric, ...] = (
    nats("mismatch/kl", Family.MISMATCH, "KL(rollout || trainer) on the sampled tokens", estimator="k1", aliases=(
        same("rollout_corr/kl", "verl", "k1"), same("vllm_kl", "openrlhf", "k1"),
        proxy("ppo_actor/update/behave_approx_kl/avg", "areal"))),
    nats("mismatch/k3", Family.MISMATCH, "the same by the k3 estimator", low=0.0, estimator="k3", aliases=(
        same("rollout_corr/k3_kl", "verl", "k3"), same("rollout_correction/k3_kl", "", "k3"), same("mismatch_kl/all/mean", "prime-rl", "k3"),
        same("mismatch_k3"), same("gen_kl_error", "nemo-rl", "k3"), same("train_rollout_kl", "", "k3", _RESPONSES),
        proxy("kl", "trl/async", "k3", "current policy against the sampling one"))),
    nats("mismatch/logp_absdiff", Family.MISMATCH, "mean |log trainer - log rollout|", low=0.0, aliases=(
        same("sampling/sampling_logp_difference/mean"), same("train/train_rollout_logprob_abs_diff", "slime", "", _RESPONSES))),
    nats("mismatch/logp_absdiff_max", Family.MISMATCH, "largest |log trainer - log rollout|", low=0.0, aggregator="maximum",
           aliases=(same("sampling/sampling_logp_difference/max"),)),
    nats("mismatch/logp_absdiff_p99", Family.MISMATCH, "99th percentile of |log trainer - log rollout|", low=0.0, aggregator="99th percentile"),
    Metric("mismatch/m2", Family.MISMATCH, "nats^2", "mean squared log trainer - log rollout", 0.0),
    Metric("mismatch/mult_prob_error", Family.MISMATCH, "", "mean factor exp|d| between the two probabilities of a token; trouble where it trends past 1.01 to 1.02", 1.0,
           aliases=(same("token_mult_prob_error", "nemo-rl"),)),
    Metric("mismatch/prob_absdiff", Family.MISMATCH, "probability", "mean |p trainer - p rollout| (not log-probs)", 0.0, 1.0, aliases=(
        same("training/rollout_probs_diff_mean", "verl"),)),
    Metric("mismatch/prob_absdiff_max", Family.MISMATCH, "probability", "largest |p trainer - p rollout|", 0.0, 1.0, aggregator="maximum", aliases=(
        same("training/rollout_probs_diff_max", "verl"),)),
    Metric("mismatch/prob_absdiff_std", Family.MISMATCH, "probability", "standard deviation of |p trainer - p rollout|", 0.0, 1.0, aggregator="token deviation",
           aliases=(same("training/rollout_probs_diff_std", "verl"),)),
    Metric("mismatch/prob_corr", Family.MISMATCH, "", "Pearson's correlation of p trainer and p rollout", -1.0, 1.0, aggregator="tokens", aliases=(
        same("training/rollout_actor_probs_pearson_corr", "verl"),)),
)

_WEIGHTS: tuple[Metric, ...] = (
    Metric("mismatch/weight_mean", Family.MISMATCH, "", "mean raw weight trainer/rollout: 1 but for noise", 0.0, aliases=(
        same("sampling_importance_ratio", "nemo-rl", aggregator="token mean; older versions truncate first"),
        same("train/tis", "slime", aggregator=_RESPONSES))),
    Metric("mismatch/weight_max", Family.MISMATCH, "", "largest raw weight", 0.0, aggregator="maximum"),
    Metric("mismatch/weight_min", Family.MISMATCH, "", "smallest raw weight", 0.0, aggregator="minimum"),
    Metric("mismatch/is_ratio", Family.MISMATCH, "", "mean trainer/rollout weight after truncation or masking", 0.0, aliases=(
        same("sampling/importance_sampling_ratio/mean"), same("rollout_corr/rollout_is_mean", "verl"),
        same("mismatch/is_ratio_mean"), same("rollout_correction/is_weight_mean"))),
    Metric("mismatch/is_ratio_max", Family.MISMATCH, "", "largest weight after truncation or masking", 0.0, aggregator="maximum", aliases=(
        same("sampling/importance_sampling_ratio/max"), same("rollout_corr/rollout_is_max", "verl"))),
    Metric("mismatch/is_ratio_min", Family.MISMATCH, "", "smallest weight after truncation or masking", 0.0, aggregator="minimum", aliases=(
        same("sampling/importance_sampling_ratio/min"), same("rollout_corr/rollout_is_min", "verl"))),
    Metric("mismatch/is_ratio_std", Family.MISMATCH, "", "standard deviation of the weights after truncation or masking", 0.0, aggregator="token deviation",
           aliases=(same("rollout_corr/rollout_is_std", "verl"),)),
    fraction("mismatch/is_zero", Family.MISMATCH, "tokens whose weight the run's own correction sets to 0: they teach nothing"),
    fraction("mismatch/ess", Family.MISMATCH, "effective sample size of raw trainer/rollout weights over their number", aliases=(
        proxy("rollout_corr/rollout_is_eff_sample_size", "verl", aggregator="after truncation"),
        proxy("rollout_correction/ess", aggregator="after truncation on both sides"))),
    fraction("mismatch/ess_truncated", Family.MISMATCH, "the same of weights truncated at the run's cap or 2: looks healthy when much is cut"),
    Metric("mismatch/chi2", Family.MISMATCH, "", "<weight^2> - 1 of raw token weights; a sample's may be below 0", -1.0, aliases=(
        same("rollout_corr/chi2_token", "verl", aggregator="weights clamped at exp(20)"),
        same("rollout_correction/chi2_token", aggregator="weights clamped at exp(20)"))),
    fraction("mismatch/tis_truncated", Family.MISMATCH, "tokens whose weight truncated importance sampling would cut, at the run's cap or 2", aliases=(
        proxy("rollout_corr/rollout_is_ratio_fraction_high", "verl", aggregator=_ANY_BAND),
        proxy("rollout_correction/clipped_frac", aggregator="in the run's own mode, at its threshold"),
        proxy("train/tis_clipfrac", "slime", aggregator="of both sides, or of IcePop"))),
    fraction("mismatch/icepop_masked", Family.MISMATCH, "tokens whose weight lies outside [0.5, 5]: falls while the gap widens, so read it beside logp_absdiff", aliases=(
        proxy("rollout_corr/rollout_is_oob_ratio", "verl", aggregator=_ANY_BAND),
        proxy("is_oob_ratio", "nemo-rl", aggregator=_ANY_BAND), proxy("is_filter_ratio", "openrlhf", aggregator=_ANY_BAND))),
    nats("mismatch/icepop_entropy", Family.MISMATCH, "entropy of those tokens", low=0.0),
)

_KINDS: tuple[Metric, ...] = (
    nats("mismatch/k3_reverse", Family.MISMATCH, "k3 with the roles exchanged, unweighted: huge where the trainer finds a token impossible", low=0.0, estimator="k3", aliases=(
        same("policy_kl_error", "nemo-rl", "k3"),)),
    nats("mismatch/kl_reverse", Family.MISMATCH, "KL(trainer || rollout), weighted because the rollout engine sampled", low=0.0, estimator="weighted k3"),
    nats("mismatch/js", Family.MISMATCH, "Jensen-Shannon divergence of trainer and rollout", low=0.0, aliases=(
        same("js_divergence_error", "nemo-rl"),)),
    nats("mismatch/binary_kl", Family.MISMATCH, "KL(rollout || trainer) of this token against any other", low=0.0),
)

_PLACES: tuple[Metric, ...] = (
    fraction("mismatch/factor2_frac", Family.MISMATCH, "tokens whose two probabilities differ by more than a factor of 2"),
    fraction("mismatch/overconfident_frac", Family.MISMATCH, "tokens the rollout engine held above 0.9 and the trainer below 0.5"),
    nats("mismatch/diff_p00", Family.MISMATCH, "mean d of tokens the trainer gives a probability below 0.1"),
    nats("mismatch/diff_p10", Family.MISMATCH, "mean d of tokens of trainer probability 0.1 to 0.5"),
    nats("mismatch/diff_p50", Family.MISMATCH, "mean d of tokens of trainer probability 0.5 to 0.9"),
    nats("mismatch/diff_p90", Family.MISMATCH, "mean d of tokens of trainer probability 0.9 or more"),
    Metric("mismatch/absdiff_per_1k", Family.MISMATCH, "nats/1,000 tokens", "growth of |d| along a response", aggregator="regression slope"),
    Metric("mismatch/bias_pos", Family.MISMATCH, "advantage", "mean of -(weight - 1) A over tokens of positive advantage: what the mismatch does to their gradient"),
    Metric("mismatch/bias_neg", Family.MISMATCH, "advantage", "the same of negative advantage"),
    Metric("mismatch/adv_corr", Family.MISMATCH, "", "Pearson's correlation of d and the advantage", -1.0, 1.0, aggregator="tokens"),
)

_RESPONSE: tuple[Metric, ...] = (
    Metric("mismatch/seq_weight_mean", Family.MISMATCH, "", "mean of the products of responses' raw weights", 0.0, aggregator="sequence mean"),
    Metric("mismatch/seq_weight_max", Family.MISMATCH, "", "largest product of a response's raw weights", 0.0, aggregator="maximum"),
    fraction("mismatch/seq_ess", Family.MISMATCH, "effective sample size of those products over the number of responses", aggregator="sequences"),
    Metric("mismatch/seq_chi2", Family.MISMATCH, "", "<product^2> - 1 of the products of responses' raw weights", -1.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/chi2_seq", "verl", aggregator="sequence mean; log-weights clamped at 20"),)),
    fraction("mismatch/seq_rejected", Family.MISMATCH, "responses whose product of weights lies outside [0.5, 2]", aggregator="sequence fraction", aliases=(
        proxy("rollout_corr/rollout_rs_seq_sum_k1_seq_masked_fraction", "verl", aggregator="at the run's own threshold"),
        proxy("rollout_corr/rollout_rs_seq_masked_fraction", "verl", aggregator="responses with any token rejected by any rule"))),
    fraction("mismatch/geo_rejected", Family.MISMATCH, "responses whose geometric mean of weights lies outside [0.999, 1.001]", aggregator="sequence fraction", aliases=(
        proxy("rollout_corr/rollout_rs_seq_mean_k1_seq_masked_fraction", "verl", aggregator="at the run's own threshold"),)),
    Metric("mismatch/ppl_trainer", Family.MISMATCH, "", "perplexity of responses to the trainer", 0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/training_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/training_ppl"))),
    Metric("mismatch/ppl_rollout", Family.MISMATCH, "", "perplexity of responses to the rollout engine", 0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/rollout_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/rollout_ppl"))),
    Metric("mismatch/ppl_ratio", Family.MISMATCH, "", "perplexity to the trainer over that to the rollout engine", 0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/ppl_ratio", "verl", aggregator=_EMPTY), same("rollout_correction/ppl_ratio"))),
    nats("mismatch/log_ppl_trainer", Family.MISMATCH, "log perplexity of responses to the trainer", aggregator="sequence mean", aliases=(
        same("rollout_corr/training_log_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/training_log_ppl"))),
    nats("mismatch/log_ppl_rollout", Family.MISMATCH, "log perplexity of responses to the rollout engine", aggregator="sequence mean", aliases=(
        same("rollout_corr/rollout_log_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/rollout_log_ppl"))),
    nats("mismatch/log_ppl_diff", Family.MISMATCH, "log perplexity to the trainer minus that to the rollout engine: above 0 the trainer is less confident", aggregator="sequence mean", aliases=(
        same("rollout_corr/log_ppl_diff", "verl", aggregator=_EMPTY), same("rollout_correction/log_ppl_diff"))),
    nats("mismatch/log_ppl_diff_max", Family.MISMATCH, "largest such difference of a response", aggregator="maximum", aliases=(
        same("rollout_corr/log_ppl_diff_max", "verl", aggregator="maximum"), same("rollout_correction/log_ppl_diff_max"))),
    nats("mismatch/log_ppl_diff_min", Family.MISMATCH, "smallest such difference of a response", aggregator="minimum", aliases=(
        same("rollout_corr/log_ppl_diff_min", "verl", aggregator="minimum"), same("rollout_correction/log_ppl_diff_min"))),
    nats("mismatch/log_ppl_absdiff", Family.MISMATCH, "mean size of such a difference", low=0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/log_ppl_abs_diff", "verl", aggregator=_EMPTY), same("rollout_correction/log_ppl_abs_diff"))),
    Metric("mismatch/seq_m2", Family.MISMATCH, "nats^2/token", "squared log-weights of responses per token of theirs: equals m2 where errors of tokens do not add up", 0.0, aggregator="sum over sum"),
    Metric("mismatch/log_var_growth", Family.MISMATCH, "nats^2/token", "growth of a response's log-weight variance with its length", aggregator="regression slope"),
)

_ROUTING: tuple[Metric, ...] = (
    fraction("mismatch/routing_token_frac", Family.MISMATCH, "tokens sent to other experts in at least one layer"),
    fraction("mismatch/routing_layer_frac", Family.MISMATCH, "(token, layer) pairs with another set of experts", aggregator="token and layer fraction"),
    Metric("mismatch/routing_layers", Family.MISMATCH, "layers", "layers in which a token went to other experts", 0.0),
    nats("mismatch/routing_absdiff", Family.MISMATCH, "mean |d| of the tokens sent to other experts", low=0.0),
    Metric("mismatch/moe_avg_vio", Family.MISMATCH, "", "mean size of load violations: load of an expert times the number of experts, less 1", 0.0,
           aggregator="mean over experts and layers", aliases=(same("rollout/moe/avg_vio/avg", "verl"),)),
    Metric("mismatch/moe_max_vio", Family.MISMATCH, "", "load violation of the busiest expert: 0 when all are equally busy", 0.0,
           aggregator="maximum over experts, mean over layers", aliases=(same("rollout/moe/max_vio/avg", "verl"),)),
    Metric("mismatch/moe_worst_vio", Family.MISMATCH, "", "the same in the layer where it is largest", 0.0, aggregator="maximum over experts and layers",
           aliases=(same("rollout/moe/max_vio/max", "verl"),)),
)

ROWS: tuple[Metric, ...] = (*_LEVEL, *_WEIGHTS, *_KINDS, *_PLACES, *_RESPONSE, *_ROUTING)
# fmt: on
