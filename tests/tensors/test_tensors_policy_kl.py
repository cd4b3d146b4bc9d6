"""KL to the reference: estimators against numbers worked out by hand, and which tokens carry it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.tensors.importance import k1, k2, k3, weighted_k3
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=D), torch.tensor([0.4, 0.4, 0.2], dtype=D)
OLD = torch.tensor([0.6, 0.25, 0.15], dtype=D)


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def batch(logp, ref, mask=None, **more):
    """One row of float64; ``more`` are columns as lists, advantages (1, T)."""
    columns = {
        name: torch.tensor([values], dtype=D) for name, values in {"logp": logp, "ref_logp": ref, **more}.items()
    }
    every = torch.ones_like(columns["logp"])
    return TokenBatch(mask=every if mask is None else torch.tensor([mask]), **columns)


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


def test_the_weighted_estimate_is_unbiased_on_samples_of_another_policy():
    """Expected under the old policy it is KL(p || q) exactly; the plain k3 is not."""
    x = P.log() - Q.log()
    weighted = weighted_k3(k3(x), P.log() - OLD.log())

    assert (OLD * weighted).sum().item() == pytest.approx(0.02526715392157057, abs=1e-14)
    assert (OLD * k3(x)).sum().item() != pytest.approx(0.02526715392157057, abs=1e-6)


@pytest.mark.parametrize(("detached", "gradient"), [(False, (0.0989381987, -0.0938847679)), (True, (0.1, -0.1))])
def test_the_weight_makes_the_gradient_right_only_if_it_is_part_of_it(detached, gradient):
    """The worked example: with the ratio in the graph the true gradient of KL(p || q), without it the forward one's."""
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(-1)
    weight = (logp - OLD.log()).exp()
    (OLD * (weight.detach() if detached else weight) * k3(logp - Q.log())).sum().backward()

    assert logits.grad[:2].tolist() == pytest.approx(gradient, abs=1e-9)


@given(st.floats(-80, 80))
def test_k2_and_k3_are_never_negative(x):
    """Only k1 may be."""
    x = torch.tensor(x, dtype=D)

    assert k2(x) >= 0
    assert k3(x) >= 0


@pytest.mark.parametrize(
    ("x", "expected"),
    [(10.0, 9.0000454), (-10.0, 22015.4658), (0.0, 0.0), (math.inf, math.inf), (-math.inf, math.inf)],
)
def test_k3_is_as_lopsided_as_its_definition(x, expected):
    """A token at -5 and at -15 nats: nine one way, twenty-two thousand the other; an impossible one is infinitely far."""
    assert k3(torch.tensor(x, dtype=D)).item() == pytest.approx(expected, rel=1e-8)
    assert k3(torch.tensor(math.nan)).isnan()


def test_k3_is_accurate_for_tiny_ratios_in_float32():
    """exp(-x) - 1 + x would lose everything to cancellation here."""
    assert k3(torch.tensor(1e-3)).item() == pytest.approx(5e-7, rel=0.1)


def test_kl_to_an_equal_reference_is_exactly_zero_and_no_token_carries_it():
    """After a reset k1 = k2 = k3 = 0; a share of nothing is not measured."""
    logp = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    same = TokenBatch(logp=logp, ref_logp=logp, mask=torch.ones(3, 5), advantages=torch.tensor([1.0, -1.0, 0.0]))

    stats = {name: stat for name, stat in observe(same).items() if name.startswith("policy/kl_ref_")}
    shares = {name: stats.pop(name) for name in list(stats) if name.endswith("_share")}
    measured = {name: stat for name, stat in stats.items() if float(stat.count) > 0}  # no response is long
    assert set(numbers(measured).values()) == {0.0}
    assert {name: stat.settle().count.item() for name, stat in shares.items()} == {
        "policy/kl_ref_neg_share": 0,
        "policy/kl_ref_unlikely_share": 0,
    }


def test_a_share_exists_as_soon_as_one_micro_batch_has_a_sum():
    """An idle micro-batch before or after changes nothing."""
    idle = observe(batch([-1.0], [-1.0], advantages=[-1.0]))
    moved = observe(batch([-1.0, -1.0], [-1.5, -1.5], advantages=[-1.0, 1.0]))

    for both in (merge(idle, moved), merge(moved, idle)):
        settled = both["policy/kl_ref_neg_share"].settle()
        assert settled.count > 0
        assert settled.value() == pytest.approx(0.5)


def test_the_largest_token_and_the_far_ones_are_reported():
    """x = -3, 0.6, 0.7, -20, 0: two beyond ln 2 both ways, two where verl's k3 is clamped at 10."""
    got = numbers(observe(batch([-4.0, -0.4, -0.3, -21.0, -1.0, -50.0], [-1.0] * 6, [1, 1, 1, 1, 1, 0])))

    assert got["policy/kl_ref_max"] == pytest.approx(math.exp(20) - 1 - 20)
    assert got["policy/kl_ref_far"] == pytest.approx(3 / 5)
    assert got["policy/kl_ref_saturated"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(("x", "saturated"), [(-2.61, 0.0), (-2.62, 1.0), (10.9, 0.0), (11.1, 1.0), (20.5, 1.0)])
def test_k3_saturates_where_it_passes_ten(x, saturated):
    """Already 2.6 nats below the reference, but 11 above it."""
    got = numbers(observe(batch([-30.0 + x], [-30.0])))

    assert got["policy/kl_ref_saturated"] == saturated


def test_shares_of_the_sum_by_side_and_by_old_probability():
    """k3 of x = -1 is e - 2; of the four tokens one is negative, two were unlikely, one is idle."""
    got = numbers(
        observe(
            batch(
                [-2.0, -2.0, -2.0, -2.0],
                [-1.0, -1.0, -1.0, -2.0],
                old_logp=[-2.0, -2.4, -2.2, -9.0],
                advantages=[-1.0, 1.0, 0.0, -1.0],
            )
        )
    )

    assert got["policy/kl_ref_neg_share"] == pytest.approx(1 / 3)
    assert got["policy/kl_ref_unlikely_share"] == pytest.approx(1 / 3)
    ratios = [1.0, math.exp(0.4), math.exp(0.2)]
    assert got["policy/kl_ref_weighted"] == pytest.approx((math.e - 2) * sum(ratios) / 4)


@pytest.mark.parametrize("broken", ["logp", "ref_logp"])
def test_a_nan_inside_the_mask_reaches_every_estimate(broken):
    """No fraction of far tokens stays a reassuring 0."""
    columns = {"logp": [-1.0, -1.0], "ref": [-1.2, -1.2]} | {
        "ref" if broken == "ref_logp" else broken: [-1.0, math.nan]
    }
    got = numbers(observe(batch(**columns, old_logp=[-1.0, -1.0], advantages=[-1.0, 1.0])))

    assert all(math.isnan(value) for name, value in got.items() if name.startswith("policy/kl_ref"))


def test_an_unknown_advantage_or_old_policy_spoils_only_what_asks_for_it():
    """The mean KL is known all the same."""
    lost = numbers(observe(batch([-1.0, -1.0], [-1.2, -1.2], old_logp=[-1.0, math.nan], advantages=[-1.0, math.nan])))

    assert math.isnan(lost["policy/kl_ref_neg_share"])
    assert math.isnan(lost["policy/kl_ref_unlikely_share"])
    assert math.isnan(lost["policy/kl_ref_weighted"])
    assert lost["policy/kl_ref_k1"] == pytest.approx(0.2)


def test_the_99th_percentile_is_over_the_counted_tokens():
    """One token in fifty far out moves it, padding does not."""
    x = torch.zeros(2, 100, dtype=D)
    x[0, :4], x[1] = -2.0, -9.0
    mask = torch.tensor([[1.0] * 100, [0.0] * 100])

    got = observe(TokenBatch(logp=x - 1, ref_logp=torch.full_like(x, -1.0), mask=mask))

    assert got["policy/kl_ref_p99"].value().item() == pytest.approx(math.exp(2) - 3)
    assert "policy/kl_ref_weighted" not in got
    assert "policy/kl_ref_neg_share" not in got


@pytest.mark.parametrize(("old", "unlikely"), [(-2.303, 1.0), (-2.302, 0.0)])
def test_a_token_is_unlikely_below_one_in_ten(old, unlikely):
    """Of the policy that sampled it: ln 0.1 = -2.302585."""
    assert observe(batch([-1.0], [-1.2], old_logp=[old]))["policy/kl_ref_unlikely_share"].value() == unlikely


def test_the_limit_of_likelihood_is_not_rounded_with_half_precision_columns():
    """-2.302734 is a float16 below ln 0.1, and what ln 0.1 itself would round to."""
    old = torch.full((1, 1), -2.302734375, dtype=torch.float16)
    half = TokenBatch(logp=-torch.ones(1, 1), ref_logp=torch.full((1, 1), -1.2), old_logp=old, mask=torch.ones(1, 1))

    assert observe(half)["policy/kl_ref_unlikely_share"].value() == 1.0
