"""Control tokens, energy, router shift, agreement of gradients: oracles in float64, micro-batches and two ranks."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from waits import CountWaits

from rlwatch.metrics import BY_NAME
from rlwatch.tensors.control_tokens import malformed
from rlwatch.tensors.entropy import token_logp_entropy_collision
from rlwatch.tensors.grad_agreement import NAME, GradientTrail
from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch, top_tokens
from rlwatch.tensors.transfer import Transfer, pack, unpack

pytestmark = pytest.mark.torch
D = torch.float64
CONTROL, TAGS = (0, 7, 8), ((7, 8),)
NEW = (
    "text/control_share", "text/control_prob", "text/control_malformed", "policy/energy", "policy/energy_pushed",
    "policy/energy_response", "policy/energy_response_max", "ratio/router_token_frac", "ratio/router_layer_frac",
    "mismatch/template_ratio", "mismatch/template_share", "mismatch/routing_ratio",
)  # fmt: skip
TENSORS = (
    "logp", "mask", "ids", "advantages", "old_logp", "rollout_logp", "collision", "experts", "rollout_experts",
    "old_experts",
)  # fmt: skip


def batch(rows=10, width=12, vocabulary=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, width, vocabulary, generator=g, dtype=D)
    ids = torch.randint(0, vocabulary, (rows, width), generator=g)
    logp, _, collision = token_logp_entropy_collision(logits, ids)
    noise = lambda size: size * torch.randn(rows, width, generator=g, dtype=D)  # noqa: E731
    draw = lambda: torch.randint(0, 3, (rows, width, 2, 1), generator=g)  # noqa: E731
    return TokenBatch(
        logp=logp,
        mask=torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=g),
        ids=ids,
        advantages=torch.randn(rows, generator=g, dtype=D),
        old_logp=(logp + noise(0.1)).clamp(max=-1e-3),
        rollout_logp=(logp + noise(0.2)).clamp(max=-1e-3),
        collision=collision,
        experts=draw(),
        rollout_experts=draw(),
        old_experts=draw(),
        control=CONTROL,
        tags=TAGS,
    ), logits


def part(whole, rows):
    return dataclasses.replace(whole, **{name: getattr(whole, name)[rows] for name in TENSORS})


def values(stats):
    settled = {name: stat.settle() for name, stat in stats.items() if name in NEW}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def by_hand(b, logits):
    """Every statistic, token by token, in Python's floats."""
    tokens, control, energy, pushed, broken, responses = 0, [], [], [], [], []
    shifted, template, routed = [], {True: [0.0, 0.0], False: [0.0, 0.0]}, {True: [0.0, 0.0], False: [0.0, 0.0]}
    for i in range(len(b.mask)):
        inside = [j for j in range(b.mask.shape[1]) if b.mask[i, j]]
        tokens += len(inside)
        depth, wrong, whole = 0, False, 0.0
        for j in inside:
            token, logp = int(b.ids[i, j]), float(b.logp[i, j])
            weights = [math.exp(float(x)) for x in logits[i, j]]
            chances = [weight / math.fsum(weights) for weight in weights]
            w = math.fsum((chance - (v == token)) ** 2 for v, chance in enumerate(chances))
            energy.append(w)
            whole += w
            pushed.append((float(b.advantages[i]) * math.exp(logp - float(b.old_logp[i, j]))) ** 2 * w)
            if token in CONTROL:
                control.append(math.exp(logp))
            depth += (token == 7) - (token == 8)
            wrong = wrong or depth not in (0, 1)
            shifted.append([set(b.experts[i, j, x].tolist()) != set(b.old_experts[i, j, x].tolist()) for x in (0, 1)])
            old = float(b.old_logp[i, j])
            size, room = abs(old - float(b.rollout_logp[i, j])), 1 - math.exp(old)
            edge = j == 0 or token in CONTROL or int(b.ids[i, j - 1]) in CONTROL
            template[edge][0] += size
            template[edge][1] += room
            if j:
                moved = not torch.equal(b.experts[i, j - 1], b.rollout_experts[i, j - 1])
                routed[moved][0] += size
                routed[moved][1] += room
        broken.append(wrong or depth != 0)
        responses.append(whole)
    ratio = lambda sums: sums[True][0] / sums[True][1] / (sums[False][0] / sums[False][1])  # noqa: E731
    return {
        "text/control_share": len(control) / tokens,
        "text/control_prob": math.fsum(control) / len(control),
        "text/control_malformed": sum(broken) / len(broken),
        "policy/energy": math.fsum(energy) / tokens,
        "policy/energy_pushed": math.fsum(pushed) / tokens,
        "policy/energy_response": math.fsum(responses) / len(responses),
        "policy/energy_response_max": max(responses),
        "ratio/router_token_frac": sum(map(any, shifted)) / tokens,
        "ratio/router_layer_frac": sum(map(sum, shifted)) / tokens / 2,
        "mismatch/template_ratio": ratio(template),
        "mismatch/template_share": template[True][0] / (template[True][0] + template[False][0]),
        "mismatch/routing_ratio": ratio(routed),
    }


@pytest.mark.parametrize("seed", range(4))
def test_every_statistic_is_that_of_a_loop_over_tokens(seed):
    """In float64, and within the range of the table."""
    whole, logits = batch(seed=seed)
    ours, exact = values(observe(whole)), by_hand(whole, logits)

    assert ours == pytest.approx(exact, rel=1e-6)
    assert set(ours) == set(NEW)
    for name, value in ours.items():
        low, high = BY_NAME[name].low, BY_NAME[name].high
        assert low is None or value >= low, name
        assert high is None or value <= high, name


@pytest.mark.parametrize("together", [merge, merge_ranks])
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_micro_batches_and_ranks_give_what_the_whole_batch_gives(together, cut):
    """Of unequal size; the second part goes over the link."""
    whole, logits = batch(seed=5)
    layout, tensors = pack(observe(part(whole, slice(cut, None))))
    second = unpack(layout, Transfer(tensors).read())

    assert values(together(observe(part(whole, slice(0, cut))), second)) == pytest.approx(
        by_hand(whole, logits), rel=1e-6
    )


def test_nothing_is_waited_for():
    """Each statistic is computed on the device."""
    whole, _ = batch(seed=1)
    with CountWaits() as waits:
        observe(whole)
    assert waits.seen == []


def test_tags_that_are_opened_twice_or_closed_first_or_never_are_malformed_unless_the_response_was_cut():
    """7 opens and 8 closes; the last response was cut inside its block."""
    ids = torch.tensor([[7, 1, 8, 0], [7, 7, 8, 8], [8, 7, 1, 1], [7, 1, 1, 1], [1, 1, 1, 1], [7, 8, 7, 1]])
    cut = torch.tensor([False, False, False, False, False, True])

    assert malformed(ids, torch.ones_like(ids), TAGS, cut).tolist() == [False, True, True, True, False, False]
    assert malformed(ids[:, :0], ids[:, :0], TAGS).tolist() == [False] * 6


def test_energy_ranks_the_extreme_tokens_where_the_logits_are_known():
    """``screen`` is then |A| r times the norm of the push on all logits, which is above that on its own logit."""
    whole, _ = batch(seed=2)
    plain = dataclasses.replace(whole, collision=None)
    column = 1 + top_tokens(whole).names.index("screen")
    more, less = top_tokens(whole).rows[:, column], top_tokens(plain).rows[:, column]

    assert (more >= less).all()
    assert (more > less).any()


# Agreement of the gradients of micro-batches.


def gradients_of(net, inputs):
    """The gradient of each micro-batch by itself, flat, in float64."""
    found = []
    for x in inputs:
        net.zero_grad()
        net(x).square().mean().backward()
        found.append(torch.cat([p.grad.flatten().double() for p in net.parameters()]))
    net.zero_grad()
    return found


def by_pairs(found):
    """Mean product of two different gradients over the mean square."""
    n = len(found)
    pairs = [float(found[i] @ found[j]) for i in range(n) for j in range(n) if i != j]
    return math.fsum(pairs) / len(pairs) / (math.fsum(float(g @ g) for g in found) / n)


def followed(net, inputs):
    trail = GradientTrail()
    for x in inputs:
        loss = net(x).square().mean()
        trail.look(net.parameters())
        loss.backward()
    trail.look(net.parameters())
    return trail.stats()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double(), [
        torch.randn(4, 5, dtype=D) for _ in range(5)
    ]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_agreement_is_the_mean_product_of_pairs_over_the_mean_square(count):
    """Of all elements, since the tensors are small."""
    net, inputs = network()
    stat = followed(net, inputs[:count])[NAME].settle()

    assert stat.value().item() == pytest.approx(by_pairs(gradients_of(net, inputs[:count])), rel=1e-4)
    assert stat.count.item() == count - 1


def test_equal_gradients_agree_and_opposed_ones_cancel():
    """1, and -1 of two."""
    net, inputs = network()
    assert followed(net, [inputs[0], inputs[0]])[NAME].settle().value().item() == pytest.approx(1.0, rel=1e-5)
    net.zero_grad()
    trail = GradientTrail()
    for sign in (1.0, -1.0):
        trail.look(net.parameters())
        (sign * net(inputs[0]).square().mean()).backward()
    trail.look(net.parameters())
    assert trail.stats()[NAME].settle().value().item() == pytest.approx(-1.0, abs=1e-4)


def test_agreement_of_two_ranks_has_the_pairs_of_both():
    """Sums of both over sums of both, sent over the link."""
    net, inputs = network(3)
    first = followed(net, inputs[:2])
    net.zero_grad()
    layout, tensors = pack(followed(net, inputs[2:]))
    both = merge_ranks(first, unpack(layout, Transfer(tensors).read()))[NAME].settle()
    above = below = 0.0
    for mine in (inputs[:2], inputs[2:]):
        found = gradients_of(net, mine)
        squares = math.fsum(float(g @ g) for g in found)
        above += float(sum(found) @ sum(found)) - squares
        below += (len(found) - 1) * squares

    assert both.value().item() == pytest.approx(above / below, rel=1e-4)


def test_one_gradient_and_gradients_that_are_left_from_the_step_before_measure_nothing():
    """The loop may clear them later: what then looks like a gradient is none."""
    net, inputs = network()
    assert followed(net, inputs[:1]) == {}
    stale = followed(net, inputs[:3])[NAME].settle()  # the first call left its gradient
    assert stale.count.item() == 0
