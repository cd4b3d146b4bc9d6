"""rlwatch in a worker of verl whose actor is Megatron's: two ranks, tensor-parallel or data-parallel, beside one that holds all.

``make nightly ARGS="--only megatron"``: Megatron is in no other environment. Only the bridge from Hugging Face's models
and verl's ``forward_backward_batch``, which need GPUs, are not run; see ``megatron_ranks.py`` for what stands in for CUDA.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("megatron_ranks.py")
WAYS = ("tensor parallel", "data parallel", "data parallel, whole gradients")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    out = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=1200, check=False)  # fmt: skip
    written = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in written), out.stderr[-3000:]
    return [json.loads(path.read_text()) for path in written]


@pytest.mark.parametrize("way", WAYS)
def test_norms_of_layers_are_those_of_the_whole_model(ranks, way):
    """Under Megatron's names, from weights cut over ranks, or buffers of gradients of which each rank has a part."""
    oracle = ranks[0]["oracle"]

    for rank in ranks:
        metrics = rank[way]["metrics"]
        layers = {name: value for name, value in metrics.items() if name.startswith("grad_layer/")}
        assert layers == pytest.approx(oracle["layers"], rel=1e-5)
        assert metrics["optim/grad_norm"] == pytest.approx(oracle["norm"], rel=1e-5)
        assert rank[way]["norm"] == pytest.approx(oracle["norm"], rel=1e-5), "as Megatron's own optimizer counts it"
        assert metrics["nonfinite/grad"] == 0


@pytest.mark.parametrize("way", WAYS)
def test_tokens_count_once(ranks, way):
    """Tensor-parallel ranks see the same ones, data-parallel ranks different ones."""
    for rank in ranks:
        for name in ("ratio/max", "ratio/mean"):
            assert rank[way]["metrics"][name] == pytest.approx(rank["oracle"][name], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_to_the_bit(ranks, way):
    """Weights after three steps of Megatron's optimizer, watched or not."""
    assert [(rank[way]["same"], rank[way]["errors"]) for rank in ranks] == [(True, 0)] * 2


def test_a_cut_vocabulary_gives_the_log_probs_and_entropy_of_the_whole_one(ranks):
    """By verl's own operators over the two halves of the logits."""
    for rank in ranks:
        assert rank["cut vocabulary"] == pytest.approx(rank["oracle"]["tokens"], rel=1e-5)


@pytest.mark.parametrize("way", ["reset", "reset, data parallel"])
def test_the_policy_becomes_its_reference(ranks, way):
    """Logits are equal to the bit, also where its weights were offloaded, and where the reference came from disk."""
    for rank in ranks:
        found = rank[way]
        assert found["apart"] > 0.1
        assert found["after"] == 0.0
        assert found["moved on"] > 0.1
        assert found["offloaded"]
        assert found["after, offloaded"] == found["from disk"] == 0.0
        assert found["policy untouched"]
        assert found["report"]["exact"]
        assert found["report"]["tensors"] == 15


@pytest.mark.parametrize("way", ["reset", "reset, data parallel"])
def test_a_cleared_optimizer_goes_on_as_a_new_one(ranks, way):
    """The distributed optimizer has the state of its part of the parameters on each rank."""
    assert [rank[way]["cleared"]["off"] for rank in ranks] == [0.0, 0.0]
    assert sum(rank[way]["cleared"]["parameters"] for rank in ranks) >= 15


def test_what_cannot_be_is_refused_with_the_reason(ranks):
    """A policy that is not finite, a reference that is cut otherwise, stages of a pipeline."""
    for rank in ranks:
        assert "is not finite" in rank["reset"]["not finite"]
        assert "sharded differently" in rank["reset"]["cut otherwise"]
        assert "stages of a pipeline" in rank["stages"]["reason"]
        assert not rank["stages"]["read"]
