"""A rank that is slow or dies keeps nobody waiting, and what is left is recorded as what it is."""

import time

import pytest
from several import recorded, several

pytestmark = pytest.mark.torch
RANKS = "rlwatch/ranks"


def test_a_slow_rank_is_waited_for_off_the_training_thread(tmp_path):
    """Rank 0 goes on training; every step is whole all the same, and its records keep their order."""
    returned = several("tallying:slow_rank", 2, tmp_path)
    steps = recorded(tmp_path / "store", "r")

    assert all(r["finished"] for r in returned)
    assert {step: metrics[RANKS] for step, metrics in steps.items()} == {1: 2, 2: 2, 3: 2}
    assert [metrics["loss"] for metrics in steps.values()] == [1.0, 2.0, 3.0]


def test_a_killed_rank_hangs_nobody(tmp_path):
    """Rank 0 records every step, says whose share is missing, and no command is carried out without all."""
    start = time.monotonic()
    first, second, third = several("tallying:dying_other", 3, tmp_path)
    steps = recorded(tmp_path / "store", "r")

    assert third is None
    assert time.monotonic() - start < 60
    assert list(steps) == list(range(1, 9))
    assert [steps[step][RANKS] for step in (1, 2, 3)] == [3, 3, 3]
    assert [steps[step][RANKS] for step in (5, 6, 7, 8)] == [2, 2, 2, 2]
    for rank in (first, second):
        assert rank["finished"]
        assert rank["agreed"][:3] == [None] * 3
        assert all(reason.startswith("rank 2 ") for reason in rank["agreed"][4:])
    assert "rank 2 is gone" in (tmp_path / "said.txt").read_text()


def test_the_other_ranks_train_on_when_rank_0_is_killed(tmp_path):
    """Nothing is recorded any more, nothing is heard, and nobody waits."""
    start = time.monotonic()
    first, second, third = several("tallying:dying_first", 3, tmp_path)
    steps = recorded(tmp_path / "store", "r")

    assert first is None
    assert time.monotonic() - start < 60
    assert set(steps) == {1, 2, 3}
    for rank in (second, third):
        assert rank["agreed"][:3] == [None] * 3
        assert set(rank["agreed"][4:]) == {"nothing heard"}
