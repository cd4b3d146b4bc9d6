# ruff: noqa: E501  (one row of the table is one line or two)
"""What was sampled: lengths, text, staleness."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, proxy, same

# fmt: off

ROWS: tuple[Metric, ...] = (
    Metric("len/mean", Family.ROLLOUTS, "tokens", "mean response length", 0.0, aliases=(
        same("completions/mean_length"), same("response_length/mean", "verl"), same("completion_length"),
        same("rollout/response_length_mean", "openrlhf"), same("response_length", "openrlhf"),
        same("rollout/response_len/mean", "slime"), same("tokens/response_length/mean", "roll"))),
    Metric("len/max", Family.ROLLOUTS, "tokens", "longest response", 0.0, aggregator="maximum", aliases=(
        same("completions/max_length"), same("response_length/max", "verl"), same("rollout/response_len/max", "slime"),
        same("tokens/response_length/max", "roll"))),
    Metric("len/min", Family.ROLLOUTS, "tokens", "shortest response", 0.0, aggregator="minimum", aliases=(
        same("completions/min_length"), same("response_length/min", "verl"), same("rollout/response_len/min", "slime"),
        same("tokens/response_length/min", "roll"))),
    Metric("len/p50", Family.ROLLOUTS, "tokens", "median response length", 0.0, aggregator="quantile", aliases=(
        same("rollout/response_len/median", "slime"),)),
    Metric("len/p90", Family.ROLLOUTS, "tokens", "90th percentile of the response length", 0.0, aggregator="quantile"),
    Metric("len/p99", Family.ROLLOUTS, "tokens", "99th percentile of the response length", 0.0, aggregator="quantile"),
    Metric("len/tail_ratio", Family.ROLLOUTS, "", "99th percentile of the response length over the median", 1.0, aggregator="quantile"),
    Metric("len/max_over_mean", Family.ROLLOUTS, "", "longest response over the mean: what a synchronous batch waits for", 1.0, aggregator="maximum"),
    fraction("len/gini", Family.ROLLOUTS, "Gini coefficient of the response lengths: 0 all equal", aggregator="sequences"),
    fraction("len/bubble", Family.ROLLOUTS, "1 - mean / longest response: least share of idle slots while a batch is generated", aggregator="sequences"),
    fraction("len/clipped", Family.ROLLOUTS, "responses cut at the length limit", aggregator="sequence fraction", aliases=(
        same("completions/clipped_ratio"), same("response_length/clip_ratio", "verl"), same("truncated", "openrlhf"),
        same("rollout/truncated_rate", "openrlhf"), same("rollout/truncated_ratio", "slime"))),
    Metric("len/terminated_mean", Family.ROLLOUTS, "tokens", "mean length of the responses that were not cut", 0.0, aliases=(
        proxy("completions/mean_terminated_length", aggregator="0 where none terminated"),)),
    fraction("len/empty", Family.ROLLOUTS, "responses without a token", aggregator="sequence fraction", aliases=(
        same("response/aborted_ratio", "verl"),)),
    Metric("len/entropy_corr", Family.ROLLOUTS, "", "correlation of a response's length with its mean entropy", -1.0, 1.0, aggregator="sequences"),
    Metric("len/budget_used", Family.ROLLOUTS, "", "response tokens over the token budget of an iteration", 0.0, aggregator="sum"),
    fraction("partial/frac", Family.ROLLOUTS, "responses carried over from an earlier iteration", aggregator="sequence fraction", aliases=(
        same("fully_async/partial/partial_ratio", "verl"), same("rollout/weight_version/mixed_version_ratio", "slime"))),
    Metric("partial/retention_mean", Family.ROLLOUTS, "iterations", "iterations a response was carried over", 0.0, aggregator="sequence mean"),
    Metric("partial/retention_max", Family.ROLLOUTS, "iterations", "most iterations a response was carried over", 0.0, aggregator="maximum",
           aliases=(proxy("fully_async/partial/max_partial_span", "verl"),)),
    fraction("text/repetition", Family.ROLLOUTS, "1 - distinct 3-grams / 3-grams of token ids, mean over responses", aggregator="sequence mean"),
    fraction("text/distinct_1", Family.ROLLOUTS, "distinct token ids / token ids of a response", aggregator="sequence mean"),
    fraction("text/distinct_2", Family.ROLLOUTS, "distinct 2-grams / 2-grams of token ids of a response", aggregator="sequence mean"),
    fraction("text/loop_cover", Family.ROLLOUTS, "share of a response that one block repeated in a row covers", aggregator="sequence mean"),
    fraction("text/tail_loop", Family.ROLLOUTS, "the same for a block the response ends in", aggregator="sequence mean"),
    fraction("text/looping_frac", Family.ROLLOUTS, "responses at least half covered by one repeated block", aggregator="sequence fraction"),
    fraction("text/id0_frac", Family.ROLLOUTS, "responses that are at least 90 % token id 0", aggregator="sequence fraction"),
    Metric("text/id0_run", Family.ROLLOUTS, "tokens", "longest run of token id 0 in a response", 0.0, aggregator="maximum"),
    fraction("text/eos_missing", Family.ROLLOUTS, "responses whose last token ends no sequence", aggregator="sequence fraction", aliases=(
        same("ppo_actor/no_eos_ratios/avg", "areal"), same("ppo_actor/no_eos_ratio/avg", "areal"))),
    fraction("text/group_agreement", Family.ROLLOUTS, "pairs of responses to one prompt that agree, over the first 64 positions both have",
           aggregator="pairs of tokens"),
    Metric("text/zlib_ratio", Family.ROLLOUTS, "", "bytes of sampled text over its zlib-compressed bytes: prose 2 to 3, loops far more", 0.0,
           aggregator="sampled sequence mean"),
    Metric("text/zlib_ratio_max", Family.ROLLOUTS, "", "the same, largest", 0.0, aggregator="sampled maximum"),
    fraction("text/repetition_frac", Family.ROLLOUTS, "sampled texts of more than 10,000 characters whose last 10,000 compress more than tenfold",
           aggregator="sampled sequence fraction", aliases=(same("rollout/repetition_frac", "slime", aggregator="every sequence"),)),
    fraction("text/garbled", Family.ROLLOUTS, "sampled characters that are U+FFFD, control, private-use, unassigned or surrogate",
           aggregator="sampled sequence mean"),
    fraction("text/replacement", Family.ROLLOUTS, "sampled characters that are U+FFFD, which stands for undecodable bytes",
           aggregator="sampled sequence mean"),
    Metric("text/script_switches", Family.ROLLOUTS, "per 100 characters", "changes between writing systems within sampled text", 0.0, 100.0,
           aggregator="sampled sequence mean"),
    fraction("text/retok_exact", Family.ROLLOUTS, "sampled responses whose ids encode(decode(ids)) gives back", aggregator="sampled sequence fraction"),
    fraction("text/retok_naive", Family.ROLLOUTS, "positions at which encode(decode(ids)) differs; one early shift makes the rest differ",
           aggregator="sampled sequence mean"),
    Metric("text/retok_edit", Family.ROLLOUTS, "edits/token", "Levenshtein distance of encode(decode(ids)) over the sampled ids", 0.0,
           aggregator="sampled sequence mean"),
    Metric("text/retok_first", Family.ROLLOUTS, "tokens", "position of the first difference, among the responses that differ", 0.0,
           aggregator="sampled sequence mean"),
    Metric("text/retok_growth", Family.ROLLOUTS, "tokens", "ids after encode(decode(ids)) less the sampled ones", aggregator="sampled sequence mean"),
    fraction("text/turn_prefix_kept", Family.ROLLOUTS, "turns whose prompt begins with the ids of the turn before", aggregator="sampled turn fraction"),
    fraction("tokens/environment_frac", Family.ROLLOUTS, "tokens of responses that the environment wrote"),
    fraction("tokens/environment_leak", Family.ROLLOUTS, "tokens the environment wrote that the loss counts: should be 0"),
    Metric("tokens/total", Family.ROLLOUTS, "tokens", "tokens seen so far", 0.0, aggregator="cumulative", aliases=(
        same("num_tokens"), proxy("perf/total_num_tokens", "verl", aggregator="per step"))),
    Metric("staleness/mean", Family.ROLLOUTS, "versions", "policy versions between rollout and update", aliases=(
        same("sample/staleness_mean", "trl"), same("training/off_policy/trajectory_staleness/mean", "verl"), same("staleness"))),
    Metric("staleness/max", Family.ROLLOUTS, "versions", "the same, of the oldest response", aggregator="maximum", aliases=(
        same("sample/staleness_max", "trl"), same("training/off_policy/trajectory_staleness/max", "verl"))),
    Metric("staleness/worst_mean", Family.ROLLOUTS, "versions", "the same as the mean, from the first version a response was sampled under", aliases=(
        same("training/off_policy/trajectory_staleness_worst/mean", "verl"),)),
    Metric("staleness/spans_mean", Family.ROLLOUTS, "versions", "policy versions a response was sampled under", 1.0, aggregator="sequence mean", aliases=(
        same("training/off_policy/trajectory_spans/mean", "verl"),)),
    Metric("staleness/spans_max", Family.ROLLOUTS, "versions", "most policy versions a response was sampled under", 1.0, aggregator="maximum", aliases=(
        same("training/off_policy/trajectory_spans/max", "verl"),)),
    Metric("turns/mean", Family.ROLLOUTS, "turns", "turns of a conversation", 0.0, aggregator="sequence mean", aliases=(same("num_turns/mean", "verl"),)),
    Metric("turns/max", Family.ROLLOUTS, "turns", "turns of the longest conversation", 0.0, aggregator="maximum", aliases=(same("num_turns/max", "verl"),)),
)
OPEN: tuple[Metric, ...] = (
    Metric("len/by_task/", Family.ROLLOUTS, "tokens", "mean length of the responses to one task or data source", 0.0, aggregator="sequence mean"),
)
# fmt: on
