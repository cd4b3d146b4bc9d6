"""Spikes localised over two ranks of verl's FSDP2 engine: shards of one gradient, a culprit on one of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlwatch.integrations.step_tally import StepTally, merge_workers

SCRIPT = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def ranks(policy):
    """What each rank found, and whether it trained as without."""
    command = [sys.executable, str(SCRIPT), str(policy)]
    out = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    written = [policy / f"rank{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in written), out.stderr[-3000:]
    return [json.loads(path.read_text()) for path in written]


def test_the_culprit_is_named_with_its_rank(ranks):
    """Rank 1 has it; rank 0 tells of the step, in the norm that both have a share of."""
    ours, theirs = (rank["found"][0] for rank in ranks)

    assert theirs["culprits"][0] == [1, 3, 1]
    assert ours["event"]["cause"] == "token ratio"
    assert abs(float(ours["event"]["gap"])) < 1e-3
    assert int(ours["event"]["tokens"]) == 4 * 4 + 4 * 5
    assert theirs["event"] == {}, "told once"


def test_a_nan_on_one_rank_is_traced_to_it(ranks):
    """All gradients are NaN on both ranks by then."""
    ours, theirs = (rank["found"][1] for rank in ranks)

    assert (ours["event"]["method"], ours["event"]["norm"]) == ("trace", "nan")
    assert ours["culprits"] == []
    assert theirs["culprits"][0][:2] == [1, 3]


def test_the_change_of_the_weights_is_that_of_the_whole_ones(ranks):
    """By layer and altogether, in float64, of shards that no rank gathers to measure them."""
    parcels = {rank: bytes.fromhex(one["moved"]["parcel"]) for rank, one in enumerate(ranks)}
    metrics = merge_workers(0, StepTally(), parcels).metrics
    alone = merge_workers(0, StepTally(), {0: parcels[0]}).metrics
    exact = ranks[0]["moved"]["exact"]

    assert {name: metrics[name] for name in exact} == pytest.approx(exact, rel=0.2)
    small = {name: value for name, value in exact.items() if name.startswith("update_layer/") and name.endswith("norm")}
    assert {name: metrics[name] for name in small} == pytest.approx(small, rel=1e-4)
    assert not exact.keys() & alone.keys()


def test_training_goes_on_bit_for_bit(ranks):
    """Shards of parameters and of Adam's moments, and the random state, with every step looked at or none."""
    assert [rank["same"] for rank in ranks] == [True, True]
    assert all(rank["compared"] > 50 for rank in ranks)


def test_no_error_was_swallowed(ranks):
    """On either rank; each of the three steps was localised."""
    assert [[found["errors"] for found in rank["found"]] for rank in ranks] == [[0, 0, 0]] * 2
