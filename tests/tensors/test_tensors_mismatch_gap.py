"""How far rollout engine and trainer lie apart: worked numbers, thresholds, what could not be scored."""

import math

import pytest
import torch

from rlwatch.errors import ConfigError
from rlwatch.tensors.mismatch import LogProbGap, Thresholds, gap_stats, observe_mismatch
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.1, -0.7, -2.0, -0.3], [-1.2, -0.4, -9, -9]], dtype=D)
ROLL = torch.tensor([[-0.1, -0.5, -1.0, -0.35], [-3.0, -0.5, -9, -9]], dtype=D)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def values(stats):
    return {name.removeprefix("mismatch/"): stat.value().item() for name, stat in stats.items()}


def pair(*d):
    """One response whose tokens differ by ``d`` nats."""
    d = torch.tensor([d], dtype=D)
    return LogProbGap.of(d - 5, torch.full_like(d, -5), torch.ones_like(d))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl", -0.125),
        ("k3", 0.6071166112),
        ("logp_absdiff", 0.525),
        ("logp_absdiff_max", 1.8),
        ("mult_prob_error", 2.1909623442),
        ("chi2", 5.7884105636),
        ("weight_max", math.exp(1.8)),
        ("weight_min", math.exp(-1)),
        ("prob_absdiff", 0.1156360291),
        ("prob_absdiff_max", 0.2514071435),
        ("prob_absdiff_std", 0.1044170899),
        ("prob_corr", 0.8422705688),
        ("tis_truncated", 1 / 6),
        ("icepop_masked", 1 / 3),
    ],
)
def test_the_worked_example(name, expected):
    """Two responses of 4 and 2 tokens: verl's and NeMo-RL's formulas, computed elsewhere in float64."""
    assert values(gap_stats(LogProbGap.of(OLD, ROLL, MASK)))[name] == pytest.approx(expected, rel=1e-7)


def test_the_effective_sample_size_is_of_raw_weights():
    """Truncated at 2 the same weights look like .825; the largest of them is worth more than all others."""
    w = (OLD - ROLL).exp()[MASK.bool()]

    got = values(gap_stats(LogProbGap.of(OLD, ROLL, MASK)))

    assert got["ess"] == pytest.approx((w.sum() ** 2 / (6 * (w**2).sum())).item())
    assert got["ess"] < 0.5 < 0.8245855675
    assert got["weight_mean"] == pytest.approx(w.mean().item())


def test_chi2_of_a_sample_may_be_negative_and_is_exact_near_0():
    """It is <w^2> - 1, and a batch whose weights are all small says so; a rounding of 1e-4 nats does not drown."""
    assert values(gap_stats(pair(-0.1, -0.2)))["chi2"] == pytest.approx((math.exp(-0.2) + math.exp(-0.4)) / 2 - 1)
    tiny = torch.tensor([[-1.0]]), torch.tensor([[-1.0001]])
    exact = math.expm1(2 * (tiny[0].item() - tiny[1].item()))
    assert values(gap_stats(LogProbGap.of(*tiny, torch.ones(1, 1))))["chi2"] == pytest.approx(exact, rel=1e-5)


def test_equal_engines_have_no_mismatch():
    """All differences 0, every weight 1, nothing to truncate or mask."""
    got = values(gap_stats(LogProbGap.of(OLD, OLD, MASK)))

    ones = {"ess", "weight_mean", "weight_max", "weight_min", "mult_prob_error", "prob_corr"}
    assert {name: got.pop(name) for name in ones} == pytest.approx(dict.fromkeys(ones, 1.0))
    assert set(got.values()) == {0.0}


def test_tokens_the_engine_could_not_score_are_left_out():
    """NaN from the sampler leaves the statistics of the others, token by token."""
    roll, fewer = ROLL.clone(), MASK.clone()
    roll[0, 0], fewer[0, 0] = math.nan, 0

    assert values(gap_stats(LogProbGap.of(OLD, roll, MASK))) == values(gap_stats(LogProbGap.of(OLD, ROLL, fewer)))
    assert gap_stats(LogProbGap.of(OLD, roll, MASK))["mismatch/kl"].count == 5


def test_tokens_the_engine_could_not_score_are_counted():
    """Inside the mask only: the count is what tells a broken engine from a short response."""
    roll = ROLL.masked_fill(ROLL == -9, math.nan)
    roll[0, 0] = math.nan

    assert values(observe_mismatch(TokenBatch(logp=OLD, rollout_logp=roll, mask=MASK)))["nonfinite/rollout_logp"] == 1


def test_a_nan_of_the_trainer_is_hidden_by_nothing():
    """Not by a comparison either: no share of tokens stays a reassuring number."""
    old = OLD.clone()
    old[0, 0] = math.nan

    got = gap_stats(LogProbGap.of(old, ROLL, MASK))

    assert {name for name, stat in got.items() if not stat.value().isnan()} == set()
    assert {name for name, stat in got.items() if stat.settle().count <= 0} == set()


def test_a_token_that_only_one_of_both_thinks_possible_makes_infinities():
    """Never a NaN, never a clamp: KL to an impossible token is infinite, and its weight is 0."""
    gone, new = pair(-math.inf, 0.0), pair(math.inf, 0.0)

    assert values(gap_stats(gone))["kl"] == math.inf
    assert values(gap_stats(gone))["weight_min"] == 0.0
    assert values(gap_stats(gone))["icepop_masked"] == 0.5
    assert values(gap_stats(new))["k3"] == math.inf
    assert values(gap_stats(new))["weight_max"] == math.inf
    assert values(gap_stats(new))["tis_truncated"] == 0.5


def test_icepop_masks_fewer_tokens_while_the_gap_widens():
    """KPop's warning: the two are logged side by side because one alone misleads."""
    before = values(gap_stats(pair(0.0, 0.0, 0.0, 2.0)))
    after = values(gap_stats(pair(0.6, -0.6, 0.6, -0.6)))

    assert (before["icepop_masked"], after["icepop_masked"]) == (0.25, 0.0)
    assert after["logp_absdiff"] > before["logp_absdiff"]


@pytest.mark.parametrize(("d", "outside"), [(0.49, 1.0), (0.5, 0.0), (1.0, 0.0), (5.0, 0.0), (5.01, 1.0)])
def test_the_band_of_icepop_includes_its_ends(d, outside):
    """M(k) = k where alpha <= k <= beta (Ring-1T)."""
    weight = torch.tensor([[d]], dtype=D)
    gap = LogProbGap(weight.log(), torch.zeros(1, 1, dtype=D), torch.ones(1, 1).bool(), weight.log(), weight)

    assert values(gap_stats(gap))["icepop_masked"] == outside


def test_a_weight_at_the_cap_is_not_truncated():
    """Truncation changes only what is above."""
    d = torch.tensor([[math.log(2), math.log(2) + 1e-12]], dtype=D)
    gap = LogProbGap(d, torch.zeros_like(d), torch.ones_like(d).bool(), d, d.exp())

    assert values(gap_stats(gap))["tis_truncated"] == 0.5


def test_thresholds_are_parameters():
    """A cap of 1.1 truncates two tokens of six, a band of [.3, 7] masks none."""
    got = values(gap_stats(LogProbGap.of(OLD, ROLL, MASK), Thresholds(cap=1.1, token=(0.3, 7.0))))

    assert (got["tis_truncated"], got["icepop_masked"]) == (pytest.approx(2 / 6), 0.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"cap": 0.0}, "cap must be above 0, got 0.0"),
        ({"cap": math.nan}, "cap must be above 0, got nan"),
        ({"token": (5.0, 0.5)}, r"token must be .* got \(5.0, 0.5\)"),
        ({"sequence": (0.0, 2.0)}, "sequence must be"),
        ({"geometric": (0.9, math.nan)}, "geometric must be"),
    ],
)
def test_thresholds_that_cannot_be_are_refused(setting, message):
    """Once, when they are set, with the value."""
    with pytest.raises(ConfigError, match=message):
        Thresholds(**setting)


def test_the_cap_of_the_runs_own_loss_is_used_where_it_has_one():
    """And then the mean weight that multiplies the loss is known too."""
    batch = TokenBatch(logp=OLD + 1, old_logp=OLD, rollout_logp=ROLL, mask=MASK)
    capped = TokenBatch(logp=OLD + 1, old_logp=OLD, rollout_logp=ROLL, mask=MASK, truncation=1.1)

    assert "is_ratio" not in values(observe_mismatch(batch))
    assert values(observe_mismatch(capped))["is_ratio"] == pytest.approx(
        (OLD - ROLL).exp().clamp(max=1.1)[MASK.bool()].mean()
    )
    assert values(observe_mismatch(capped))["tis_truncated"] == pytest.approx(2 / 6)
    assert values(observe_mismatch(TokenBatch(logp=OLD, rollout_logp=ROLL, mask=MASK, truncation=2.0)))["is_ratio"] == (
        pytest.approx(1.0571753664)
    )


def test_without_an_engine_there_is_no_mismatch():
    """Not 0: nothing."""
    assert observe_mismatch(TokenBatch(logp=OLD, mask=MASK)) == {}
