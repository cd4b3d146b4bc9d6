"""Importance ratios of tokens and of whole responses, against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.importance import chi2, ratio_stats, response_ratio_stats, sequence_log_ratio, sequence_ratio_stats
from rlwatch.tensors.mergeable import Mean, VarianceGrowth, merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
X = torch.tensor([[0.5, -0.1, 0.2, 0.0]], dtype=D)
ZERO, ONES = torch.zeros(1, 4, dtype=D), torch.ones(1, 4)


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def test_ratios_of_the_worked_example():
    """Token mean, extremes, ESS, chi2, M2 and k1 of x = (.5, -.1, .2, 0)."""
    got = numbers(ratio_stats(X, ZERO, ONES))
    w = X.exp()

    assert got["ratio/mean"] == pytest.approx(1.1937403617, abs=1e-9)
    assert got["ratio/max"] == pytest.approx(math.exp(0.5))
    assert got["ratio/min"] == pytest.approx(math.exp(-0.1))
    assert got["ratio/ess"] == pytest.approx((w.sum() ** 2 / (4 * (w**2).sum())).item())
    assert got["ratio/chi2"] == pytest.approx((w**2).mean().item() - 1)
    assert got["ratio/m2"] == pytest.approx((0.25 + 0.01 + 0.04) / 4)
    assert got["ratio/log_absmax"] == 0.5
    assert got["policy/kl_old"] == pytest.approx(-0.15)


def test_ratios_of_the_whole_response_of_the_worked_example():
    """Geometric mean 1.162 and product 1.822; for one response the product is fully effective."""
    got = numbers(response_ratio_stats(X, ZERO, ONES))

    assert got["ratio/geo_mean"] == pytest.approx(1.1618342427, abs=1e-9)
    assert got["ratio/geo_max"] == got["ratio/geo_min"] == got["ratio/geo_mean"]
    assert got["ratio/product_ess"] == pytest.approx(1.0)
    assert sequence_log_ratio(X, ZERO, ONES).exp().item() == pytest.approx(1.8221188004, abs=1e-9)
    assert sequence_log_ratio(X, ZERO, ONES, per_token=True).exp().item() == pytest.approx(1.1618342427, abs=1e-9)


@pytest.mark.parametrize(("s", "length", "expected"), [(0.02, 1024, 0.66391576), (0.005, 32768, 0.44078414)])
def test_sequence_ess_of_lognormal_ratios_is_exp_of_minus_t_s_squared(s, length, expected):
    """iid token log-ratios with E[w] = 1: ESS = exp(-T s^2), within Monte-Carlo error."""
    x = s * math.sqrt(length) * drawn(200_000) - length * s**2 / 2

    assert numbers(sequence_ratio_stats(x, torch.ones_like(x)))["ratio/seq_ess"] == pytest.approx(expected, rel=0.02)


def test_chi2_of_lognormal_ratios_is_exp_of_t_s_squared_minus_one():
    """0.506 for s = .02 and 1024 tokens; and then ESS = 1 / (1 + chi2)."""
    x = 0.02 * math.sqrt(1024) * drawn(400_000) - 1024 * 0.02**2 / 2
    got = Mean.of(chi2(x), torch.ones_like(x)).value().item()

    assert got == pytest.approx(0.50621518, rel=0.02)
    assert 1 / (1 + got) == pytest.approx(0.66391576, rel=0.02)


def test_chi2_is_accurate_for_weights_near_one():
    """w^2 - 1 in float32 would be 0 here."""
    assert chi2(torch.tensor(1e-9)).item() == pytest.approx(2e-9)


def test_responses_without_tokens_have_no_ratio():
    """They are left out, not counted as 1 or NaN."""
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    logp, old = X.expand(2, 4), torch.zeros(2, 4, dtype=D)
    x = sequence_log_ratio(logp, old, mask, per_token=True)

    got = numbers(sequence_ratio_stats(x, mask.bool().any(1)))
    both = response_ratio_stats(logp, old, mask)

    assert x[1].isnan()
    assert got["ratio/seq_mean"] == got["ratio/seq_max"] == pytest.approx(1.1618342427, abs=1e-9)
    assert both["ratio/geo_mean"].value().item() == pytest.approx(1.1618342427, abs=1e-9)
    assert {both[name].count.item() for name in both} == {1}


def test_overflowing_ratios_are_infinite_not_clamped():
    """exp(200) is inf in float32, and so is the mean; the ESS still knows better."""
    got = numbers(ratio_stats(torch.tensor([[200.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2)))

    assert got["ratio/max"] == math.inf
    assert got["ratio/mean"] == math.inf
    assert got["ratio/chi2"] == math.inf
    assert got["ratio/ess"] == pytest.approx(0.5)


def test_a_nan_ratio_reaches_every_statistic():
    """Of tokens and of responses, the growth with length among them."""
    logp = torch.tensor([[-1.0, math.nan, -1.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])

    stats = {
        n: s for n, s in observe(TokenBatch(logp=logp, old_logp=-torch.ones(2, 3), mask=mask)).items() if "ratio/" in n
    }

    assert len(stats) == 17
    assert {name for name, stat in stats.items() if not stat.value().isnan()} == set()


def test_the_99th_percentile_of_ratios():
    """Of 101 equally spaced log-ratios the 100th."""
    x = torch.linspace(0, 1, 101, dtype=D).view(1, -1)

    got = observe(TokenBatch(logp=x - 5, old_logp=torch.full_like(x, -5.0), mask=torch.ones_like(x)))

    assert got["ratio/p99"].value().item() == pytest.approx(math.exp(0.99))


def lengths_mask(lengths, width=None):
    return torch.arange(width or max(lengths))[None] < torch.tensor(lengths)[:, None]


def test_the_variance_of_independent_tokens_grows_by_theirs_per_token():
    """s = .02: slope s^2 = 4e-4, whatever the drift common to all tokens."""
    lengths = torch.randint(10, 300, (6000,), generator=torch.Generator().manual_seed(1)).tolist()
    x = 0.02 * drawn(6000, 300)

    for drift in (0.0, -0.003):
        growth = VarianceGrowth.of(x + drift, lengths_mask(lengths, 300))
        assert growth.value().item() == pytest.approx(4e-4, rel=0.06)


def test_deviations_that_go_together_grow_faster():
    """One shift for all tokens of a response: the variance grows with the square of the length."""
    lengths = [100 + i % 200 for i in range(2000)]
    together = 0.02 * drawn(2000, 1).expand(2000, 299)

    assert VarianceGrowth.of(together, lengths_mask(lengths, 299)).value() > 50 * 4e-4


def test_growth_by_hand():
    """Lengths 1, 2, 3 and sums 1, -1, 3: m = 1/2, squares 1/4, 4, 9/4, slope 1."""
    x = torch.tensor([[1.0, 0, 0], [-2.0, 1.0, 0], [1.0, 1.0, 1.0]], dtype=D)

    growth = VarianceGrowth.of(x, lengths_mask([1, 2, 3]))

    assert growth.value().item() == pytest.approx(1.0)
    assert growth.settle().count == 3


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4], [4, 0, 0]])
def test_without_different_lengths_there_is_no_growth(lengths):
    """A slope over one length does not exist, until another micro-batch brings one."""
    flat = VarianceGrowth.of(drawn(len(lengths), 4), lengths_mask(lengths, 4))

    assert flat.settle().count == 0
    assert flat.merge(VarianceGrowth.of(drawn(1, 4), torch.tensor([[1, 1, 0, 0]]))).settle().count > 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(0, 99), st.integers(1, 5))
def test_statistics_of_responses_are_the_same_however_the_batch_is_cut(lengths, seed, size):
    """Micro-batches of any number of responses, also of none with tokens."""
    x, mask = drawn(len(lengths), 6, seed=seed) / 4, torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    pieces = [
        response_ratio_stats(a, torch.zeros_like(a), m) for a, m in zip(x.split(size), mask.split(size), strict=True)
    ]
    whole, merged = response_ratio_stats(x, torch.zeros_like(x), mask), pieces[0]
    for piece in pieces[1:]:
        merged = merge(merged, piece)

    for name, stat in whole.items():
        assert merged[name].settle().count == stat.settle().count
        if stat.settle().count > 0:
            assert merged[name].value().item() == pytest.approx(stat.value().item(), rel=1e-7, abs=1e-9), name
