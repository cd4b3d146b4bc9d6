"""A rank that is slow or dies keeps nobody waiting, and what is left is recorded as what it is."""

import pytest
from several import each_of, recorded

pytestmark = pytest.mark.torch
RANKS = "rlwatch/ranks"
SOON_S = 55.0
"""Steps without arithmetic beside a dead rank, and the end of the run; whoever waited for a word would wait longer."""
SCENARIOS = {"slow_rank": 2, "dying_other": 3, "dying_first": 3}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Scenario -> its folder and what each rank returned."""
    folders = {name: tmp_path_factory.mktemp(name) for name in SCENARIOS}
    returned = each_of(*((f"tallying:{name}", ranks, folders[name]) for name, ranks in SCENARIOS.items()))
    return {name: (folders[name], what) for name, what in zip(SCENARIOS, returned, strict=True)}


def test_a_slow_rank_is_waited_for_off_the_training_thread(played):
    """Rank 0 goes on training; every step is whole all the same, and its records keep their order."""
    folder, returned = played["slow_rank"]
    steps = recorded(folder / "store", "r")

    assert all(r["finished"] for r in returned)
    assert {step: metrics[RANKS] for step, metrics in steps.items()} == {1: 2, 2: 2, 3: 2}
    assert [metrics["loss"] for metrics in steps.values()] == [1.0, 2.0, 3.0]


def test_a_killed_rank_hangs_nobody(played):
    """Rank 0 records every step, says whose share is missing, and no command is carried out without all."""
    folder, (first, second, third) = played["dying_other"]
    steps = recorded(folder / "store", "r")

    assert third is None
    assert list(steps) == list(range(1, 9))
    assert [steps[step][RANKS] for step in (1, 2, 3)] == [3, 3, 3]
    assert [steps[step][RANKS] for step in (5, 6, 7, 8)] == [2, 2, 2, 2]
    for rank in (first, second):
        assert rank["finished"]
        assert rank["seconds"] < SOON_S
        assert rank["agreed"][:3] == [None] * 3
    assert all(reason.startswith("rank 2 ") for reason in first["agreed"][4:])
    assert set(second["agreed"][4:]) == {"nothing heard"}
    assert "rank 2 is gone" in (folder / "said.txt").read_text()


def test_the_other_ranks_train_on_when_rank_0_is_killed(played):
    """Nothing is recorded any more, nothing is heard, and nobody waits."""
    folder, (first, second, third) = played["dying_first"]
    steps = recorded(folder / "store", "r")

    assert first is None
    assert set(steps) == {1, 2, 3}
    for rank in (second, third):
        assert rank["seconds"] < SOON_S
        assert rank["agreed"][:3] == [None] * 3
        assert set(rank["agreed"][4:]) == {"nothing heard"}
