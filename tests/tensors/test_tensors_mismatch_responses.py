"""The mismatch of tokens adds up over responses."""

import math

import pytest
import torch

from rlwatch.tensors.mismatch import LogProbGap, Thresholds, response_gap_stats

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.1, -0.7, -2.0, -0.3], [-1.2, -0.4, -9, -9]], dtype=D)
ROLL = torch.tensor([[-0.1, -0.5, -1.0, -0.35], [-3.0, -0.5, -9, -9]], dtype=D)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
FIX = LogProbGap.of(OLD, ROLL, MASK)


def values(stats):
    return {name.removeprefix("mismatch/"): stat.value().item() for name, stat in stats.items()}


def gap(d, mask=None):
    """Responses whose tokens differ by ``d`` (B, T) nats."""
    d = torch.as_tensor(d, dtype=D)
    return LogProbGap.of(d - 5, torch.full_like(d, -5), torch.ones_like(d) if mask is None else torch.as_tensor(mask))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppl_trainer", 2.1980665212),
        ("ppl_rollout", 3.6914215749),
        ("log_ppl_trainer", 0.7875),
        ("log_ppl_rollout", 1.11875),
        ("log_ppl_diff", -0.33125),
        ("log_ppl_diff_max", 0.2875),
        ("log_ppl_diff_min", -0.95),
        ("log_ppl_absdiff", 0.61875),
        ("ppl_ratio", 0.8599158082),
        ("seq_chi2", 21.4007216685),
        ("seq_weight_mean", (math.exp(-1.15) + math.exp(1.9)) / 2),
        ("seq_weight_max", math.exp(1.9)),
        ("seq_m2", (1.15**2 + 1.9**2) / 6),
    ],
)
def test_the_worked_example(name, expected):
    """verl's numbers, computed elsewhere in float64, and sums of d = (-1.15, 1.9) by hand."""
    assert values(response_gap_stats(FIX))[name] == pytest.approx(expected, rel=1e-7)


def test_a_positive_difference_means_the_trainer_is_the_less_confident():
    """The sign of verl's code; its documentation states the opposite."""
    assert values(response_gap_stats(gap([[-0.5, -0.5]])))["log_ppl_diff"] == 0.5


def test_every_response_counts_once_and_those_without_tokens_not_at_all():
    """verl counts an empty response as weight 1 and perplexity 1."""
    whole = values(response_gap_stats(FIX))
    mask = torch.cat([MASK, torch.zeros(1, 4)])
    more = LogProbGap.of(torch.cat([OLD, OLD[:1]]), torch.cat([ROLL, ROLL[:1]]), mask)

    assert values(response_gap_stats(more)) == pytest.approx(whole, nan_ok=True)
    assert response_gap_stats(more)["mismatch/ppl_trainer"].count == 2


def test_a_response_is_summed_over_what_the_engine_scored():
    """One token without a number does not lose the response; none with one does."""
    d = torch.tensor([[0.2, math.nan], [math.nan, math.nan]], dtype=D)
    some = LogProbGap.of(torch.full_like(d, -5), -5 - d, torch.ones_like(d))

    got = response_gap_stats(some)

    assert values(got)["seq_weight_mean"] == pytest.approx(math.exp(0.2))
    assert got["mismatch/seq_weight_mean"].count == 1


def test_sequence_rejection_looks_at_products_and_geometric_rejection_at_means():
    """0.01 nats a token: over 100 tokens the product leaves [.5, 2], over 50 it does not; the mean is past 1.001."""
    mask = [[1] * 100, [1] * 50 + [0] * 50]
    got = values(response_gap_stats(gap(torch.full((2, 100), 0.01), mask)))
    wide = values(response_gap_stats(gap(torch.full((2, 100), 0.01), mask), Thresholds(geometric=(0.9, 1.1))))

    assert (got["seq_rejected"], got["geo_rejected"]) == (0.5, 1.0)
    assert wide["geo_rejected"] == 0.0


def test_one_response_can_hold_all_the_weight():
    """The effective sample size of n responses falls to 1/n."""
    assert values(response_gap_stats(gap([[50.0], [0.0], [0.0], [0.0]])))["seq_ess"] == pytest.approx(0.25)
    assert values(response_gap_stats(gap([[0.1], [0.1], [0.1], [0.1]])))["seq_ess"] == pytest.approx(1.0)


def test_errors_of_independent_tokens_do_not_compound_but_a_drift_does():
    """Per token of a response the squared log-weight is s^2 in the one case and n s^2 in the other."""
    g = torch.Generator().manual_seed(0)
    noise = 0.02 * torch.randn(400, 64, generator=g, dtype=D)
    drift = torch.full((4, 64), 0.02, dtype=D)

    independent, compounding = (values(response_gap_stats(gap(d)))["seq_m2"] for d in (noise, drift))

    assert independent == pytest.approx(0.02**2, rel=0.15)
    assert compounding == pytest.approx(64 * 0.02**2)


def test_the_variance_grows_with_length_by_that_of_a_token():
    """Independent tokens of .02 nats in responses of 16 to 512 tokens; not measured where all are equally long."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([16, 64, 128, 256, 384, 512]).repeat(300)
    mask = torch.arange(512) < lengths.unsqueeze(1)
    got = response_gap_stats(gap(0.02 * torch.randn(1800, 512, generator=g, dtype=D), mask))["mismatch/log_var_growth"]

    assert got.value().item() == pytest.approx(0.02**2, rel=0.2)
    assert response_gap_stats(gap(torch.ones(3, 4)))["mismatch/log_var_growth"].settle().count == 0


def test_a_nan_of_the_trainer_is_hidden_by_no_statistic_of_responses():
    """Also not by the shares that rejection would drop; the engine's own perplexity stays what it is."""
    old = OLD.clone()
    old[0, 0] = math.nan
    got = response_gap_stats(LogProbGap.of(old, ROLL, MASK))

    numbers = {name for name, stat in got.items() if stat.settle().count > 0 and not stat.value().isnan()}
    assert numbers == {"mismatch/ppl_rollout", "mismatch/log_ppl_rollout"}
