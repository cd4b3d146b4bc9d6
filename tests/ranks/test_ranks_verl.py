"""Two ranks of FSDP1, verl's default: gradient norms by layer, and copying a policy into its reference."""

import flattened
import pytest
from several import several

from rlwatch.integrations.step_tally import StepTally, merge_workers


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    return several("flattened:gradients", 2, tmp_path_factory.mktemp("gradients"))


def put_together(shares):
    return merge_workers(1, StepTally(), {rank: bytes.fromhex(share) for rank, share in enumerate(shares)}).metrics


@pytest.mark.torch
@pytest.mark.parametrize("way", ["full", "named", "unsharded"])
def test_shards_make_the_norms_of_whole_layers(shipped, way):
    """Flattened over ranks, with or without names, or copied on each: the norms of the model in one piece."""
    got = put_together([rank["shares"][way] for rank in shipped])

    layers = {name.removeprefix("grad_layer/"): v for name, v in got.items() if name.startswith("grad_layer/")}
    assert layers == pytest.approx(flattened.whole_norms(), rel=1e-5)
    assert got["nonfinite/grad"] == 0


@pytest.mark.torch
def test_half_of_the_shards_are_no_norm(shipped):
    """A worker that does not answer: nothing is told, rather than too small a number."""
    got = put_together([shipped[0]["shares"]["full"]])

    assert not [name for name in got if name.startswith("grad_layer/")]


@pytest.mark.torch
def test_broken_gradients_are_counted_by_unit(shipped):
    """Two layers and what lies outside them."""
    assert put_together([rank["broken"] for rank in shipped])["nonfinite/grad"] == 3


@pytest.mark.torch
def test_without_gradients_there_is_nothing_to_tell(shipped):
    """Before the first backward pass."""
    assert put_together([rank["nothing"] for rank in shipped]) == {}


@pytest.mark.torch
def test_each_rank_copies_its_own_shards(tmp_path):
    """No rank sends anything, and the reference computes what the policy does."""
    for rank in several("flattened:reset", 2, tmp_path / "reset"):
        assert rank["before"] > 0.1
        assert rank["after"] == 0.0
