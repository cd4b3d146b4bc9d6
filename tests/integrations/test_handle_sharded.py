"""A reset of sharded and replicated models: real FSDP2 and DDP, two processes over gloo."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from preloaded import Program

from rlwatch.integrations.checkpoints import TakeUp, read_facts
from rlwatch.integrations.reference import Anchored

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).with_name("sharded_reference.py")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(directory):
    """What each rank found out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        Program(None, directory, script=SCRIPT, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    for process in started:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
    return [torch.load(directory / f"found-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize(
    "what",
    [
        "fsdp2",
        "fsdp2 steps on",
        "root was whole",
        "forward after a forward",
        "whole copies",
        "mixed",
        "ddp",
        "nothing copied",
        "fingerprint changed",
        "kept",
        "order of rank 0 counts",
        "gathered at once",
    ],
)
def test_it_holds_on_every_rank(found, what):
    """Each is described where it is done, in ``sharded_reference``."""
    assert [rank[what] for rank in found] == [True, True]


def test_every_rank_reports_the_same(found):
    """One answer for a person: all tensors, equal fingerprints though the reference is coarser."""
    ours, theirs = (rank["fsdp2 report"] for rank in found)
    assert ours == theirs
    assert (ours["tensors"], ours["exact"], ours["cleared"]) == (5, True, 4)
    assert [rank["fsdp2 state"] for rank in found] == [0, 0]
    assert [rank["ddp cleared"] for rank in found] == [4, 4]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]


def test_what_one_rank_alone_can_see_stops_all(found):
    """A NaN in one shard."""
    assert [rank["not finite"] for rank in found] == [
        "the policy's 'first.weight' is not finite: roll back to a checkpoint instead"
    ] * 2


def test_a_sharded_reference_is_kept_whole_and_may_be_taken_up_by_one_process(found, directory):
    """The number of ranks may change over a resume."""
    from sharded_reference import Net

    assert [rank["kept facts"] for rank in found] == [5, 5]
    checkpoint, reference = directory / "checkpoint-8", Net(1)
    order = TakeUp(lambda: Anchored(Net(0), reference), lambda: True)
    command = order.command(checkpoint, read_facts(checkpoint))
    order.check(command)
    order(command)
    expected = dict(Net(0).named_parameters())

    assert all(torch.equal(tensor, expected[name]) for name, tensor in reference.named_parameters())
    restored = [event for event in found[0]["kept events"] if event[0] == "reference_restored"]
    assert restored[0][1:] == (8, {**restored[0][2], "reset_step": 5, "tensors": 5, "id": "c9"})
