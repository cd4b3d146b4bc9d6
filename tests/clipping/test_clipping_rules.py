"""The rules: published figures, and what no rule may do."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.clipping import AGGC, AdaGC, By, LayerMaxNorm, LayerMedian, ZClip
from rlwatch.clipping.rules import RULES, first_state, median, rule_of
from rlwatch.errors import ConfigError

pytestmark = pytest.mark.torch
EVERY = [make() for make in RULES.values()]
NAMES = list(RULES)


def stepped(rule, rows, state=None, *, seen=None):
    """Norms of each step (steps, L) in float64; returns what was left of them, and the states after each."""
    left, states = [], []
    for row in torch.as_tensor(rows, dtype=torch.float64):
        state = rule.start(row) if state is None else state
        held = row.isfinite() & (row > 0) if seen is None else seen
        scales, state = rule.scales(torch.where(held, row, 1.0), held, state)
        left.append((row * torch.where(held, scales, 1.0)).tolist())
        states.append(state)
    return left, states


def column(values):
    return [[value] for value in values]


def test_adagc_after_its_warmup_has_the_published_figures():
    """gamma = 1; norms 1, 1.02, 10, 1: relative 1.05, beta 0.98."""
    state = {"gamma": torch.ones(1, dtype=torch.float64), "steps": torch.tensor(100)}
    left, states = stepped(AdaGC(), column([1.0, 1.02, 10.0, 1.0]), state)

    assert [x for (x,) in left] == pytest.approx([1.0, 1.02, 1.05042, 1.0], abs=1e-6)
    gammas = [float(s["gamma"]) for s in states]
    assert gammas == pytest.approx([1.0, 1.0004, 1.0014004, 1.00137239], abs=1e-6)


def test_adagc_warms_up_with_a_global_norm_and_keeps_the_smallest():
    """h = min(1 / ||g||, 1) for all tensors: (3, 4) has norm 5."""
    left, states = stepped(AdaGC(), [[3.0, 4.0], [0.3, 0.4]])

    assert left[0] == pytest.approx([0.6, 0.8])
    assert left[1] == pytest.approx([0.3, 0.4])
    assert states[0]["gamma"].tolist() == pytest.approx([0.6, 0.8])
    assert states[1]["gamma"].tolist() == pytest.approx([0.3, 0.4])


def test_adagc_begins_with_the_first_norm_of_a_tensor_seen_late():
    """An expert that got its first token after the warm-up is not clipped to nothing."""
    left, states = stepped(AdaGC(warmup=1), [[1.0, 0.0], [1.0, 7.0], [1.0, 70.0]])

    assert left[1][1] == 7.0
    assert left[2][1] == pytest.approx(1.05 * 7.0)
    assert math.isinf(states[0]["gamma"][1])


def test_zclip_has_the_published_figure():
    """mu = 1, variance 0.01, norm 2: z = 10, clipped to 1.0625."""
    state = {k: torch.tensor([v], dtype=torch.float64) for k, v in {"mean": 1.0, "variance": 0.01}.items()}
    left, states = stepped(ZClip(), [[2.0]], {**state, "count": torch.tensor([25])})

    assert left[0][0] == pytest.approx(1.0625, abs=1e-6)
    mean = 0.97 + 0.03 * left[0][0]
    assert float(states[0]["mean"]) == pytest.approx(mean)
    assert float(states[0]["variance"]) == pytest.approx(0.97 * 0.01 + 0.03 * (left[0][0] - mean) ** 2)


def test_zclip_warms_up_with_mean_and_population_variance():
    """Of the first 25 norms, none of which it clips."""
    norms = [1.0 + 0.1 * (i % 7) for i in range(24)] + [50.0]
    left, states = stepped(ZClip(), column(norms))
    tensor = torch.tensor(norms, dtype=torch.float64)

    assert [x for (x,) in left] == norms
    assert float(states[-1]["mean"]) == pytest.approx(float(tensor.mean()))
    assert float(states[-1]["variance"]) == pytest.approx(float(tensor.var(correction=0)))


def test_zclip_may_leave_spikes_out_of_its_averages():
    """As the released code does with skip_update_on_spike."""
    norms = column([1.0 + 0.01 * (i % 5) for i in range(30)] + [9.0])
    for feed in (True, False):
        _, states = stepped(ZClip(feed_spikes=feed), norms)
        assert (float(states[-1]["mean"]) == float(states[-2]["mean"])) is not feed


def test_aggc_clips_to_a_multiple_of_the_average_of_what_it_left():
    """high 1.5, beta 0.98: 1, 10, 1 leave 1, 1.5, 1."""
    left, states = stepped(AGGC(high=1.5), column([1.0, 10.0, 1.0]))

    assert [x for (x,) in left] == pytest.approx([1.0, 1.5, 1.0])
    assert [float(s["average"]) for s in states] == pytest.approx([1.0, 1.01, 1.0098])


def test_aggc_raises_small_norms_only_when_told_to_and_only_so_far():
    """low 0.9 of an average of 1; at most by a factor of 1.1."""
    assert stepped(AGGC(high=2), column([1.0, 0.5]))[0][1] == [0.5]
    assert stepped(AGGC(high=2, low=0.9), column([1.0, 0.5]))[0][1] == pytest.approx([0.9])
    assert stepped(AGGC(high=2, low=0.9, most_up=1.1), column([1.0, 0.5]))[0][1] == pytest.approx([0.55])
    assert stepped(AGGC(high=0.7, most_down=0.9), column([1.0, 1.0]))[0][1] == pytest.approx([0.9])


def test_aggc_changes_its_multipliers_linearly_after_the_switch():
    """2 until half of 100 steps, 4 after 70, 3 in between."""
    rule = AGGC(high=2.0, high_late=4.0, total_steps=100)
    for steps, high in ((0, 2.0), (50, 2.0), (60, 3.0), (70, 4.0), (100, 4.0)):
        state = {"average": torch.ones(1, dtype=torch.float64), "steps": torch.tensor(steps)}
        assert stepped(rule, [[9.0]], state)[0][0] == pytest.approx([high])


def test_constant_thresholds():
    """Each layer 1; or sqrt(L) of them together 1, L being the layers with a gradient."""
    assert stepped(LayerMaxNorm(each=1.0), [[0.5, 4.0]])[0][0] == [0.5, 1.0]
    left = stepped(LayerMaxNorm(total=1.0), [[3.0, 4.0, 0.0]])[0][0]
    assert left == pytest.approx([0.5**0.5, 0.5**0.5, 0.0])


def test_the_median_rule_clips_to_median_and_deviation_of_the_logarithms():
    """exp(m + k s), brute force."""
    draw = torch.Generator().manual_seed(0)
    norms = (0.3 * torch.randn(20, 1, generator=draw, dtype=torch.float64)).exp()
    left, _ = stepped(LayerMedian(), [*norms.tolist(), [50.0]])
    logs = norms.log().flatten().sort().values
    m = (logs[9] + logs[10]) / 2
    deviations = (logs - m).abs().sort().values
    s = 1.4826 * (deviations[9] + deviations[10]) / 2

    assert left[-1][0] == pytest.approx(float((m + 4 * s).exp()), rel=1e-12)
    assert left[:16] == norms[:16].tolist()


def test_the_median_rule_is_not_poisoned_by_spikes():
    """After 20 spikes in a window of 64 the threshold is what it was, within a tenth; an average would be far off."""
    normal = [1.0 + 0.05 * math.sin(i) for i in range(44)]
    calm, _ = stepped(LayerMedian(), column([*normal, 100.0]))
    shaken, _ = stepped(LayerMedian(), column([*normal, *[1000.0] * 20, 100.0]))

    assert shaken[-1][0] == pytest.approx(calm[-1][0], rel=0.1)


def test_the_median_rule_learns_a_new_level():
    """A layer that really is ten times as large is left alone once that fills half of the window."""
    left, _ = stepped(LayerMedian(window=20, warmup=5), column([1.0] * 20 + [10.0] * 12))

    assert left[20][0] < 2
    assert left[-1][0] == 10.0


def test_the_median_of_columns_leaves_nan_out():
    """Odd, even, one, none."""
    nan = float("nan")
    rows = torch.tensor([[1.0, 4.0, nan, nan], [3.0, nan, 7.0, nan], [2.0, 2.0, nan, nan]])

    torch.testing.assert_close(median(rows), torch.tensor([2.0, 3.0, 7.0, nan]), equal_nan=True)


@pytest.mark.parametrize("rule", EVERY, ids=NAMES)
def test_what_is_not_seen_leaves_every_state_as_it_was(rule):
    """A group without a finite gradient other than zero: no number of its state changes, nor any other group's."""
    healthy = [[1.0, 2.0], [1.1, 2.2], [0.9, 1.9]]
    _, states = stepped(rule, healthy)
    after = stepped(rule, [[1.0, float("nan")]], states[-1])[1][0]
    without = stepped(rule, [[1.0, 0.0]], states[-1])[1][0]
    nothing = stepped(rule, [[float("inf"), 0.0]], states[-1])[1][0]

    for name, before in states[-1].items():
        assert torch.equal(after[name].nan_to_num(7.0), without[name].nan_to_num(7.0))
        assert torch.equal(nothing[name].nan_to_num(7.0), before.nan_to_num(7.0))
        if before.ndim:
            assert torch.equal(after[name][..., 1].nan_to_num(7.0), before[..., 1].nan_to_num(7.0))


NORM = st.one_of(st.floats(1e-12, 1e12), st.sampled_from([0.0, float("nan"), float("inf")]))


@pytest.mark.parametrize("rule", EVERY, ids=NAMES)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(NORM, NORM, NORM), min_size=1, max_size=40))
def test_no_norms_make_a_rule_raise_a_gradient_or_lose_its_footing(rule, rows):
    """Whatever comes, factors are in [0, 1] and the next healthy step is scaled by a finite one."""
    rows = [list(row) for row in rows]
    _, states = stepped(rule, rows)
    like = torch.ones(3, dtype=torch.float64)
    scales, _ = rule.scales(like, torch.ones(3, dtype=torch.bool), states[-1])

    assert ((scales >= 0) & (scales <= 1)).all()


@pytest.mark.parametrize("rule", EVERY, ids=NAMES)
def test_the_same_norms_give_the_same_factors_from_a_saved_state(rule):
    """State in, state out: nothing is remembered elsewhere, and nothing is changed in place."""
    draw = torch.Generator().manual_seed(3)
    rows = (0.5 * torch.randn(60, 3, generator=draw, dtype=torch.float64)).exp()
    straight, states = stepped(rule, rows)
    kept = {name: x.clone() for name, x in states[29].items()}
    again, _ = stepped(rule, rows[30:], states[29])

    assert again == straight[30:]
    assert all(torch.equal(states[29][n].nan_to_num(7.0), x.nan_to_num(7.0)) for n, x in kept.items())


def test_published_groupings_are_the_defaults():
    """AdaGC by tensor, AGGC by kind of module; the rest by layer."""
    assert [rule.by for rule in EVERY] == [By.LAYER, By.TENSOR, By.MODULE, By.LAYER, By.LAYER]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: LayerMedian(k=0), "k must be a finite number > 0, got 0"),
        (lambda: LayerMedian(warmup=65), "2 <= warmup <= window"),
        (lambda: LayerMedian(floor=float("nan")), "floor"),
        (lambda: AdaGC(beta=1.0), "beta must be in"),
        (lambda: AdaGC(relative=-1), "relative"),
        (lambda: AGGC(high_late=2.0), "need total_steps"),
        (lambda: ZClip(alpha=1.5), "alpha"),
        (lambda: LayerMaxNorm(each=1.0, total=1.0), "not both"),
        (lambda: rule_of("layerclip"), "unknown rule of clipping 'layerclip'; known: layer-median, adagc"),
        (lambda: rule_of(3), "start and scales"),
    ],
)
def test_wrong_settings_are_refused_with_the_value(wrong, said):
    """At set-up, not in training."""
    with pytest.raises(ConfigError, match=said):
        wrong()


def test_a_rule_that_returns_nonsense_is_refused_before_training():
    """It is tried once."""

    class Short(LayerMaxNorm):
        def scales(self, norms, seen, state):
            return norms[:1], state

    with pytest.raises(ConfigError, match="must return 3 factors"):
        first_state(Short(), 3)
