"""TRL's GRPO under DDP on two gloo processes: snapshots change nothing, and both ranks go back at one boundary."""

import pytest
from several import several

import rlwatch
from rlwatch.records import CommandStatus

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl_saving")
    return folder, several("trl_saving:grpo", 2, folder)


def test_training_with_snapshots_is_bit_identical_to_training_without(trained):
    """Weights and moments after every step, and the random state, on each rank."""
    for rank in trained[1]:
        assert rank["snapped"]["after"] == rank["plain"]["after"]
        assert rank["snapped"]["random"] == rank["plain"]["random"]
        assert rank["snapped"]["counters"] == {}


def test_both_ranks_go_back_and_forth_at_the_same_boundary(trained):
    """To the beginning, where Adam knew no parameter, and by ``undo`` to what was there before."""
    folder, ranks = trained
    commands = rlwatch.open_store(folder / "store").commands("saved")
    back, undone = (str(one.finished_step) for one in commands)

    assert [(one.kind, one.status) for one in commands] == [
        ("rollback", CommandStatus.DONE),
        ("undo", CommandStatus.DONE),
    ]
    for rank in ranks:
        found = rank["saved"]

        assert found["after"][back] == found["begins"] != found["before"][back]
        assert found["after"][undone] == found["before"][back] != found["before"][undone]
        assert found["counters"] == {}
