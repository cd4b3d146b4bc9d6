"""Gradients that the real DeepSpeed parts over two ranks (ZeRO-1, -2), read before its engine steps."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 2


@pytest.fixture(scope="module", params=[1, 2], ids=["ZeRO-1", "ZeRO-2"])
def ranks(request, tmp_path_factory):
    """What each rank left."""
    folder = tmp_path_factory.mktemp("zero")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    around = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("zero_rank.py")), str(request.param), str(folder)]
    started = [
        subprocess.Popen(
            command, env={**around, "RANK": str(i), "LOCAL_RANK": str(i)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(RANKS)
    ]  # fmt: skip
    said = [one.communicate(timeout=600)[0] for one in started]
    assert [one.returncode for one in started] == [0] * RANKS, said
    return [json.loads((folder / f"rank{i}.json").read_text()) for i in range(RANKS)]


def flat(values):
    return [x for part in values for x in flat(part)] if isinstance(values, list) else [values]


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert flat(found[name]) == pytest.approx(flat(values), rel=1e-5, abs=1e-7)


def test_squares_of_all_ranks_add_up_to_those_of_the_whole_gradient(ranks):
    """Layer by layer, without a message; each rank has a part of it."""
    parts = [rank["zero"]["here"] for rank in ranks]
    total = {layer: sum(part[layer] for part in parts) for layer in parts[0]}

    assert total == pytest.approx(ranks[0]["plain"]["here"], rel=1e-5)
    assert all(0 < sum(part.values()) < sum(total.values()) for part in parts)


def test_gradients_are_whole_inside_and_parted_again_afterwards(ranks):
    """As plain torch has them, on both ranks; no parameter keeps one."""
    for rank in ranks:
        assert_alike(rank["zero"]["whole"], rank["plain"]["whole"])
        assert rank["zero"]["left"] == []


def test_the_engine_steps_as_ever_and_leaves_nothing_to_read(ranks):
    """The weights are those of a plain step."""
    for rank in ranks:
        assert_alike(rank["zero"]["weights"], rank["plain"]["weights"])
        assert rank["zero"]["after"] is None
