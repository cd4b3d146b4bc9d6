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
        same("completions/max_length"), same("response_length/max", "verl"))),
    Metric("len/min", Family.ROLLOUTS, "tokens", "shortest response", 0.0, aggregator="minimum", aliases=(
        same("completions/min_length"), same("response_length/min", "verl"))),
    fraction("len/clipped", Family.ROLLOUTS, "responses cut at the length limit", aggregator="sequence fraction", aliases=(
        same("completions/clipped_ratio"), same("response_length/clip_ratio", "verl"), same("truncated", "openrlhf"),
        same("rollout/truncated_rate", "openrlhf"), same("rollout/truncated_ratio", "slime"))),
    fraction("text/repetition", Family.ROLLOUTS, "1 - distinct 3-grams / 3-grams of token ids, mean over responses",
           aggregator="sequence mean", aliases=(proxy("rollout/repetition_frac", "slime"),)),
    fraction("text/id0_frac", Family.ROLLOUTS, "responses that are at least 90 % token id 0", aggregator="sequence fraction"),
    Metric("tokens/total", Family.ROLLOUTS, "tokens", "tokens seen so far", 0.0, aggregator="cumulative", aliases=(
        same("num_tokens"), proxy("perf/total_num_tokens", "verl", aggregator="per step"))),
    Metric("staleness/mean", Family.ROLLOUTS, "versions", "policy versions between rollout and update", aliases=(
        same("sample/staleness_mean", "trl"), same("training/off_policy/trajectory_staleness/mean", "verl"), same("staleness"))),
)
# fmt: on
