"""Where the clip binds: by the side of the advantage, for tokens and for whole responses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.importance import clip_stats, sequence_log_ratio, truncated
from rlwatch.tensors.mergeable import Ess
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
NAMES = ("ratio/clipfrac_low", "ratio/clipfrac_high", "ratio/clipfrac", "ratio/clipfrac_dual")


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def one(ratio, advantage, **bounds):
    """The fractions of a single token."""
    x, a = torch.tensor([[ratio]], dtype=D).log(), torch.tensor([[advantage]], dtype=D)
    return numbers(clip_stats(x, a, torch.ones(1, 1), **({"low": 0.2, "high": 0.28} | bounds)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (0.79, -1.0, 1.0, 0.0),
        (0.81, -1.0, 0.0, 0.0),
        (0.79, 1.0, 0.0, 0.0),
        (1.29, 1.0, 0.0, 1.0),
        (1.27, 1.0, 0.0, 0.0),
        (1.29, -1.0, 0.0, 0.0),
        (0.5, 0.0, 0.0, 0.0),
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clip_binds_beyond_its_bounds_and_only_against_the_advantage(ratio, advantage, low, high):
    """0.8 below and 1.28 above (clip-higher); without advantage there is nothing to clip."""
    assert one(ratio, advantage) == dict(zip(NAMES, (low, high, low + high), strict=False))


@pytest.mark.parametrize(("ratio", "advantage", "bound"), [(3.1, -1.0, 1.0), (2.9, -1.0, 0.0), (3.1, 1.0, 0.0)])
def test_the_dual_clip_stops_only_what_grew_against_a_negative_advantage(ratio, advantage, bound):
    """Three times as likely though it should become less so: dual-clip PPO with c = 3."""
    assert one(ratio, advantage, dual=3.0)["ratio/clipfrac_dual"] == bound


def test_without_a_dual_clip_there_is_no_fraction_of_it():
    """Absent, not 0."""
    assert set(one(9.0, -1.0)) == set(NAMES[:3])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.5, 0.0, 0.7])), min_size=1, max_size=20))
def test_the_fractions_are_where_the_clipped_loss_exceeds_the_other(tokens):
    """By the definition of the losses -rA, -clip(r)A and, for A < 0, -cA."""
    x, a = (torch.tensor([column], dtype=D) for column in zip(*tokens, strict=True))
    r = x.exp()
    plain, clipped = -a * r, -a * r.clamp(0.8, 1.28)
    got = numbers(clip_stats(x, a, torch.ones_like(x), low=0.2, high=0.28, dual=3.0))

    assert got["ratio/clipfrac"] == pytest.approx((clipped > plain).double().mean().item())
    assert got["ratio/clipfrac"] == pytest.approx(got["ratio/clipfrac_low"] + got["ratio/clipfrac_high"])
    dual = (torch.maximum(plain, clipped) > -a * 3.0) & (a < 0)
    assert got["ratio/clipfrac_dual"] == pytest.approx(dual.double().mean().item())


@pytest.mark.parametrize("broken", [{"ratio": math.nan, "advantage": 1.0}, {"ratio": 1.0, "advantage": math.nan}])
def test_what_is_no_number_does_not_pass_for_unclipped(broken):
    """NaN compares false; the fractions must say NaN, not a reassuring 0."""
    assert all(math.isnan(value) for value in one(**broken, dual=3.0).values())


def test_a_nan_outside_the_mask_does_not_matter():
    """Of the counted token the ratio is 2."""
    x = torch.tensor([[math.log(2.0), math.nan]])

    assert numbers(clip_stats(x, torch.ones(1, 1), torch.tensor([[1, 0]]), low=0.2, high=0.2))["ratio/clipfrac"] == 1.0


RESPONSES = torch.tensor([[0.5, 0.5, 0.5, 0.5], [-0.5, 0.0, 9.0, 9.0], [0.0, 0.1, -0.1, 0.0]], dtype=D)
COUNTED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
ADVANTAGES = torch.tensor([[1.0], [-1.0], [1.0]], dtype=D)


def test_a_response_is_clipped_as_a_whole_and_weighed_by_its_tokens_or_once():
    """Geometric means 1.65 (A > 0), 0.78 (A < 0), 1.0: six of nine tokens, two of three responses."""
    s = sequence_log_ratio(RESPONSES, torch.zeros_like(RESPONSES), COUNTED, per_token=True).unsqueeze(1)
    fractions = lambda mask: numbers(clip_stats(s, ADVANTAGES, mask, low=0.2, high=0.2))  # noqa: E731

    assert fractions(COUNTED) == pytest.approx(dict(zip(NAMES, (2 / 9, 4 / 9, 6 / 9), strict=False)))
    assert fractions(torch.ones(3, 1)) == pytest.approx(dict(zip(NAMES, (1 / 3, 1 / 3, 2 / 3), strict=False)))


def test_a_cap_alone_has_no_lower_side():
    """CISPO of TRL: min(r, 1.5) for positive advantages."""
    assert "ratio/clipfrac_low" not in one(0.01, -1.0, low=math.inf, high=0.5)
    assert one(1.6, 1.0, low=math.inf, high=0.5)["ratio/clipfrac_high"] == 1.0


def test_truncated_weights_look_healthier_than_raw_ones():
    """One weight of e^5 among ones: the raw effective size is a tenth, the truncated one nearly whole."""
    x = torch.zeros(1, 10, dtype=D)
    x[0, 0] = 5.0
    batch = TokenBatch(
        logp=x - 9,
        old_logp=torch.full_like(x, -9.0),
        mask=torch.ones_like(x),
        advantages=torch.ones(1),
        clip=(0.2, 0.28),
    )
    got = numbers(observe(batch))

    assert got["ratio/ess"] == pytest.approx(0.11, abs=0.02)
    assert got["ratio/ess_clipped"] == pytest.approx((10.28 / 10) ** 2 / ((9 + 1.28**2) / 10))


def test_weights_are_truncated_to_the_bounds_and_nan_stays():
    """Also without a lower bound, or with one at 0."""
    x = torch.tensor([-9.0, 0.0, 9.0, math.nan], dtype=D)

    assert truncated(x, low=0.5, high=1.0)[:3].exp().tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert truncated(x, low=1.0, high=1.0)[:3].tolist() == pytest.approx([-9.0, 0.0, math.log(2)])
    assert truncated(x)[:3].tolist() == [-9.0, 0.0, 9.0]
    assert truncated(x, low=0.5, high=1.0)[3].isnan()
    assert Ess.of(truncated(x, high=1.0), torch.tensor([0, 1, 1, 0])).value().item() == pytest.approx(9 / 10)
