"""Entropy, KL and importance ratios against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.entropy import entropy_stats, token_entropy
from rlwatch.tensors.importance import clip_stats, ratio_stats, sequence_log_ratio, sequence_ratio_stats
from rlwatch.tensors.kl import k1, k2, k3, kl_ref_stats

pytestmark = pytest.mark.torch
D = torch.float64


def _values(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def test_entropy_of_known_distributions():
    """H(.5, .3, .2) and the softmax of (2, 1, 0)."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=D)

    assert token_entropy(p.log()).item() == pytest.approx(1.0296530140645737, abs=1e-14)
    assert token_entropy(torch.tensor([2.0, 1.0, 0.0], dtype=D)).item() == pytest.approx(0.8323955818399387, abs=1e-14)
    assert token_entropy(torch.zeros(151936, dtype=D)).item() == pytest.approx(math.log(151936), abs=1e-9)


@given(st.integers(2, 40), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_entropy_is_within_its_range_and_independent_of_the_chunk(vocabulary, rows, chunk, seed):
    """0 <= H <= ln V, shift-invariant, and chunking changes no bit of it."""
    logits = 30 * torch.randn(rows, vocabulary, dtype=D, generator=torch.Generator().manual_seed(seed))
    h = token_entropy(logits, chunk=chunk)

    assert torch.equal(h, token_entropy(logits))
    assert (h >= 0).all()
    assert (h <= math.log(vocabulary) + 1e-12).all()
    torch.testing.assert_close(h, token_entropy(logits + 1000.0), rtol=1e-9, atol=1e-9)


def test_entropy_of_bf16_logits_is_computed_in_float32():
    """The result of half-precision logits is that of their widened values."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    assert torch.equal(token_entropy(logits), token_entropy(logits.float()))


def test_impossible_tokens_add_nothing_and_nan_logits_show():
    """-inf is a forbidden token; NaN is NaN, in its own row only."""
    h = token_entropy(torch.tensor([[0.0, 0.0, -math.inf], [math.nan, 0.0, 0.0]], dtype=D))

    assert h[0].item() == pytest.approx(math.log(2))
    assert h[1].isnan()


def test_entropy_needs_at_least_one_row_per_chunk():
    """The message names the value."""
    with pytest.raises(ValueError, match="at least 1 row, got 0"):
        token_entropy(torch.zeros(1, 3), chunk=0)


def test_entropy_percentiles_skip_padding():
    """p10 and p90 are over the masked tokens."""
    h = torch.cat([torch.linspace(0, 1, 11, dtype=D), torch.full((5,), 99.0, dtype=D)]).view(1, -1)
    mask = torch.cat([torch.ones(11), torch.zeros(5)]).view(1, -1)

    got = _values(entropy_stats(h, mask))

    assert got["policy/entropy_p10"] == pytest.approx(0.1)
    assert got["policy/entropy_p90"] == pytest.approx(0.9)
    assert got["policy/entropy"] == pytest.approx(0.5)


P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=D), torch.tensor([0.4, 0.4, 0.2], dtype=D)


@pytest.mark.parametrize(
    ("estimator", "mean", "variance"),
    [
        (k1, 0.02526715392157057, 0.0490863856),
        (k2, 0.02486240734, 0.000205482532),
        (k3, 0.02526715392157057, 0.000254594202),
    ],
)
def test_kl_estimators_have_the_expectation_and_variance_of_the_table(estimator, mean, variance):
    """E and Var under p = (.5, .3, .2) against q = (.4, .4, .2)."""
    k = estimator(P.log() - Q.log())

    assert (P * k).sum().item() == pytest.approx(mean, abs=1e-11)
    assert ((P * k**2).sum() - (P * k).sum() ** 2).item() == pytest.approx(variance, abs=1e-10)


@given(st.floats(-80, 80))
def test_k2_and_k3_are_never_negative(x):
    """Only k1 may be."""
    x = torch.tensor(x, dtype=D)

    assert k2(x) >= 0
    assert k3(x) >= 0


def test_k3_is_accurate_for_tiny_ratios_in_float32():
    """exp(-x) - 1 + x would lose everything to cancellation here."""
    assert k3(torch.tensor(1e-3)).item() == pytest.approx(5e-7, rel=0.1)


def test_kl_to_an_equal_reference_is_exactly_zero():
    """After a reset k1 = k2 = k3 = 0."""
    logp = torch.randn(3, 5)

    assert set(_values(kl_ref_stats(logp, logp, torch.ones(3, 5))).values()) == {0.0}


X = torch.tensor([[0.5, -0.1, 0.2, 0.0]], dtype=D)
ZERO, ONES = torch.zeros(1, 4, dtype=D), torch.ones(1, 4)


def test_ratios_of_the_worked_example():
    """Token mean, extremes, ESS, k1, sequence product and geometric mean of x = (.5, -.1, .2, 0)."""
    got = _values(ratio_stats(X, ZERO, ONES))
    w = X.exp()

    assert got["ratio/mean"] == pytest.approx(1.1937403617, abs=1e-9)
    assert got["ratio/max"] == pytest.approx(math.exp(0.5))
    assert got["ratio/min"] == pytest.approx(math.exp(-0.1))
    assert got["ratio/ess"] == pytest.approx((w.sum() ** 2 / (4 * (w**2).sum())).item())
    assert got["policy/kl_old"] == pytest.approx(-0.15)
    assert sequence_log_ratio(X, ZERO, ONES, per_token=True).exp().item() == pytest.approx(1.1618342427, abs=1e-9)
    assert sequence_log_ratio(X, ZERO, ONES).exp().item() == pytest.approx(1.8221188004, abs=1e-9)


@pytest.mark.parametrize(("s", "length", "expected"), [(0.02, 1024, 0.66391576), (0.005, 32768, 0.44078414)])
def test_sequence_ess_of_lognormal_ratios_is_exp_of_minus_t_s_squared(s, length, expected):
    """iid token log-ratios with E[w] = 1: ESS = exp(-T s^2), within Monte-Carlo error."""
    z = torch.randn(200_000, dtype=D, generator=torch.Generator().manual_seed(0))
    x = s * math.sqrt(length) * z - length * s**2 / 2

    assert _values(sequence_ratio_stats(x, torch.ones_like(x)))["ratio/seq_ess"] == pytest.approx(expected, rel=0.02)


def test_responses_without_tokens_have_no_ratio():
    """They are left out, not counted as 1 or NaN."""
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    x = sequence_log_ratio(X.expand(2, 4), torch.zeros(2, 4, dtype=D), mask, per_token=True)

    got = _values(sequence_ratio_stats(x, mask.bool().any(1)))

    assert x[1].isnan()
    assert got["ratio/seq_mean"] == got["ratio/seq_max"] == pytest.approx(1.1618342427, abs=1e-9)


def test_clip_fractions_follow_the_sign_of_the_advantage():
    """Low counts only negative, high only positive advantages; TRL's convention."""
    logp = torch.tensor([[-0.5, 0.5], [-0.5, 0.5]], dtype=D)
    advantages = torch.tensor([[-1.0], [2.0]], dtype=D)

    got = _values(clip_stats(logp, torch.zeros(2, 2, dtype=D), advantages, torch.ones(2, 2), low=0.2, high=0.28))

    assert got == {"ratio/clipfrac_low": 0.25, "ratio/clipfrac_high": 0.25}


def test_a_nan_ratio_does_not_pass_for_unclipped():
    """NaN compares false; the fraction must say NaN, not a reassuring 0."""
    logp = torch.tensor([[math.nan, 0.0]])

    got = _values(clip_stats(logp, torch.zeros(1, 2), torch.ones(1, 1), torch.ones(1, 2), low=0.2, high=0.2))

    assert math.isnan(got["ratio/clipfrac_low"])
    assert math.isnan(got["ratio/clipfrac_high"])


def test_overflowing_ratios_are_infinite_not_clamped():
    """exp(200) is inf in float32, and so is the mean; the ESS still knows better."""
    got = _values(ratio_stats(torch.tensor([[200.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2)))

    assert got["ratio/max"] == math.inf
    assert got["ratio/mean"] == math.inf
    assert got["ratio/ess"] == pytest.approx(0.5)
