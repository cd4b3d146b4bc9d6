"""Likelihood displacement, and tokens of the environment in the loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.advantages import NOISE, actions_lost, observe_displacement
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.tokens import TokenBatch, observe_environment

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-1.0, -0.5, -0.2, -0.9]], dtype=D)
NEW = torch.tensor([[-1.3, -0.4, -0.2, -0.8]], dtype=D)


def read(stats):
    """What would be recorded."""
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def of(logp, old=None, advantages=(1.0,), mask=None):
    """What a batch says of displacement."""
    on = torch.ones_like(logp) if mask is None else torch.tensor(mask).reshape(logp.shape)
    return observe_displacement(
        TokenBatch(logp=logp, mask=on, old_logp=old, advantages=torch.tensor(advantages, dtype=logp.dtype))
    )


def test_the_worked_example_is_gated_on():
    """It lost .1 in all, so the action counts; .3 at its one token that lost, over four tokens."""
    got = read(of(NEW, OLD))

    assert got["lld/penalty"] * 4 == pytest.approx(0.3)
    assert got["lld/displacement"] == pytest.approx(-0.1 / 4)
    assert got["lld/displaced_frac"] == 1.0
    assert got["lld/logp_positive"] == pytest.approx(-2.7 / 4)


def test_an_action_that_gained_as_a_whole_is_gated_off():
    """Single tokens may lose."""
    got = read(of(OLD - torch.tensor([[0.3, -0.4, 0.0, 0.0]], dtype=D), OLD))

    assert got["lld/penalty"] == 0.0
    assert got["lld/displaced_frac"] == 0.0


def test_each_action_between_two_texts_of_the_environment_has_its_own_gate():
    """The first lost .2, the second gained more: as one response nothing would be lost."""
    loss = torch.tensor([[0.3, -0.1, 9.0, -0.5, 0.2]])
    mask = torch.tensor([[True, True, False, True, True]])

    assert actions_lost(loss, mask).tolist() == [pytest.approx([0.3, 0.0, 0.0, 0.0, 0.0])]


def by_hand(loss, mask):
    """Action by action."""
    lost = [0.0] * len(loss)
    places = []
    for i in range(len(loss) + 1):
        if i < len(loss) and mask[i]:
            places.append(i)
        elif places:
            if sum(loss[j] for j in places) > 0:
                lost = [max(0.0, loss[j]) if j in places else lost[j] for j in range(len(loss))]
            places = []
    return lost


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-8, 8), st.booleans()), min_size=1, max_size=12))
def test_actions_are_the_runs_of_the_mask(tokens):
    """Against walking through the tokens."""
    loss, mask = zip(*tokens, strict=True)

    got = actions_lost(torch.tensor([loss], dtype=D), torch.tensor([mask]))

    assert got.tolist() == [by_hand(loss, mask)]


def test_only_responses_that_are_rewarded_can_be_displaced():
    """And the penalty preserves those of advantage 0 too, but none of those to be unlearnt."""
    rows = NEW.repeat(3, 1)

    got = read(of(rows, OLD.repeat(3, 1), advantages=(1.0, 0.0, -1.0)))

    assert got["lld/displaced_frac"] == 1.0
    assert got["lld/penalty"] == pytest.approx(0.3 / 4)
    assert "lld/displaced_frac" not in read(of(NEW, OLD, advantages=(-1.0,)))
    assert "lld/penalty" not in read(of(NEW, OLD, advantages=(-1.0,)))


@pytest.mark.parametrize(("drop", "displaced"), [(0.0, 0.0), (NOISE / 2, 0.0), (2 * NOISE, 1.0)])
def test_rounding_displaces_nothing(drop, displaced):
    """The same weights in another kernel differ by less."""
    assert read(of(OLD - drop, OLD))["lld/displaced_frac"] == displaced


def test_the_push_of_unlikely_tokens_weighs_most():
    """|A| (1 - p): a sure token is hardly pushed."""
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=D)

    got = read(of(p.log(), advantages=(1.0, -2.0)))

    assert got["lld/negative_push"] == pytest.approx(2 * (0.1 + 0.9) / (2 * (0.1 + 0.9) + 1.0))
    assert set(got) == {"lld/logp_positive", "lld/negative_push"}


def test_without_a_push_there_is_no_share_of_it():
    """All advantages 0: nothing is taught."""
    assert read(of(NEW, OLD, advantages=(0.0,))).keys() == {"lld/penalty"}


def test_advantages_may_differ_within_a_response():
    """A token's sign decides for the token, their mean for the response."""
    got = read(of(NEW, OLD, advantages=((1.0, -1.0, -1.0, -1.0),)))

    assert got["lld/logp_positive"] == pytest.approx(-1.3)
    assert "lld/displaced_frac" not in got


def test_without_advantages_nothing_is_known():
    """Nothing to tell right from wrong."""
    assert observe_displacement(TokenBatch(logp=NEW, mask=torch.ones_like(NEW), old_logp=OLD)) == {}


@pytest.mark.parametrize("width", [0, 3])
def test_responses_without_tokens_are_not_measured(width):
    """Neither empty rows nor an empty batch."""
    empty = torch.zeros(2, width)

    assert read(of(empty, empty, advantages=(1.0, 1.0), mask=[[0] * width] * 2)) == {}
    assert read(of(torch.zeros(0, 4), torch.zeros(0, 4), advantages=(), mask=[[1] * 4] * 0)) == {}


def test_nan_counts_inside_the_mask_only():
    """Padding may hold anything; a NaN of the policy is not hidden."""
    logp, mask = NEW.clone(), [[1, 1, 1, 0]]
    logp[0, 3] = math.nan
    clean = read(of(NEW, OLD, mask=mask))

    assert read(of(logp, OLD, mask=mask)) == clean
    assert all(math.isnan(value) for value in read(of(logp, OLD)).values())


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(0, 1000))
def test_micro_batches_say_the_same_as_the_whole(place, seed):
    """Ratios of sums, not means of ratios."""
    g = torch.Generator().manual_seed(seed)
    old, change = -torch.rand(4, 5, generator=g), 0.1 * torch.randn(4, 5, generator=g)
    a, mask = torch.randn(4, generator=g), torch.randint(0, 2, (4, 5), generator=g)

    def part(rows):
        return observe_displacement(
            TokenBatch(logp=(old + change)[rows], old_logp=old[rows], mask=mask[rows], advantages=a[rows])
        )

    merged = merge(part(slice(0, place)), part(slice(place, 4)))

    assert read(merged) == pytest.approx(read(part(slice(0, 4))), rel=1e-4, abs=1e-6)


def test_half_precision_is_widened_before_it_is_subtracted():
    """bf16 would round the difference away."""
    got = read(of(NEW.bfloat16(), OLD.bfloat16()))

    assert got["lld/displacement"] == pytest.approx(
        (NEW.bfloat16().double() - OLD.bfloat16().double()).mean().item(), abs=1e-6
    )


def test_tokens_of_the_environment_in_the_loss_are_a_leak():
    """Two of the three that a tool wrote are trained on; those the loss leaves out are none of its business."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    theirs = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])

    got = read(observe_environment(TokenBatch(logp=torch.zeros(2, 5), mask=mask, environment=theirs)))

    assert got == {"tokens/environment_leak": pytest.approx(2 / 3), "tokens/environment_frac": pytest.approx(3 / 6)}


def test_without_an_environment_nothing_can_leak():
    """None told of, or none of its tokens: absent, not 0."""
    mask = torch.ones(1, 3)

    assert observe_environment(TokenBatch(logp=torch.zeros(1, 3), mask=mask)) == {}
    assert read(observe_environment(TokenBatch(logp=mask, mask=mask, environment=torch.zeros(1, 3)))) == {
        "tokens/environment_frac": 0.0
    }
