"""Nobody waits because of who comes first: real processes, ``obey()`` first as docs/own-loop.md has it."""

import itertools

import pytest
from arriving import SAVE_AT, STEPS
from several import each_of, recorded

import rlwatch

pytestmark = pytest.mark.torch
SOON_S = 30.0
"""A busy machine may take seconds over anything; whoever waited for another rank in vain took a minute."""
SCENARIOS = {
    "two": ("orders", 2),
    "three": ("orders", 3),
    "asked_before_anybody_came": ("asked_before_anybody_came", 2),
    "absent": ("absent", 3),
    "late": ("late", 3),
    "besieged": ("besieged", 3),
    "secretive": ("secretive", 2),
    "misled": ("misled", 2),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Scenario -> its folder and what each rank returned."""
    folders = {name: tmp_path_factory.mktemp(name) for name in SCENARIOS}
    returned = each_of(*((f"arriving:{what}", ranks, folders[name]) for name, (what, ranks) in SCENARIOS.items()))
    return {name: (folders[name], what) for name, what in zip(SCENARIOS, returned, strict=True)}


def commands(folder, run_id="r"):
    return [(c.status.value, c.result) for c in rlwatch.open_store(folder / "store").commands(run_id)]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (name, "".join(map(str, order)))
        for name, n in (("two", 2), ("three", 3))
        for order in itertools.permutations(range(n))
    ],
)
def test_whoever_comes_first_nobody_waits_and_all_act_at_one_step(played, name, order):
    """Every order of arrival, at set-up and at the boundary of a command: no call took what a vain wait takes, every
    step is whole, and every rank carried the command out, once, at one step: that one or the next.
    """
    folder, returned = played[name]
    ranks = [rank[order] for rank in returned]
    steps = recorded(folder / "store", order)

    assert all(rank["waited"] < SOON_S and rank["setting up"] < SOON_S for rank in ranks)
    assert {step: metrics["rlwatch/ranks"] for step, metrics in steps.items()} == dict.fromkeys(
        range(STEPS), len(ranks)
    )
    ((status, _),) = commands(folder, order)
    assert status == "done"
    (where,) = {tuple(rank["saved"]) for rank in ranks}
    assert where in ((SAVE_AT,), (SAVE_AT + 1,))


def test_a_command_that_comes_before_the_ranks_do_is_refused_and_waits_for_nobody(played):
    """With the number of the rank that is not there."""
    folder, returned = played["asked_before_anybody_came"]

    assert all(rank["waited"] < SOON_S for rank in returned)
    assert [rank["saved"] for rank in returned] == [[], []]
    ((status, reason),) = commands(folder)
    assert (status, reason) == ("rejected", "rank 1 is not connected, and all ranks must act together")


def test_ranks_that_never_call_keep_nobody(played):
    """One without a watcher, one that has one and calls nothing; the command is refused with the reason."""
    folder, (first, _, third) = played["absent"]

    assert first["waited"] < SOON_S
    assert third["finishing"] < SOON_S
    ((status, reason),) = commands(folder)
    assert (status, first["saved"], third["saved"]) == ("rejected", [], [])
    assert reason.startswith("rank 1 is not connected")


def test_a_rank_may_come_when_the_others_have_done_everything(played):
    """None has waited for it, and what it measured is part of every step."""
    folder, returned = played["late"]

    assert all(rank["waited"] < SOON_S for rank in returned)
    assert [m["rlwatch/ranks"] for m in recorded(folder / "store", "r").values()] == [3] * STEPS


def test_strangers_take_neither_the_trainers_files_nor_a_ranks_place(played):
    """300 idle connections to a process that may open 200 files: it writes its checkpoints, and a rank that comes
    afterwards is linked.
    """
    folder, (first, second, stranger) = played["besieged"]

    assert stranger == {"callers": 300, "hosts": ["127.0.0.1"]}
    assert (first["opened"], second["opened"]) == (STEPS, STEPS)
    assert first["waited"] < SOON_S
    assert [m["rlwatch/ranks"] for m in recorded(folder / "store", "r").values()] == [2] * STEPS


def test_ranks_with_another_secret_are_not_linked_and_train_on(played):
    """Only rank 0's own share is recorded; the log says why."""
    folder, returned = played["secretive"]

    assert all(rank["waited"] < SOON_S for rank in returned)
    assert {m["rlwatch/ranks"] for m in recorded(folder / "store", "r").values()} == {1}
    assert "somebody who is not of this run tried to connect" in (folder / "said.txt").read_text()


def test_a_port_that_cannot_be_had_is_an_error_at_set_up(played):
    """Where it was asked for; the other ranks know at once that there is nobody."""
    _, (first, second) = played["misled"]

    assert first["error"].startswith("rank 0 cannot listen for the other ranks at 127.0.0.1:")
    assert second["linked"] is False
