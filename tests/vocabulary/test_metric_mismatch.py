"""What trainers call the mismatch, and where their number is another one."""

import pytest

from rlwatch.metrics import BY_NAME, canonicalise, resolve


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("train/gen_kl_error", "nemo-rl", "mismatch/k3"),
        ("train/policy_kl_error", "nemo-rl", "mismatch/k3_reverse"),
        ("train/js_divergence_error", "nemo-rl", "mismatch/js"),
        ("train/token_mult_prob_error", "nemo-rl", "mismatch/mult_prob_error"),
        ("train/sampling_importance_ratio", "nemo-rl", "mismatch/weight_mean"),
        ("train/tis", "slime", "mismatch/weight_mean"),
        ("train/train_rollout_kl", "", "mismatch/k3"),
        ("sampling/importance_sampling_ratio/max", "trl/grpo", "mismatch/is_ratio_max"),
        ("rollout_corr/rollout_is_min", "verl", "mismatch/is_ratio_min"),
        ("rollout_corr/log_ppl_abs_diff", "verl", "mismatch/log_ppl_absdiff"),
        ("rollout_corr/chi2_seq", "verl", "mismatch/seq_chi2"),
        ("training/rollout_actor_probs_pearson_corr", "verl", "mismatch/prob_corr"),
    ],
)
def test_the_same_quantity_under_a_trainers_name(name, source, expected):
    """Read in the trainers' code, whichever prefix a tracker puts before it."""
    reading = resolve(name, source)

    assert (reading.metric.name, reading.closeness) == (expected, 1)


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("rollout_corr/rollout_is_eff_sample_size", "verl", "mismatch/ess"),
        ("rollout_corr/rollout_is_oob_ratio", "verl", "mismatch/icepop_masked"),
        ("is_oob_ratio", "nemo-rl", "mismatch/icepop_masked"),
        ("is_filter_ratio", "openrlhf", "mismatch/icepop_masked"),
        ("rollout_corr/rollout_is_ratio_fraction_high", "verl", "mismatch/tis_truncated"),
        ("train/tis_clipfrac", "slime", "mismatch/tis_truncated"),
        ("rollout_corr/rollout_rs_seq_sum_k1_seq_masked_fraction", "verl", "mismatch/seq_rejected"),
    ],
)
def test_numbers_that_depend_on_a_runs_own_correction_are_proxies(name, source, expected):
    """Taken after truncation, or at thresholds we do not know; the alias says which."""
    reading = resolve(name, source)

    assert (reading.metric.name, reading.closeness) == (expected, 2)
    assert reading.alias.aggregator


def test_raw_weights_and_those_after_a_correction_are_never_merged():
    """slime logs the weight before its truncation, TRL after."""
    values, _ = canonicalise({"train/tis": 1.3, "sampling/importance_sampling_ratio/mean": 0.9})

    assert values == {"mismatch/weight_mean": 1.3, "mismatch/is_ratio": 0.9}


def test_a_mean_over_responses_does_not_stand_in_for_one_over_tokens():
    """|mean d| is at most mean |d|, and far below it where errors cancel."""
    values, _ = canonicalise({"rollout_corr/log_ppl_abs_diff": 0.01}, "verl")

    assert values == {"mismatch/log_ppl_absdiff": 0.01}


def test_every_mismatch_row_says_its_range_where_it_has_one():
    """Fractions are within [0, 1], correlations within [-1, 1], weights not below 0."""
    rows = {name: row for name, row in BY_NAME.items() if name.startswith("mismatch/")}

    assert {(r.low, r.high) for n, r in rows.items() if n.endswith(("_frac", "_rejected", "ess"))} == {(0.0, 1.0)}
    assert {(r.low, r.high) for n, r in rows.items() if n.endswith("_corr")} == {(-1.0, 1.0)}
    assert {r.low for n, r in rows.items() if "weight_" in n or "is_ratio" in n} == {0.0}
