"""What the newest rows say before there are enough of them to tell a fall."""

import random

import pytest
from exact_runs import alarms, exact

from rlwatch.detectors.reward.reward_drop import RewardDrop


def rewards(*, noise=0.09, level=0.7, at=70, after=(0.87, 0.65, 0.25, 0.11), length=80, seed=0):
    """A level that falls within four rows to a tenth, all by itself."""
    chance = random.Random(seed)

    def reward(step):
        share = 1.0 if step < at else after[min(step - at, len(after) - 1)]
        return level * share + chance.gauss(0.0, noise * share)

    return exact({"reward/mean": reward}, length=length)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [3, 4, 6])
def test_a_log_that_ends_in_rows_at_a_tenth_of_the_level_has_a_remark_on_them(rows, seed):
    """Three rows are too few for an alarm; they are not nothing."""
    held = []
    detector = RewardDrop()
    for row in rewards(length=70 + rows, seed=seed):
        held = detector.update(row)

    assert [finding.kind for finding in held] == ["reward_drop"]
    assert held[0].severity.value == "info"
    assert 60 <= held[0].onset_step <= 72
    assert "too few" in held[0].message


@pytest.mark.parametrize("seed", range(4))
def test_no_remark_on_rows_that_small_batches_have_now_and_then(seed):
    """Eight answers a row, two low ones in a row by chance."""
    chance = random.Random(seed)
    rows = exact({"reward/mean": lambda s: sum(chance.random() < 0.5 for _ in range(8)) / 8}, length=200)

    assert alarms(RewardDrop(), rows) == {}
