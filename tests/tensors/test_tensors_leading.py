"""Signals that are said to lead: total variation, divergence of responses, mismatch over entropy, starvation, updates."""

import copy
import math

import pytest
import torch
from torch import nn

from rlwatch.tensors.importance import ratio_stats
from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.mismatch import DISTANT, response_divergence_stats
from rlwatch.tensors.observe import observe
from rlwatch.tensors.responses import ResponseBatch, observe_responses
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.weight_gap import UpdateSample

pytestmark = pytest.mark.torch
D = torch.float64


def batch(rows=12, width=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(rows, width, generator=g, dtype=D)
    engine = (old + 0.2 * torch.randn(rows, width, generator=g, dtype=D)).clamp(max=-1e-3)
    logp = (old + 0.1 * torch.randn(rows, width, generator=g, dtype=D)).clamp(max=-1e-3)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    entropy = torch.rand(rows, width, generator=g, dtype=D)
    return TokenBatch(
        logp=logp, mask=torch.arange(width) < lengths, entropy=entropy, old_logp=old, rollout_logp=engine
    )  # fmt: skip


def part(whole, rows):
    return TokenBatch(
        **{name: getattr(whole, name)[rows] for name in ("logp", "mask", "entropy", "old_logp", "rollout_logp")}
    )


def values(stats):
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def by_hand(whole):
    """Token by token, in Python's floats."""
    tv, kl, entropy, largest = [], 0.0, 0.0, []
    for i in range(len(whole.logp)):
        inside = [j for j in range(whole.mask.shape[1]) if whole.mask[i, j]]
        for j in inside:
            logp, old, engine = (float(x[i, j]) for x in (whole.logp, whole.old_logp, whole.rollout_logp))
            tv.append(abs(math.exp(logp) - math.exp(old)))
            kl += math.exp(old - engine) - (old - engine) - 1
            entropy += float(whole.entropy[i, j])
        largest.append(max(_binary(float(whole.rollout_logp[i, j]), float(whole.logp[i, j])) for j in inside))
    return {
        "ratio/tv": sum(tv) / len(tv),
        "ratio/tv_max": max(tv),
        "ratio/token_kl": sum(largest) / len(largest),
        "ratio/far_responses": sum(one > DISTANT for one in largest) / len(largest),
    }, kl / entropy


def _binary(sampling, policy):
    p, q = math.exp(sampling), math.exp(policy)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_token_statistics_are_those_of_a_loop_over_tokens():
    """In float64; KL over entropy has the sums of both, of k3 from engine to old policy."""
    whole = batch()
    ours = values(observe(whole))
    exact, per_entropy = by_hand(whole)

    assert {name: ours[name] for name in exact} == pytest.approx(exact, rel=1e-9)
    assert ours["mismatch/kl_entropy"] == pytest.approx(per_entropy, rel=1e-9)
    assert 0 < exact["ratio/far_responses"] < 1


@pytest.mark.parametrize("together", [merge, merge_ranks])
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_micro_batches_and_ranks_give_what_the_whole_batch_gives(together, cut):
    """Of unequal size."""
    whole = batch(seed=3)
    exact, per_entropy = by_hand(whole)
    halves = together(observe(part(whole, slice(0, cut))), observe(part(whole, slice(cut, None))))
    ours = values(halves)

    assert {name: ours[name] for name in exact} == pytest.approx(exact, rel=1e-6)
    assert ours["mismatch/kl_entropy"] == pytest.approx(per_entropy, rel=1e-9)


def test_unscored_tokens_are_left_out_and_a_nan_of_the_trainer_shows():
    """NaN of the engine is no divergence; NaN of the policy is no small one."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    logp, engine = torch.full((2, 2), -0.5), torch.tensor([[math.nan, -0.5], [math.nan, math.nan]])
    clean = values(response_divergence_stats(logp, engine, mask))
    broken = values(response_divergence_stats(torch.tensor([[-0.5, math.nan], [-0.5, -0.5]]), engine, mask))

    assert clean == {"ratio/token_kl": 0.0, "ratio/far_responses": 0.0}
    assert all(math.isnan(value) for value in broken.values())
    assert math.isnan(values(ratio_stats(torch.tensor([[math.nan]]), torch.tensor([[-1.0]]), mask[:1, :1]))["ratio/tv"])


def test_an_empty_batch_measures_nothing():
    """No token, or no response."""
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        assert values(response_divergence_stats(empty, empty, empty.bool())) == {}


# Starvation.


def responses(rewards, groups):
    return ResponseBatch(rewards=torch.tensor(rewards), groups=torch.tensor(groups))


@pytest.mark.parametrize(("right", "size"), [(1, 8), (3, 8), (0, 4), (4, 4)])
def test_the_margin_is_the_pass_rate_over_the_limit_of_the_group_size(right, size):
    """At 1 half of the groups are expected to be all wrong: (1 - p)^g = 1/2."""
    margin = values(observe_responses(responses([1.0] * right + [0.0] * (size - right), [0] * size)))
    limit = 1 - 2 ** (-1 / size)

    assert margin["reward/starvation_margin"] == pytest.approx(right / size / limit)
    assert (1 - limit) ** size == pytest.approx(0.5)


def test_groups_of_micro_batches_and_ranks_are_put_together_first():
    """A group that two ranks share is one."""
    first, second = responses([1.0, 0.0, 1.0], [0, 0, 1]), responses([0.0, 0.0, 1.0], [0, 1, 1])
    whole = responses([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 1, 0, 1, 1])
    for together in (merge, merge_ranks):
        both = values(together(observe_responses(first), observe_responses(second)))
        assert both["reward/starvation_margin"] == pytest.approx(
            values(observe_responses(whole))["reward/starvation_margin"]
        )


# Updates.


class Net(nn.Module):
    def __init__(self, wide=16):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.wide = nn.Linear(8, wide)
        self.lm_head = nn.Linear(8, 20, bias=False)


def stepped(net, turn=0, lr=0.01):
    """Statistics of one step of Adam, and the weights before it."""
    torch.manual_seed(5)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = copy.deepcopy(net)
    sample = UpdateSample.of(net.named_parameters(), turn)
    torch.optim.AdamW(net.parameters(), lr=lr).step()
    return values(sample.stats()), before


def exact_ratio(net, before, prefix):
    pairs = [
        (a.double(), b.double())
        for (name, a), b in zip(net.named_parameters(), before.parameters(), strict=True)
        if name.startswith(prefix)
    ]
    return math.sqrt(
        sum((a - b).square().sum().item() for a, b in pairs) / sum(b.square().sum().item() for _, b in pairs)
    )


def test_the_change_of_each_layer_is_that_of_all_its_elements_where_tensors_are_small():
    """And of all together; the head against the median of the others."""
    torch.manual_seed(0)
    net = Net()
    ours, before = stepped(net)
    layers = ["embed", "layers.0", "layers.1", "layers.2", "wide", "lm_head"]
    exact = {name: exact_ratio(net, before, name) for name in layers}
    norm = math.sqrt(
        sum(
            (a.double() - b.double()).square().sum().item()
            for a, b in zip(net.parameters(), before.parameters(), strict=True)
        )
    )

    assert {name: ours[f"update_layer/{name}"] for name in layers} == pytest.approx(exact, rel=1e-4)
    assert ours["optim/update_norm"] == pytest.approx(norm, rel=1e-5)
    assert ours["optim/update_ratio"] == pytest.approx(exact_ratio(net, before, ""), rel=1e-4)
    others = sorted(exact[name] for name in layers[:-1])
    assert ours["optim/update_head"] == pytest.approx(exact["lm_head"] / others[2], rel=1e-4)


def test_a_sample_of_a_large_tensor_is_near_its_whole_and_right_on_average():
    """512 of 65,536 elements."""
    estimates = []
    for turn in range(30):
        torch.manual_seed(0)
        net = Net(wide=8192)
        with torch.no_grad():
            net.wide.weight[::2] *= 3.0
        ours, before = stepped(net, turn)
        estimates.append(ours["update_layer/wide"] / exact_ratio(net, before, "wide"))

    assert all(0.8 < one < 1.25 for one in estimates)
    assert sum(estimates) / len(estimates) == pytest.approx(1.0, abs=0.03)


def test_weights_that_are_not_trained_and_steps_that_are_skipped_change_nothing():
    """0, which is not missing; nothing at all without a gradient."""
    net = Net()
    assert UpdateSample.of(net.named_parameters()) is None
    net.lm_head.weight.grad = torch.ones_like(net.lm_head.weight)
    ours = values(UpdateSample.of(net.named_parameters()).stats())

    assert ours == {"update_layer/lm_head": 0.0, "optim/update_norm": 0.0, "optim/update_ratio": 0.0}
