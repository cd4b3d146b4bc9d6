"""Layer-wise clipping on several gloo processes: the norms, factors and weights of one process, alike on every rank."""

import math

import pytest
from clipped_training import RULES, SPIKES, STEPS, alone
from several import each_of

pytestmark = pytest.mark.torch
WAYS = [f"{wrap} {rule}" for wrap in ("replicated", "sharded", "hybrid") for rule in RULES]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What every rank returned, by way."""
    folder = tmp_path_factory.mktemp("clipping")
    two, four, trainers = each_of(
        ("clipped_training:loops", 2, folder / "two"),
        ("clipped_training:loops", 4, folder / "four"),
        ("clipped_training:trainers", 2, folder / "trainers"),
    )
    return {way: [rank[way] for rank in ranks] for ranks in (two, four, trainers) for way in ranks[0]}


@pytest.fixture(scope="module")
def one_process():
    return {rule: alone(rule) for rule in RULES}


@pytest.mark.parametrize("way", WAYS)
def test_norms_factors_and_weights_are_those_of_one_process(played, one_process, way):
    """Layer by layer and tensor by tensor, of copies, of shards and of replicated shards, while a layer spikes."""
    expected = one_process[way.split()[1]]
    for rank in played[way]:
        assert rank["groups"] == expected["groups"]
        for ours, theirs in zip(rank["steps"], expected["steps"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        assert rank["weights"] == pytest.approx(expected["weights"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_comes_to_the_same_bits(played, way):
    """Norms, factors, weights and the rule's state: else replicas would drift apart."""
    first, *others = played[way]

    assert all(rank == first for rank in others)


def test_the_spiking_layer_is_the_one_that_is_scaled(one_process):
    """What the tests above compare is a training in which something is clipped."""
    groups = one_process["median"]["groups"]
    for step in SPIKES:
        scales = one_process["median"]["steps"][step - 1][2 + len(groups) :]
        assert min(scales) == scales[groups.index("layers.1")] < 0.2


def test_nan_in_one_element_of_one_shard_breaks_the_layer_on_every_rank(played):
    """Its gradient is set to zero on all of them, and the weights stay finite and alike."""
    first, second = played["broken"]

    assert first["weights"] == second["weights"]
    assert all(map(math.isfinite, first["weights"]))
    assert math.isnan(first["steps"][5][0])
    assert first["steps"][5][2 + len(first["groups"]) :].count(0.0) == 1
    assert str(first["steps"]) == str(second["steps"])


def test_a_resumed_trainer_is_the_one_that_was_never_interrupted(played):
    """On both ranks, though one of them remembered something else: rank 0 reads the checkpoint for all."""
    straight, resumed = played["straight"], played["resumed"]

    assert straight[0] == straight[1] == resumed[0] == resumed[1]
    assert straight[0]["counts"] == {"steps": 6, "clipped": straight[0]["counts"]["clipped"], "nonfinite": 0}
    assert 3 <= straight[0]["counts"]["clipped"] < STEPS
