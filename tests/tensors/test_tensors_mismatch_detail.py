"""Kinds of divergence, where the mismatch sits, and what it does to the gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.mismatch import (
    LogProbGap,
    Thresholds,
    advantage_stats,
    binary_kl,
    divergence_stats,
    jensen_shannon,
    reverse_kl,
    tail_stats,
)

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.1, -0.7, -2.0, -0.3], [-1.2, -0.4, -9, -9]], dtype=D)
ROLL = torch.tensor([[-0.1, -0.5, -1.0, -0.35], [-3.0, -0.5, -9, -9]], dtype=D)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
FIX = LogProbGap.of(OLD, ROLL, MASK)


def values(stats):
    return {name.removeprefix("mismatch/"): stat.value().item() for name, stat in stats.items()}


def gap(trainer, rollout):
    """One response of these probabilities."""
    logs = [torch.tensor([p], dtype=D).log() for p in (trainer, rollout)]
    return LogProbGap.of(*logs, torch.ones_like(logs[0]))


def nemo_js(trainer, rollout):
    """NeMo-RL's formula as it is written there: k3 of both against the log of their mean probability."""
    mixture = (0.5 * trainer.exp() + 0.5 * rollout.exp()).log()
    parts = [(lp - mixture).exp() - (lp - mixture) - 1 for lp in (trainer, rollout)]
    return 0.5 * parts[0] + 0.5 * parts[1]


def test_both_directions_of_a_token_the_trainer_finds_impossible():
    """-5 against -15 nats, NeMo-RL's example: 9 one way, 22,015 the other, and half the distance less ln 2 between."""
    got = values(
        divergence_stats(LogProbGap.of(torch.tensor([[-15.0]], dtype=D), torch.tensor([[-5.0]], dtype=D), MASK[:1, :1]))
    )

    assert got["k3_reverse"] == pytest.approx(22015.4658, rel=1e-8)
    assert got["js"] == pytest.approx(5 - math.log(2), rel=1e-4)
    assert got["kl_reverse"] == pytest.approx(1 - 11 * math.exp(-10))


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_jensen_shannon_is_nemos_formula(trainer, rollout):
    """log cosh(d/2), although written to be exact near 0."""
    t, r = torch.tensor(trainer, dtype=D), torch.tensor(rollout, dtype=D)

    assert jensen_shannon(t - r).item() == pytest.approx(nemo_js(t, r).item(), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("d", [1e-4, 3e-3, 0.5, 39.9, 40.1, 300.0])
def test_jensen_shannon_keeps_its_digits_in_single_precision(d):
    """From rounding noise, where the formula as written loses them all, to where exp would overflow."""
    half = d / 2
    exact = half + math.log1p(math.exp(-d)) - math.log(2) if d > 1e-2 else half**2 / 2 - half**4 / 12

    assert jensen_shannon(torch.tensor(-d)).item() == pytest.approx(exact, rel=1e-5)


def test_divergences_of_infinite_differences_are_what_they_tend_to():
    """The reverse KL of a token the trainer excludes is 1; of one the engine excluded, infinite. No NaN of ours."""
    ends = torch.tensor([-math.inf, -200.0, 200.0, math.inf])

    assert reverse_kl(ends).tolist() == [1.0, 1.0, math.inf, math.inf]
    assert jensen_shannon(ends).tolist() == [
        math.inf,
        pytest.approx(100 - math.log(2)),
        pytest.approx(100 - math.log(2)),
        math.inf,
    ]
    assert reverse_kl(torch.tensor(math.nan)).isnan()
    assert jensen_shannon(torch.tensor(math.nan)).isnan()


def test_reverse_kl_is_unbiased_under_the_engines_samples():
    """Its expectation over the engine's distribution is KL(trainer || rollout), term by term."""
    p, q = torch.tensor([0.6, 0.25, 0.15], dtype=D), torch.tensor([0.5, 0.3, 0.2], dtype=D)

    expected = (p * (p / q).log()).sum()

    assert (q * reverse_kl((p / q).log())).sum().item() == pytest.approx(expected.item(), rel=1e-12)


def test_binary_kl_is_that_of_two_coins():
    """Rollout 1/3 against trainer 1/2, by hand; 0 between equals; finite where a probability is 1."""
    third, half = torch.tensor(1 / 3, dtype=D).log(), torch.tensor(0.5, dtype=D).log()
    by_hand = math.log((1 / 3) / 0.5) / 3 + 2 / 3 * math.log((2 / 3) / 0.5)

    assert binary_kl(third, half).item() == pytest.approx(by_hand, rel=1e-12)
    assert binary_kl(half, half) == 0
    assert math.isfinite(binary_kl(torch.tensor(0.0), torch.tensor(-50.0)).item())
    assert values(divergence_stats(FIX))["binary_kl"] == pytest.approx(0.0681426861)


@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=20))
def test_divergences_are_never_negative(tokens):
    """Whatever the batch; k1, which can be, is logged elsewhere."""
    t, r = (torch.tensor([column], dtype=D) for column in zip(*tokens, strict=True))

    assert min(values(divergence_stats(LogProbGap.of(t, r, torch.ones_like(t)))).values()) >= -1e-12


def test_tails_of_the_worked_example():
    """d = (0, -.2, -1, .05, 1.8, .1): two of six beyond a factor of 2, second moment .7154."""
    got = values(tail_stats(FIX))

    assert got["logp_absdiff_p99"] == pytest.approx(1.0 + 0.8 * (0.99 * 5 - 4))
    assert got["m2"] == pytest.approx((0.04 + 1 + 0.0025 + 3.24 + 0.01) / 6)
    assert got["factor2_frac"] == pytest.approx(2 / 6)
    assert got["ess_truncated"] == pytest.approx(0.8245855675, rel=1e-7)


def test_contradictions_are_counted_only_where_both_are_sure():
    """The engine above .9 and the trainer below .5: one of four."""
    got = tail_stats(gap([0.49, 0.51, 0.49, 0.95], [0.91, 0.91, 0.89, 0.1]))

    assert values(got)["overconfident_frac"] == 0.25


def test_mean_difference_by_the_trainers_probability():
    """Low end included, high end excluded; a bucket without tokens is not measured."""
    got = tail_stats(gap([0.05, 0.1, 0.2, 0.95], [0.1, 0.1, 0.1, 0.95]))

    assert {n: s.value().item() for n, s in got.items() if "/diff_p" in n and s.count > 0} == pytest.approx(
        {"mismatch/diff_p00": math.log(0.5), "mismatch/diff_p10": math.log(2) / 2, "mismatch/diff_p90": 0.0}
    )
    assert got["mismatch/diff_p50"].count == 0


def test_a_token_without_a_probability_shows_in_every_bucket():
    """It belongs to none that could be told, and no bucket may look whole."""
    got = tail_stats(gap([math.nan, 0.2], [0.3, 0.2]))

    assert all(got[f"mismatch/diff_p{low}"].value().isnan() for low in ("00", "10", "50", "90"))


def test_growth_along_the_response_is_a_slope_per_thousand_tokens():
    """|d| grows by 1e-4 nats a token, from nothing."""
    d = torch.arange(50, dtype=D).mul(1e-4).unsqueeze(0)

    assert values(tail_stats(LogProbGap.of(d - 9, torch.full_like(d, -9), torch.ones_like(d))))["absdiff_per_1k"] == (
        pytest.approx(0.1)
    )


def test_entropy_of_masked_tokens_needs_entropy_and_masked_tokens():
    """Forks in the text or noise: 1.5 nats in the two tokens outside the band."""
    entropy = torch.tensor([[0.0, 0.0, 1.0, 0.0], [2.0, 0.0, 9.0, 9.0]])

    assert values(tail_stats(FIX, entropy=entropy))["icepop_entropy"] == 1.5
    assert tail_stats(FIX, Thresholds(token=(0.1, 9.0)), entropy)["mismatch/icepop_entropy"].count == 0
    assert "mismatch/icepop_entropy" not in tail_stats(FIX)


def test_the_bias_of_each_sign_of_advantage():
    """-(w - 1) A: a token the trainer finds less likely is worth more where A > 0, and costs less where A < 0."""
    weights = gap([0.2, 0.4, 0.8, 0.5], [0.4, 0.4, 0.4, 0.4])
    got = values(advantage_stats(weights, torch.tensor([[2.0, 2.0, -3.0, 0.0]])))

    assert got["bias_pos"] == pytest.approx((0.5 * 2 + 0.0) / 2)
    assert got["bias_neg"] == pytest.approx(3.0)


def test_both_signs_may_hide_each_other_in_a_mean():
    """Which is why there are two numbers: the mean of all tokens is 0 here."""
    got = values(advantage_stats(gap([0.2, 0.2], [0.4, 0.4]), torch.tensor([[1.0, -1.0]])))

    assert (got["bias_pos"], got["bias_neg"]) == (pytest.approx(0.5), pytest.approx(-0.5))


def test_a_mismatch_that_follows_the_advantage_is_a_correlation():
    """One advantage a response; without any spread of advantages there is no correlation."""
    d = torch.tensor([[0.1, 0.3], [-0.2, -0.4]], dtype=D)
    both = LogProbGap.of(d - 2, torch.full_like(d, -2), torch.ones_like(d))
    columns = torch.tensor([[0.1, 0.3, -0.2, -0.4], [1, 1, -1, -1]], dtype=D)

    assert values(advantage_stats(both, torch.tensor([[1.0], [-1.0]])))["adv_corr"] == pytest.approx(
        torch.corrcoef(columns)[0, 1].item()
    )
    assert advantage_stats(both, torch.full((2, 1), 0.3))["mismatch/adv_corr"].settle().count == 0


def test_an_advantage_that_is_no_number_shows_on_both_sides():
    """It has no sign, so neither side may look whole."""
    got = values(advantage_stats(FIX, torch.tensor([[1.0], [math.nan]])))

    assert [math.isnan(got[name]) for name in ("bias_pos", "bias_neg", "adv_corr")] == [True, True, True]
