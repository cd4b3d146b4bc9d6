"""Two processes on one GPU under DDP: the same training as unwatched, the numbers of one process, one reset for both.

Without a CUDA device these are skipped, and pytest's summary says so.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from several import recorded
from training import RESET_AT, STEPS, train, whole

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: ranks on a GPU are not tested here"),
]
SCRIPT = Path(__file__).parent / "two_ranks.py"
OWN = {"time/step", "rlwatch/ranks"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(where, what each rank returned)."""
    folder = tmp_path_factory.mktemp("two")
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), "2", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=180)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    returned = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    sys.stdout.write(f"the backend was {returned[0]['backend']}\n")
    return folder, returned


def test_watching_changes_no_bit_of_training(two):
    """A reset of the reference included, which both ranks do at the same step."""
    for one in two[1]:
        unwatched, seen = one["trained"]
        assert {k: seen[k] for k in ("parameters", "reference", "random")} == {
            k: unwatched[k] for k in ("parameters", "reference", "random")
        }
        assert seen["reset"] == [RESET_AT]


def test_every_metric_is_that_of_one_process_on_the_cpu(two, tmp_path):
    """Token statistics, loss and gradients by layer."""
    train(0, 1, tmp_path, whole, watched=True)
    one, both = recorded(tmp_path / "store", "whole"), recorded(two[0] / "store", "replicated")

    assert list(both) == list(one) == list(range(1, STEPS + 1))
    expected = one[1]
    assert both[1].keys() - OWN == expected.keys() - OWN
    for name in expected.keys() - OWN:
        assert both[1][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
