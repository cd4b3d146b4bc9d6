"""``rlwatch.Watcher`` in a loop over Megatron's models: two ranks, of each way to share one, beside one that holds all.

``make nightly ARGS="--only megatron"``: Megatron is in no other environment. See ``megatron_loop.py`` for the loop.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("megatron_loop.py")
KINDS = {
    "tensor parallel": "plain",
    "tensor parallel, tied": "tied",
    "tensor parallel, held": "plain",
    "data parallel": "plain",
    "data parallel, held": "plain",
    "data parallel, whole gradients": "plain",
    "experts": "experts",
    "experts, whole gradients": "experts",
}
"""Way to share a model -> what the rank that holds all of it trains. "held": by Megatron's DDP and optimizer."""
OTHERWISE = ("time/", "rlwatch/", "grad_norm_of_megatron")
"""What is not the same on one rank and on two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    out = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(folder):
    return json.loads((folder / "alone.json").read_text())


@pytest.mark.parametrize("way", KINDS)
def test_norms_of_layers_are_those_of_the_whole_model(ranks, alone, way):
    """Each weight once: pieces of matrices, copies of norms, tied embeddings, experts that only one rank has."""
    oracle, metrics = alone[KINDS[way]], ranks[0][way]["metrics"]
    layers = {name: value for name, value in metrics.items() if name.startswith("grad_layer/")}

    assert layers == pytest.approx(oracle["layers"], rel=1e-5)
    assert metrics["optim/grad_norm"] == pytest.approx(oracle["norm"], rel=1e-5)
    assert metrics["nonfinite/grad"] == 0
    if metrics["grad_norm_of_megatron"]:
        assert metrics["grad_norm_of_megatron"] == pytest.approx(oracle["norm"], rel=1e-5), "as its optimizer counts it"


@pytest.mark.parametrize("way", KINDS)
def test_everything_else_is_measured_as_on_one_rank(ranks, alone, way):
    """Tokens, rewards, groups: tensor-parallel ranks see the same ones, data-parallel ranks different ones."""
    shared, whole = ({k: v for k, v in m.items() if not k.startswith(OTHERWISE)} for m in (ranks[0][way]["metrics"], alone[KINDS[way]]["metrics"]))  # fmt: skip

    assert len(whole) > 40
    assert shared == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("way", KINDS)
def test_training_is_the_same_to_the_bit(ranks, way):
    """Weights after three steps, watched or not; nothing refused, nothing failed."""
    assert [(rank[way]["same"], rank[way]["counters"]) for rank in ranks] == [(True, {})] * 2


def test_a_broken_gradient_is_counted_wherever_it_lies(ranks):
    """In the half of a matrix on the second rank; and in an expert of each rank, which are two by one name."""
    layers = {name: value for name, value in ranks[0]["broken"]["metrics"].items() if name.startswith("grad_layer/")}

    assert [name for name, value in layers.items() if value != value] == ["grad_layer/decoder.layers.1"]
    assert ranks[0]["broken"]["metrics"]["nonfinite/grad"] == 1
    assert ranks[0]["broken experts"]["metrics"]["nonfinite/grad"] == 2


@pytest.mark.parametrize("way", ["reset", "reset, held"])
def test_the_policy_becomes_its_reference(ranks, way):
    """Each rank copies its part; Megatron's optimizer goes on. One file cannot keep the parts, and says so."""
    for rank in ranks:
        found = rank[way]
        assert found["before"] > 0.1
        assert found["after"] == 0.0
        assert (found["report"]["exact"], found["report"]["tensors"]) == (True, 15)
        assert 1 <= found["report"]["cleared"] <= 15
        assert "Megatron cuts the reference over ranks" in found["kept"]


def test_what_cannot_be_measured_is_refused_with_the_reason_and_what_to_do(ranks):
    """Stages of a pipeline: no norm of a layer, the norm that the loop was given, and tokens of the last stage once."""
    metrics = ranks[0]["stages"]["metrics"]

    for rank in ranks:
        assert rank["stages"]["refused"] == {"refused": 1}
        assert "stages of a pipeline" in rank["stages"]["why"]
        assert "step(grad_norm=)" in rank["stages"]["why"]
    assert not [name for name in metrics if name.startswith("grad_layer/")]
    assert metrics["optim/grad_norm"] == 7.0
    assert metrics["policy/logp_mean"] < 0
    assert metrics["reward/std"] > 0


def test_what_would_read_a_part_of_the_gradient_is_refused_at_set_up(ranks):
    """Localisation, layer-wise clipping, and a model whose DDP lies around it."""
    for rank in ranks:
        assert "localise: Megatron" in rank["refused"]["localise"]
        assert all("OptimizerConfig(clip_grad=)" in reason for reason in rank["refused"]["clip"])
        assert "buffers that the model does not know" in rank["refused"]["inside"]
