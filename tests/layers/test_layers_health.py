"""Each layer against its own level: what is a spike, what is not, and what it may cost."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.layers import DerivedLayers, LayerHealth, layer_norms
from rlwatch.metrics import BY_NAME

LAYERS = 12


def healthy(length, *, layers=LAYERS, seed=0, common=0.3, own=0.1):
    """Norms by layer and step: what moves all alike, what moves each, and a level of each its own."""
    draw = np.random.default_rng(seed)
    level = np.exp(draw.normal(size=layers))
    rows = level * np.exp(common * draw.normal(size=(length, 1)) + own * draw.normal(size=(length, layers)))
    return [{f"layers.{i}": float(norm) for i, norm in enumerate(row)} for row in rows]


def fed(rows, health=None, start=0):
    """What is told at each step."""
    health = health or LayerHealth()
    return [health.update(step, row) for step, row in enumerate(rows, start)]


def spikes(told, start=0):
    """Step -> layers that spike."""
    return {i: [one.layer for one in row.spiking] for i, row in enumerate(told, start) if row and row.spiking}


def test_a_step_by_hand():
    """Constant norms 1, 2, 3 for thirty steps, then 1, 2, 300: 100 times its level, 1 - of nothing else."""
    health = LayerHealth()
    fed([{"a": 1.0, "b": 2.0, "c": 3.0}] * 30, health)
    told = health.update(30, {"a": 1.0, "b": 2.0, "c": 300.0})

    assert (told.layers, told.heaviest) == (3, "c")
    assert told.max_share == pytest.approx(90_000 / 90_005)
    assert told.participation == pytest.approx(90_005**2 / (3 * (1 + 16 + 300.0**4)))
    assert told.rise == pytest.approx(100.0)
    assert told.total_times == pytest.approx(math.sqrt(90_005 / 14))
    [spike] = told.spiking
    assert (spike.layer, spike.norm) == ("c", 300.0)
    assert (spike.times, spike.usual) == pytest.approx((100.0, 3.0))
    assert spike.deviations == pytest.approx(math.log(100.0) / 0.05)


def test_healthy_layers_do_not_spike():
    """Ten runs of 500 steps, norms of all layers fluctuating together and each by itself."""
    told = [row for seed in range(10) for row in fed(healthy(500, seed=seed, own=0.3))]

    assert sum(map(bool, (row.spiking for row in told))) <= 1


@pytest.mark.parametrize("layers", [3, 4, 12, 60])
def test_one_layer_is_found_among_few_and_many(layers):
    """Twenty times its level at steps 60, 70 and 80: earlier spikes do not hide later ones."""
    rows = healthy(100, layers=layers)
    for step in (60, 70, 80):
        rows[step]["layers.2"] *= 20.0

    assert spikes(fed(rows)) == {step: ["layers.2"] for step in (60, 70, 80)}


def test_several_layers_are_reported_worst_first():
    """Three of twelve, 10, 30 and 100 times."""
    rows = healthy(60, own=0.02)
    for layer, times in ((3, 10.0), (5, 100.0), (7, 30.0)):
        rows[50][f"layers.{layer}"] *= times

    assert spikes(fed(rows))[50] == ["layers.5", "layers.7", "layers.3"]


def test_what_moves_all_layers_alike_is_no_layers_spike():
    """A global spike of 100 times, another batch size, a decay of the whole gradient: the total tells, no layer does."""
    rows = healthy(200)
    scale = [100.0 if step == 60 else 8.0 if 100 <= step < 150 else math.exp(-step / 30) for step in range(200)]
    told = fed([{k: v * s for k, v in row.items()} for row, s in zip(rows, scale, strict=True)])

    assert spikes(told) == {}
    assert told[60].total_times > 100.0


def test_a_lasting_new_level_of_a_layer_is_adopted():
    """After half a window of twenty times its level the layer is as usual again."""
    rows = healthy(160)
    for row in rows[60:]:
        row["layers.2"] *= 20.0
    found = spikes(fed(rows))

    assert set(range(60, 80)) <= set(found)
    assert max(found) < 60 + 30


def test_batches_without_a_signal_neither_spike_nor_teach():
    """Norms at the size of rounding have a pattern of their own; zeros have none."""
    rows = healthy(200)
    noise = healthy(200, seed=5, own=2.0)
    quiet = [{k: v * 1e-6 for k, v in noise[i].items()} if i % 3 == 0 else row for i, row in enumerate(rows)]
    quiet[120] = dict.fromkeys(rows[0], 0.0)
    told = fed(quiet)
    quiet[121]["layers.2"] *= 20.0

    assert told[120] is None
    assert spikes(told) == {}
    assert spikes(fed(quiet)) == {121: ["layers.2"]}


def test_layers_that_rise_and_fall_together_stop_doing_so():
    """Heterogeneity is low, then near 1 once the window has turned over."""
    told = fed([*healthy(100, common=0.5, own=0.1), *healthy(60, common=0.0, own=0.5)])

    assert told[18].heterogeneity is None
    assert told[99].heterogeneity < 0.15
    assert told[159].heterogeneity > 0.85


def test_spikes_do_not_count_as_correlation_or_the_lack_of_it():
    """One of four layers, then all four, at 100 times their norm for a step: heterogeneity stays as it was."""
    rows = healthy(120, layers=4)
    plain = fed(rows)
    rows[60] = {k: v * (100.0 if k == "layers.2" else 1.0) for k, v in rows[60].items()}
    rows[90] = {k: v * 100.0 for k, v in rows[90].items()}

    for told, expected in zip(fed(rows)[60:], plain[60:], strict=True):
        assert told.heterogeneity == pytest.approx(expected.heterogeneity, abs=0.05)


def test_it_warms_up():
    """Shares are there at once; levels and correlations from the twenty-first step on."""
    told = fed(healthy(25))

    assert [row.rise is None for row in told] == [True] * 20 + [False] * 5
    assert set(told[0].metrics()) == {"layers/max_share", "layers/participation"}
    assert set(told[24].metrics()) == {name for name in BY_NAME if name.startswith("layers/")}


def test_two_layers_cannot_be_distinguished():
    """Either may be the one that moved: shares and correlation only."""
    told = fed(healthy(40, layers=2))

    assert {row.rise for row in told} == {None}
    assert told[39].heterogeneity is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_what_is_no_norm_poisons_nothing(bad):
    """A layer that is broken in every other step, and all of them in some: the others are judged as ever."""
    rows = healthy(120)
    clean = fed([{k: v for k, v in row.items() if k != "layers.0"} for row in rows])
    for step, row in enumerate(rows):
        row["layers.0"] = bad if step % 2 else row["layers.0"]
    rows[70] = dict.fromkeys(rows[0], bad)
    rows[100]["layers.2"] *= 20.0
    told = fed(rows)

    assert told[70] is None
    assert spikes(told) == {100: ["layers.2"]}
    assert told[119].heterogeneity == pytest.approx(clean[119].heterogeneity, abs=0.02)
    assert all(math.isfinite(value) for row in told if row for value in row.metrics().values())


def test_a_step_most_of_whose_layers_are_missing_leaves_the_correlation_alone():
    """Else those layers would be left out of it for a whole window."""
    rows = healthy(60)
    rows[50] = {"layers.0": 1.0, **{f"layers.{i}": math.nan for i in range(1, LAYERS)}}
    without = healthy(60)
    del without[50]

    assert fed(rows)[59].heterogeneity == pytest.approx(fed(without)[58].heterogeneity, abs=0.02)


def test_layers_may_come_and_go():
    """One appears at step 50 (unfrozen), one vanishes at 80: neither disturbs the others, the new one is judged."""
    rows = healthy(140)
    for step, row in enumerate(rows):
        if step < 50:
            del row["layers.11"]
        if step >= 80:
            del row["layers.0"]
    rows[120]["layers.11"] *= 20.0

    assert spikes(fed(rows)) == {120: ["layers.11"]}


def test_layers_of_one_step_may_come_in_pieces():
    """In the end the same is told as if they had come together, and it is learnt once."""
    rows = healthy(80)
    rows[70]["layers.2"] *= 20.0
    whole, pieces = LayerHealth(), LayerHealth()
    for step, row in enumerate(rows):
        expected = whole.update(step, row)
        pieces.update(step, {k: v for k, v in row.items() if k < "layers.4"})
        told = pieces.update(step, {k: v for k, v in row.items() if k >= "layers.4"})

        assert told.metrics() == pytest.approx(expected.metrics())
        assert [one.layer for one in told.spiking or ()] == (["layers.2"] if step == 70 else [])


def test_going_back_to_a_checkpoint_forgets_what_lay_after_it():
    """As if the abandoned steps had not been."""
    rows, other = healthy(90), healthy(90, seed=9, own=1.0)
    there_and_back = LayerHealth()
    fed(rows[:60], there_and_back)
    fed(other[60:80], there_and_back, start=60)

    assert fed(rows[60:], there_and_back, start=60)[-1] == fed(rows)[-1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-1, 2), st.dictionaries(st.sampled_from("abcde"), st.floats(), min_size=1, max_size=5)),
        max_size=30,
    )
)
def test_no_numbers_make_it_raise(steps):
    """Subnormal, huge, negative, missing; steps that repeat and go back. What is told is finite and in range."""
    health, step = LayerHealth(window=8, warm_up=3), 0
    for gap, norms in steps:
        step = max(0, step + gap)
        with np.errstate(all="raise", under="ignore"):
            told = health.update(step, norms)
        for name, value in (told.metrics() if told else {}).items():
            metric = BY_NAME[name]
            assert math.isfinite(value)
            assert metric.low is None or value >= metric.low - 1e-9
            assert metric.high is None or value <= metric.high + 1e-9
        for spike in (told and told.spiking) or ():
            assert math.isfinite(spike.norm)
            assert math.isfinite(spike.times)
            assert spike.usual >= 0.0


def test_only_layer_norms_are_read_and_what_the_source_measured_stays():
    """Records without them pass unchanged, and do not interrupt the run of those with them."""
    derived = DerivedLayers()
    for step, row in enumerate(healthy(30)):
        record = {"reward/mean": 0.5, **{f"grad_layer/{k}": v for k, v in row.items()}, "layers/max_share": 0.125}
        plain = {"reward/mean": 0.5}
        derived.add(step, record)
        derived.add(step, plain)

        assert plain == {"reward/mean": 0.5}
        assert record["layers/max_share"] == 0.125
        assert record["layers/participation"] <= 1.0
    assert layer_norms(record) == row
    assert json.dumps(record)
