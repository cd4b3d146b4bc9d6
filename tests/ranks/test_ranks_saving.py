"""Snapshots by shard on several gloo processes: FSDP2 goes back bit for bit on every rank, or on none."""

import pytest
from saving import BACK, BROKEN, GOOD, GUARD, HOLD, LAST, SKIP, UNDO
from several import each_of

import rlwatch
from rlwatch.records import CommandStatus

pytestmark = pytest.mark.torch
SCENARIOS = {"saving": 2, "failing": 2, "missing": 2, "killed": 3}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Scenario -> its folder and what each rank returned."""
    folders = {name: tmp_path_factory.mktemp(name) for name in SCENARIOS}
    returned = each_of(*((f"saving:{name}", ranks, folders[name]) for name, ranks in SCENARIOS.items()))
    return {name: (folders[name], what) for name, what in zip(SCENARIOS, returned, strict=True)}


@pytest.fixture
def saved(played):
    return [rank["saved"] for rank in played["saving"][1]]


def commands(played, scenario, run):
    store = rlwatch.open_store(played[scenario][0] / "store")
    return [(one.kind, one.status, one.finished_step, one.result) for one in store.commands(run)]


def events(played, scenario, run):
    return rlwatch.open_store(played[scenario][0] / "store").events(run)


def test_training_with_snapshots_is_bit_identical_to_training_without(played):
    """Parameters, moments, rates and random state of every step, on each rank; and snapshots were taken."""
    for rank in played["saving"][1]:
        plain, snapped = rank["plain"], rank["snapped"]

        assert snapped["after"] == plain["after"]
        assert snapped["random"] == plain["random"]
        assert len(snapped["kept"]) > 3
        assert snapped["errors"] == 0


def test_every_rank_keeps_the_same_snapshots(played):
    """Those that rank 0 decided on."""
    ours, theirs = played["saving"][1]

    assert ours["snapped"]["kept"] == theirs["snapped"]["kept"]
    assert ours["saved"]["kept"] == theirs["saved"]["kept"]


def test_every_command_is_done_on_all_ranks(played):
    """The step at which each was asked."""
    answers = commands(played, "saving", "saved")

    assert [answer[:3] for answer in answers] == [
        ("rollback", CommandStatus.DONE, BACK),
        ("undo", CommandStatus.DONE, UNDO),
        ("hold", CommandStatus.DONE, HOLD),
        ("skip-step", CommandStatus.DONE, SKIP),
        ("rollback", CommandStatus.DONE, GOOD),
        ("skip-step", CommandStatus.DONE, GUARD),
    ]
    assert "(good)" in answers[4][3]


def test_weights_and_optimizer_are_those_of_the_snapshot_bit_for_bit(played, saved):
    """On each rank its own shard; undo brings back what was there before; the word for the last good one is rank 0's."""
    done = [event.body["report"] for event in events(played, "saving", "saved") if event.kind == "command"]
    back, undone = done[0], done[1]
    good = next(report for report in done[2:] if "to_step" in report)
    for rank in saved:
        assert rank["after"][str(BACK)] == rank["after"][str(back["to_step"])] != rank["before"][str(BACK)]
        assert undone["to_step"] == BACK
        assert rank["after"][str(UNDO)] == rank["before"][str(BACK)] != rank["before"][str(UNDO)]
        assert rank["after"][str(GOOD)] == rank["after"][str(good["to_step"])] != rank["before"][str(GOOD)]
        assert rank["after"][str(LAST)] != rank["after"][str(LAST - 1)]
        assert rank["errors"] == 0


def test_nothing_is_updated_while_batches_are_held_or_an_update_is_left_out(saved):
    """Two batches, then one update, on each rank; afterwards training goes on."""
    for rank in saved:
        after = rank["after"]

        assert after[str(HOLD)] == after[str(HOLD + 1)] == after[str(HOLD + 2)] != after[str(HOLD + 3)]
        assert after[str(SKIP)] == after[str(SKIP + 1)] != after[str(SKIP + 2)]


def test_a_gradient_that_is_nan_on_one_rank_alone_is_left_out_on_all(played, saved):
    """Its shard alone holds the NaN; the update after it is made, and the end says how many were left out."""
    for rank in saved:
        after = rank["after"]

        assert after[str(GUARD)] == after[str(BROKEN)] != after[str(BROKEN + 1)] != after[str(LAST)]
    ended = [event.body["report"] for event in events(played, "saving", "saved") if event.kind == "command"][-1]
    assert (ended["skipped"], ended["of"]) == (1, 2)


def test_rlwatchs_own_order_for_a_snapshot_is_not_told_as_a_command(played):
    """Nobody sent it; the event of the first one says what is kept."""
    told = events(played, "saving", "snapped")

    assert [event.kind for event in told if event.kind in ("command", "snapshots")] == ["snapshots"]


@pytest.mark.parametrize(
    ("scenario", "status", "why"),
    [
        ("failing", CommandStatus.FAILED, "rank 1"),
        ("missing", CommandStatus.REJECTED, "rank 1: no snapshot of step 0 is kept"),
        ("killed", CommandStatus.REJECTED, "rank 2"),
    ],
)
def test_where_one_rank_cannot_none_does(played, scenario, status, why):
    """It fails in the middle of its writes, lacks the snapshot, or dies there: the others hold what they held before."""
    (answer,) = commands(played, scenario, scenario)

    assert (answer[0], answer[1], answer[2]) == ("rollback", status, 3)
    assert why in answer[3]
    for rank in played[scenario][1]:
        if rank is None:
            continue
        assert rank["after"]["3"] == rank["before"]["3"] != rank["after"]["0"]
    assert [rank is None for rank in played[scenario][1]] == [False] * (SCENARIOS[scenario] - 1) + [
        scenario == "killed"
    ]
