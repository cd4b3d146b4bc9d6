"""What verl reports of its rollout correction, by its worked example; tests/verl compares with verl itself."""

import math

import pytest
import torch

from rlwatch.metrics import resolve
from rlwatch.tensors.correction import correction_report
from rlwatch.tensors.correction.thresholds import OPTIONS, Rule, rules, weight_bounds

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.1, -0.7, -2.0, -0.3], [-1.2, -0.4, -9, -9]], dtype=D)
ROLL = torch.tensor([[-0.1, -0.5, -1.0, -0.35], [-3.0, -0.5, -9, -9]], dtype=D)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=D)
EVERYTHING = {
    "rollout_is": "token",
    "rollout_is_batch_normalize": True,
    "rollout_rs": ",".join(OPTIONS),
    "rollout_rs_threshold": ",".join("0.5_2" if option.endswith("k1") else "0.3" for option in OPTIONS),
}


def report(old=OLD, roll=ROLL, mask=MASK, **settings):
    got = correction_report(old, roll, mask, **settings)
    return {name.removeprefix("rollout_corr/"): value.item() for name, value in got.items()}


def check(got, expected, **tolerance):
    assert {name: got[name] for name in expected} == pytest.approx(expected, **(tolerance or {"abs": 1e-9}))


def test_off_policy_metrics_of_the_worked_example():
    """Perplexities, KL and chi2 with verl's 1e-8 beside the number of tokens."""
    expected = {
        "training_ppl": 2.1980665212,
        "training_log_ppl": 0.7875,
        "rollout_ppl": 3.6914215749,
        "rollout_log_ppl": 1.11875,
        "kl": -0.125,
        "k3_kl": 0.6071166112,
        "log_ppl_diff": -0.33125,
        "log_ppl_diff_max": 0.2875,
        "log_ppl_diff_min": -0.95,
        "log_ppl_abs_diff": 0.61875,
        "ppl_ratio": 0.8599158082,
        "chi2_token": 5.7884105636,
        "chi2_seq": 21.4007216685,
    }

    check(report(), expected, abs=6e-9)
    assert set(report()) == set(expected)


def test_token_truncation_of_the_worked_example():
    """Truncated at 2: an ESS of .82 where that of the raw weights is .44."""
    got = report(rollout_is="token", rollout_is_threshold=2.0)

    check(
        got,
        {
            "rollout_is_mean": 1.0571753664,
            "rollout_is_max": 2.0,
            "rollout_is_min": 0.3678794412,
            "rollout_is_eff_sample_size": 0.8245855675,
            "rollout_is_seq_mean": 1.1810278860,
            "rollout_is_seq_std": 0.5254617481,
            "rollout_is_seq_max_deviation": 0.5525854513,
            "rollout_is_seq_fraction_high": 0.5,
            "rollout_is_seq_fraction_low": 0.0,
        },
    )
    check(got, {"rollout_is_ratio_fraction_high": 1 / 6, "rollout_is_ratio_fraction_low": 1 / 6}, abs=1e-7)
    check(got, {"rollout_is_std": 0.4875979421}, abs=2e-8)
    assert "rollout_is_oob_ratio" not in got


def test_raw_weights_show_what_truncation_hides():
    """The same five numbers before anything is cut."""
    w = (OLD - ROLL).exp()[MASK.bool()]

    got = report(rollout_is="token")

    assert got["rollout_is_raw_mean"] == pytest.approx(w.mean().item(), rel=1e-8)
    assert got["rollout_is_raw_std"] == pytest.approx(w.std(correction=0).item(), rel=1e-8)
    assert (got["rollout_is_raw_max"], got["rollout_is_raw_min"]) == (math.exp(1.8), math.exp(-1))
    assert got["rollout_is_raw_eff_sample_size"] == pytest.approx((w.sum() ** 2 / (6 * (w**2).sum())).item())
    assert got["rollout_is_raw_eff_sample_size"] < 0.5 < got["rollout_is_eff_sample_size"]


def test_icepop_of_the_worked_example():
    """Two of six tokens zeroed."""
    got = report(rollout_is="token", rollout_is_threshold="0.5_5")

    check(
        got,
        {
            "rollout_is_mean": 0.6625287935,
            "rollout_is_eff_sample_size": 0.6589283278,
            "rollout_is_seq_mean": 0.6350429584,
        },
    )
    assert got["rollout_is_oob_ratio"] == pytest.approx(1 / 3)


def test_sequence_truncation_of_the_worked_example():
    """Sums of d are (-1.15, 1.9). verl's mean counts a response once a token."""
    got = report(rollout_is="sequence")

    check(
        got,
        {
            "rollout_is_mean": 0.8777578448,
            "rollout_is_seq_mean": 1.1583183794,
            "rollout_is_eff_sample_size": 0.5502599277,
            "rollout_is_max": math.exp(1.9),
            "rollout_is_min": math.exp(-1.15),
        },
    )
    assert got["rollout_is_raw_max"] == pytest.approx(math.exp(1.9))


def test_rejection_of_the_worked_example():
    """Two of six tokens by k1; both responses by its sum; its means are (.2875, -.95)."""
    tokens = report(rollout_rs="token_k1", rollout_rs_threshold="0.5_2")
    sums = report(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2")
    means = report(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2")

    assert tokens["rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert sums["rollout_rs_seq_masked_fraction"] == sums["rollout_rs_seq_sum_k1_seq_masked_fraction"] == 1.0
    assert (means["rollout_rs_seq_mean_k1_max"], means["rollout_rs_seq_mean_k1_min"]) == pytest.approx((0.2875, -0.95))


D1, D2 = [0.0, -0.2, -1.0, 0.05], [1.8, 0.1]
"""Log-ratios of the two responses of the worked example."""
PER_TOKEN = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
}
OVER = {
    "seq_sum": sum,
    "seq_mean": lambda x: sum(x) / len(x),
    "seq_max": max,
}


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.startswith("seq")])
def test_statistics_of_whole_responses_by_hand(option):
    """Each response's sum, mean or largest divergence; means over tokens count the longer one twice as often."""
    level, _, estimator = option.rpartition("_")
    first, second = (OVER[level]([PER_TOKEN[estimator](d) for d in row]) for row in (D1, D2))
    got = report(rollout_rs=option, rollout_rs_threshold="0.5_2" if estimator == "k1" else 0.8)
    high, low = (math.log(2), -math.log(2)) if estimator == "k1" else (0.8, 0.0)
    cut = [min(max(x, low), high) for x in (first, second)]
    mean = (4 * cut[0] + 2 * cut[1]) / 6
    outside = [not low <= x <= high for x in (first, second)]

    expected = {
        "mean": (4 * first + 2 * second) / 6,
        "max": max(first, second),
        "min": min(first, second),
        "std": math.sqrt((4 * cut[0] ** 2 + 2 * cut[1] ** 2) / 6 - mean**2),
        "fraction_high": sum(x > high for x in (first, second)) / 2,
        "fraction_low": sum(x < low for x in (first, second)) / 2,
        "seq_mean": (first + second) / 2,
        "seq_std": abs(first - second) / math.sqrt(2),
        "seq_max": max(first, second),
        "seq_min": min(first, second),
        "seq_max_deviation": max(abs(first), abs(second)),
        "seq_fraction_high": sum(x > high for x in (first, second)) / 2,
        "masked_fraction": (4 * outside[0] + 2 * outside[1]) / 6,
        "seq_masked_fraction": sum(outside) / 2,
    }
    check(got, {f"rollout_rs_{option}_{name}": value for name, value in expected.items()}, abs=2e-7)


@pytest.mark.parametrize("option", ["token_k1", "token_k2", "token_k3"])
def test_statistics_of_tokens_by_hand(option):
    """Of six tokens, and of the mean of each response."""
    values = [PER_TOKEN[option[-2:]](d) for d in D1 + D2]
    means = sum(values[:4]) / 4, sum(values[4:]) / 2
    got = report(rollout_rs=option, rollout_rs_threshold="0.9_1.6" if option == "token_k1" else 0.3)
    high, low = (math.log(1.6), math.log(0.9)) if option == "token_k1" else (0.3, 0.0)
    outside = [not low <= x <= high for x in values]

    expected = {
        "mean": sum(values) / 6,
        "max": max(values),
        "min": min(values),
        "fraction_high": sum(x > high for x in values) / 6,
        "fraction_low": sum(x < low for x in values) / 6,
        "seq_mean": sum(means) / 2,
        "seq_std": abs(means[0] - means[1]) / math.sqrt(2),
        "seq_max": max(means),
        "seq_min": min(means),
        "seq_max_deviation": max(abs(x) for x in means),
        "seq_fraction_high": sum(x > high for x in means) / 2,
        "masked_fraction": sum(outside) / 6,
        "seq_masked_fraction": (any(outside[:4]) + any(outside[4:])) / 2,
    }
    check(got, {f"rollout_rs_{option}_{name}": value for name, value in expected.items()}, abs=2e-7)
    assert ("rollout_rs_token_k1_seq_fraction_low" in got) == (option == "token_k1")


def test_a_response_without_a_token_is_no_response_to_a_rule_but_counts_in_the_total():
    """As in verl: its share of responses that lost a token is of all rows, its statistics of those with tokens."""
    old, roll, mask = (torch.cat([x, torch.zeros(2, 4, dtype=D)]) for x in (OLD, ROLL, MASK))
    got = report(old, roll, mask, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2")

    assert got["rollout_rs_seq_sum_k1_seq_masked_fraction"] == 1.0
    assert got["rollout_rs_seq_masked_fraction"] == 0.5
    assert got["rollout_rs_seq_sum_k1_seq_min"] == pytest.approx(-1.9)


def test_log_ratios_are_clamped_for_weights_and_rules_but_not_for_kl():
    """A token 50 nats apart: verl's safety bound is 20."""
    old, roll, one = torch.tensor([[-1.0]], dtype=D), torch.tensor([[-51.0]], dtype=D), torch.ones(1, 1)
    got = report(
        old, roll, one, rollout_is="token", rollout_is_threshold="1e30", rollout_rs="token_k2", rollout_rs_threshold=1
    )

    assert got["kl"] == -50
    assert (got["chi2_token"], got["chi2_seq"]) == pytest.approx((math.exp(40), math.exp(40)))
    assert got["rollout_is_max"] == pytest.approx(math.exp(20))
    assert got["rollout_is_raw_max"] == pytest.approx(math.exp(50))
    assert got["rollout_rs_token_k2_max"] == pytest.approx(200)


def test_k1_bounds_apply_to_the_reciprocal_of_the_weight():
    """A weight of 3 passes [.2, 2] although it is above 2: its reciprocal is within. verl's own quirk."""
    old, roll, one = torch.tensor([[math.log(3)]], dtype=D) - 5, torch.tensor([[-5.0]], dtype=D), torch.ones(1, 1)

    assert (
        report(old, roll, one, rollout_rs="token_k1", rollout_rs_threshold="0.2_2")["rollout_rs_masked_fraction"] == 0
    )
    assert (
        report(old, roll, one, rollout_rs="token_k1", rollout_rs_threshold="0.5_5")["rollout_rs_masked_fraction"] == 1
    )


def test_all_rules_must_pass():
    """The total counts a token that any of them rejects."""
    got = report(rollout_rs="token_k1,token_k2", rollout_rs_threshold="0.5_2,1.7")

    assert got["rollout_rs_token_k1_masked_fraction"] == pytest.approx(2 / 6)
    assert got["rollout_rs_token_k2_masked_fraction"] == 0.0
    assert got["rollout_rs_masked_fraction"] == pytest.approx(2 / 6)
    assert got["rollout_rs_seq_masked_fraction"] == 1.0


def test_a_weight_at_its_bound_is_not_beyond_it():
    """Equal engines at bounds of exactly 1: nothing is high, low, out of bounds or rejected, at any level."""
    for level in ("token", "sequence"):
        weights = report(
            OLD,
            OLD,
            MASK.long(),
            rollout_is=level,
            rollout_is_threshold="1_1",
            rollout_rs="token_k1",
            rollout_rs_threshold="1_1",
        )
        names = [n for n in weights if "fraction" in n or n == "rollout_is_oob_ratio"]
        assert len(names) == 13
        assert {weights[n] for n in names} == {0.0}


def test_the_normalisation_is_by_the_mean_of_tokens_or_of_responses_that_have_any():
    """As verl divides its weights: an empty response is no weight of 1 here, nor of 0."""
    old, roll, mask = (torch.cat([x, torch.zeros(2, 4, dtype=D)]) for x in (OLD, ROLL, MASK))
    tokens, responses = (
        report(old, roll, mask, rollout_is=level, rollout_is_batch_normalize=True) for level in ("token", "sequence")
    )

    assert tokens["rollout_is_batch_norm_factor"] == tokens["rollout_is_mean"]
    assert responses["rollout_is_batch_norm_factor"] == pytest.approx((math.exp(-1.15) + 2) / 2)


def test_weights_that_are_all_zeroed_are_no_effective_sample():
    """verl divides by zero there; its normalisation falls back to 1."""
    got = report(rollout_is="token", rollout_is_threshold="10_20", rollout_is_batch_normalize=True)

    assert (got["rollout_is_eff_sample_size"], got["rollout_is_batch_norm_factor"]) == (0.0, 1.0)


def test_a_batch_without_a_token_has_no_numbers():
    """verl refuses it; here nothing can be told without waiting for the device, so every number is NaN."""
    for shape in ((2, 4), (0, 4), (2, 0)):
        empty = torch.zeros(shape, dtype=D)
        assert {math.isnan(v) for v in report(empty, empty, torch.zeros(shape), **EVERYTHING).values()} == {True}


def test_a_nan_shows_where_it_shows_in_verl():
    """Means are NaN; a rule, which compares, rejects the token and says nothing."""
    old = OLD.clone()
    old[0, 0] = math.nan
    got = report(old, rollout_rs="token_k1", rollout_rs_threshold="0.5_2")

    assert math.isnan(got["kl"])
    assert got["rollout_rs_masked_fraction"] == pytest.approx(3 / 6)
    assert got["rollout_ppl"] == report()["rollout_ppl"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype):
    """The report of bf16 log-probs is that of their float32 values."""
    old, roll = OLD.to(dtype), ROLL.to(dtype)

    assert report(old, roll, **EVERYTHING) == report(old.float(), roll.float(), **EVERYTHING)


def test_the_padding_may_hold_anything():
    """NaN and infinities outside the mask, and a mask of any type."""
    old, roll = OLD.clone(), ROLL.clone()
    old[1, 2:], roll[1, 2:] = math.nan, math.inf
    clean = report(mask=MASK.bool(), **EVERYTHING)

    assert report(old, roll, MASK.bool(), **EVERYTHING) == pytest.approx(clean, rel=1e-12)
    assert report(old, roll, MASK.long(), **EVERYTHING) == pytest.approx(clean, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is": "geometric"}, "rollout_is must be one of token, sequence, got 'geometric'"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, "above 0 and not reversed, got 0.0"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "above 0 and not reversed, got '5_0.5'"),
        ({"rollout_is": "token", "rollout_is_threshold": "much"}, "must be a number or .low_high., got 'much'"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, "must be a number or .low_high., got True"),
        ({"rollout_rs": "token_k1"}, "rollout_rs needs a rollout_rs_threshold"),
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": 1}, "rollout_rs must name one or more of token_k1"),
        ({"rollout_rs": " , ", "rollout_rs_threshold": 1}, "rollout_rs must name"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_2"}, "threshold of token_k2 is one upper bound"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "needs 1 or 2 values"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0"}, "threshold of token_k1 must be above 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "_2"}, "must be a number or .low_high., got '_2'"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(settings, message):
    """With the value and what would do."""
    with pytest.raises(ValueError, match=message):
        report(**settings)


def test_shapes_must_agree():
    """The message names all three."""
    with pytest.raises(ValueError, match=r"same shape, got \(2, 4\), \(2, 4\), \(2, 3\)"):
        report(mask=MASK[:, :3])


def test_thresholds_read_as_in_verl():
    """A single k1 bound has its reciprocal below; a repeated option counts once."""
    assert weight_bounds(" 3 ") == (None, 3.0)
    assert weight_bounds("0.5_5") == (0.5, 5.0)
    assert rules("token_k1, token_k1,seq_max_k3", "4") == [Rule("token_k1", 0.25, 4.0), Rule("seq_max_k3", None, 4.0)]


def test_most_of_the_report_reads_canonically():
    """A verl log and our own stream meet under the same names."""
    got = {name: resolve(f"rollout_corr/{name}", "verl") for name in report()}

    assert {name for name, reading in got.items() if reading is None} == set()
    assert {reading.closeness for reading in got.values()} == {1}
