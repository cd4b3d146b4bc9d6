"""The engine's weights against the trainer's, a sample of each tensor."""

import math

import pytest
import torch
from torch import nn

from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.weight_gap import SAMPLED, TrainerWeight, places_of, trainer_weights, weight_stats

pytestmark = pytest.mark.torch
DIFFER, COMPARED = "mismatch/weights_differ", "mismatch/weights_compared"
DISTANCE, MISSING = "mismatch/weights_distance", "mismatch/adapter_missing"


class Block(nn.Module):
    def __init__(self, wide=24):
        super().__init__()
        for name, rows in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8), ("gate_proj", wide), ("up_proj", wide)):
            setattr(self, name, nn.Linear(16, rows))


class Model(nn.Module):
    def __init__(self, wide=24):
        super().__init__()
        self.embed_tokens = nn.Embedding(30, 16)
        self.layers = nn.ModuleList([Block(wide) for _ in range(2)])
        self.lm_head = nn.Linear(16, 30, bias=False)


def model(wide=24):
    torch.manual_seed(0)
    return Model(wide)


def held_by(policy, dtype=torch.float32):
    return {name: parameter.detach().to(dtype, copy=True) for name, parameter in policy.named_parameters()}


def measured(policy, engine, turn=0):
    stats = {name: stat.settle() for name, stat in weight_stats(trainer_weights(policy), engine, turn).items()}
    return {name: stat.value().item() for name, stat in stats.items() if stat.count > 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_weights_are_equal_in_any_dtype_of_the_engine(dtype):
    """After the trainer's are cast to it."""
    policy = model()
    found = measured(policy, held_by(policy, dtype))

    assert (found[DIFFER], found[COMPARED], found[DISTANCE]) == (0.0, 1.0, 0.0)
    assert {value for name, value in found.items() if name.startswith(DIFFER)} == {0.0}


def test_one_bit_of_one_element_is_found_and_its_layer_named():
    """Of a tensor that is compared whole."""
    policy = model()
    engine = held_by(policy, torch.bfloat16)
    weight = engine["layers.1.k_proj.weight"]
    weight.view(torch.int16)[3, 5] ^= 1
    found = measured(policy, engine)

    assert found[DIFFER] == pytest.approx(1 / len(engine))
    assert {name for name, value in found.items() if value > 0 and name.startswith(DIFFER + "/")} == {
        DIFFER + "/layers.1"
    }


def test_the_distance_is_that_of_float64():
    """Largest of all tensors, over the trainer's norm."""
    policy, other = model(), model()
    with torch.no_grad():
        for i, parameter in enumerate(other.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=1e-3 * i)
    pairs = list(zip(policy.parameters(), other.parameters(), strict=True))
    exact = max(((a.double() - b.double()).norm() / a.double().norm()).item() for a, b in pairs)

    assert measured(policy, held_by(other))[DISTANCE] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("elements", [1, 7, 512, 513, 1024, 5000, 36_865])
def test_in_time_every_element_is_compared_and_never_too_many_at_once(elements):
    """The first place moves from sync to sync."""
    met = set()
    for turn in range(4 * elements):
        places = range(elements)[places_of(elements, turn)]
        assert len(places) == min(SAMPLED, elements)
        met |= set(places)
        if len(met) == elements:
            break

    assert met == set(range(elements))


def test_a_stale_tensor_is_found_in_a_sample_of_it():
    """Small updates leave most elements of a bfloat16 tensor as they are."""
    policy = model(wide=4096)
    engine = held_by(policy, torch.bfloat16)
    with torch.no_grad():
        policy.layers[0].up_proj.weight += 3e-5 * torch.randn(4096, 16)
    changed = (policy.layers[0].up_proj.weight.to(torch.bfloat16) != engine["layers.0.up_proj.weight"]).float().mean()
    found = measured(policy, engine)

    assert 0.0 < changed < 0.3
    assert found[DIFFER] > 0
    assert found[f"{DIFFER}/layers.0"] > 0
    assert found[f"{DIFFER}/layers.1"] == 0


def fused(engine):
    """As vLLM holds them: q, k and v in one, gate and up in one, the vocabulary padded."""
    whole = {name: tensor for name, tensor in engine.items() if "_proj" not in name}
    for layer in range(2):
        for kind in ("weight", "bias"):
            for name, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
                held = [engine[f"layers.{layer}.{part}_proj.{kind}"] for part in parts]
                whole[f"layers.{layer}.{name}.{kind}"] = torch.cat(held)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        whole[name] = torch.cat([whole[name], torch.zeros(34, 16)])
    return whole


def test_the_fused_modules_of_vllm_are_compared_part_by_part():
    """Rows of one part that are old are of that part alone."""
    policy = model()
    engine = fused(held_by(policy))
    sound = measured(policy, engine)
    engine["layers.0.qkv_proj.weight"][16:24] += 0.1
    broken = measured(policy, engine)

    assert (sound[DIFFER], sound[COMPARED]) == (0.0, 1.0)
    assert broken[DIFFER] == pytest.approx(1 / 22)
    assert broken[f"{DIFFER}/layers.0"] > 0 == broken[f"{DIFFER}/layers.1"]


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("quantised", lambda tensor: tensor.to(torch.int8)),
        ("cut by tensor parallelism", lambda tensor: tensor[:8]),
        ("of other shape", lambda tensor: tensor.flatten()),
        ("without data", lambda tensor: tensor.to("meta")),
    ],
)
def test_what_cannot_be_compared_is_counted_as_such_and_is_no_difference(why, change):
    """The share that was compared says how much the verdict covers."""
    policy = model()
    engine = held_by(policy)
    engine["layers.0.q_proj.weight"] = change(engine["layers.0.q_proj.weight"])
    every = sum(parameter.numel() for parameter in policy.parameters())
    found = measured(policy, engine)

    assert found[DIFFER] == 0.0, why
    assert found[COMPARED] == pytest.approx(1 - 16 * 16 / every)


@pytest.mark.parametrize("engine", [{}, {"other.weight": torch.zeros(3)}])
def test_an_engine_that_has_nothing_of_the_trainer_measures_nothing(engine):
    """No comparison is no equality."""
    assert measured(model(), engine) == {}


def test_nan_is_equal_to_nan_and_to_nothing_else():
    """A broken weight that was sent is no fault of the sync."""
    policy = model()
    with torch.no_grad():
        policy.lm_head.weight[0, 0] = math.nan
    engine = held_by(policy)
    sound = measured(policy, engine)
    engine["lm_head.weight"][0, 0] = 0.0

    assert sound[DIFFER] == 0.0
    assert measured(policy, engine)[DIFFER] > 0


def test_parts_of_ranks_make_up_the_whole():
    """Rows that two ranks hold, and two syncs of one step: elements add up."""
    policy = model()
    engine = held_by(policy)
    engine["lm_head.weight"][20:] += 1.0
    weight = policy.lm_head.weight.detach()
    halves = [TrainerWeight("lm_head.weight", weight[first : first + 15], weight.shape, first) for first in (0, 15)]
    low, high = (weight_stats([half], engine) for half in halves)
    both = {name: stat.value().item() for name, stat in merge_ranks(low, high).items()}
    whole = weight_stats([TrainerWeight("lm_head.weight", weight, weight.shape)], engine)
    twice = merge(whole, whole)

    assert both[f"{DIFFER}/lm_head"] == whole[f"{DIFFER}/lm_head"].value().item() == pytest.approx(10 / 30)
    assert both[COMPARED] == 1.0
    assert twice[f"{DIFFER}/lm_head"].value().item() == pytest.approx(10 / 30)


# Adapters.


def adapted(scale=1.0):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    policy = get_peft_model(model(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=scale)
    return policy


def merged_into(policy):
    """What TRL sends."""
    policy.merge_adapter()
    held = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter.detach().clone()
        for name, parameter in policy.named_parameters()
        if "lora_" not in name
    }
    policy.unmerge_adapter()
    return held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_adapter_is_equal_to_within_rounding(dtype):
    """In the engine's dtype."""
    policy = adapted(0.02)
    engine = {name: tensor.to(dtype) for name, tensor in merged_into(policy).items()}
    found = measured(policy, engine)

    assert (found[DIFFER], found[COMPARED], found[MISSING]) == (0.0, 1.0, 0.0)


def test_an_adapter_that_was_not_loaded_is_told_from_weights_that_are_old():
    """The engine has the base weights to the bit."""
    policy = adapted()
    base = merged_into(adapted(0.0))
    old = merged_into(adapted(0.5))

    assert measured(policy, base)[MISSING] == 1.0
    assert measured(policy, base)[DIFFER] == pytest.approx(3 / len(base))
    assert measured(policy, old)[MISSING] == 0.0
    assert measured(policy, old)[DIFFER] == pytest.approx(3 / len(base))


def test_an_adapter_that_changes_nothing_yet_cannot_be_missed():
    """LoRA's B is 0 at the start."""
    policy = adapted(0.0)
    found = measured(policy, merged_into(policy))

    assert found[DIFFER] == 0.0
    assert MISSING not in found


def test_an_adapter_that_is_off_or_merged_leaves_the_weights_as_they_are():
    """Nothing is added twice."""
    policy = adapted()
    engine = merged_into(policy)
    policy.merge_adapter()

    assert measured(policy, engine)[DIFFER] == 0.0
    fresh = adapted()
    with fresh.disable_adapter():
        assert measured(fresh, merged_into(adapted(0.0)))[DIFFER] == 0.0
