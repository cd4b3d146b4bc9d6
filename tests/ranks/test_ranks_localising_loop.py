"""Loops of one's own on several ranks: they localise together or not at all, and training goes on as if unwatched."""

import math

import pytest
from localising_loop import FAILS_AT, PLANTED, STEPS, WAIT_S
from several import each_of

import rlwatch
from rlwatch.records import CULPRITS, LOCALISED, RESPONSES

pytestmark = pytest.mark.torch
EVERY_STEP = list(range(1, STEPS + 1))
WRAPS = ["replicated", "sharded"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Scenario -> its folder and what each rank returned."""
    scenarios = {"loops": 2, "dying": 3}
    folders = {name: tmp_path_factory.mktemp(name) for name in scenarios}
    returned = each_of(*((f"localising_loop:{name}", ranks, folders[name]) for name, ranks in scenarios.items()))
    return {name: (folders[name], what) for name, what in zip(scenarios, returned, strict=True)}


def steps(rank):
    return [report["step"] for report in rank["reports"]]


def unharmed(ranks, name):
    """Weights, moments and random state of every rank are those of training unwatched."""
    return [rank[name]["left"] == rank["unwatched"]["left"] for rank in ranks]


@pytest.mark.parametrize("wrap", WRAPS)
def test_all_ranks_report_the_same_of_every_step(played, wrap):
    """Although their tokens differ, and the clock of one says that there is no time: that of rank 0 decides."""
    first, second = (rank[wrap]["localised"] for rank in played["loops"][1])

    assert steps(first) == EVERY_STEP
    assert first["reports"] == second["reports"]
    assert all(abs(report["gap"]) < 1e-3 for report in first["reports"])
    assert first["warned"] == second["warned"] == []
    assert first["errors"] == second["errors"] == 0


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_planted_token_of_another_rank_is_the_worst(played, wrap):
    """It is the last rank's, where its rows begin anew, and most of the norm."""
    report = played["loops"][1][0][wrap]["localised"]["reports"][PLANTED["step"] - 1]
    worst = report["culprits"][0]

    assert worst["at"] == [1, 0, PLANTED["row"] - 5, PLANTED["position"]]
    assert worst["cause"] == "reward outlier"
    assert worst["contribution"] / report["norm"] > 0.9
    assert worst["own"] >= worst["contribution"] * 0.999


@pytest.mark.parametrize("wrap", WRAPS)
def test_rank_0_records_the_culprits_of_all_with_their_rank(played, wrap):
    """And one event for each step."""
    folder, ranks = played["loops"]
    store = rlwatch.open_store(folder / "store")
    found = [batch for batch in store.spikes(wrap) if batch.step == PLANTED["step"]]
    events = [event for event in store.events(wrap) if event.kind == LOCALISED]

    assert [event.step for event in events] == EVERY_STEP
    worst = next(batch for batch in found if batch.reason == CULPRITS and batch.rank == 1)
    assert worst.columns["position"][0] == PLANTED["position"]
    assert any(batch.reason == RESPONSES and batch.rank == 1 for batch in found)
    for event, report in zip(events, ranks[0][wrap]["localised"]["reports"], strict=True):
        assert event.body["norm"] == report["norm"]
        assert [body["rank"] for body in event.body["culprits"]] == [c["at"][0] for c in report["culprits"]][:5]


@pytest.mark.parametrize("wrap", WRAPS)
def test_training_is_bit_identical_with_and_without(played, wrap):
    """On every rank."""
    assert unharmed([rank[wrap] for rank in played["loops"][1]], "localised") == [True, True]


@pytest.mark.parametrize(("wrap", "how"), [*((wrap, "failing") for wrap in WRAPS), ("replicated", "failing late")])
def test_a_rank_that_fails_in_the_middle_ends_localisation_for_all(played, wrap, how):
    """At once, with one warning each, and training goes on bit for bit."""
    ranks = [rank[wrap] for rank in played["loops"][1]]

    assert unharmed(ranks, how) == [True, True]
    for rank in ranks:
        assert steps(rank[how]) == list(range(1, FAILS_AT))
        assert len(rank[how]["warned"]) == rank[how]["errors"] == 1
        assert "localised no more" in rank[how]["warned"][0]
    assert "injected" in ranks[1][how]["warned"][0]


def test_a_rank_that_does_not_come_is_waited_for_once(played):
    """For as long as the group allows; then nobody localises, and training goes on bit for bit."""
    ranks = [rank["replicated"] for rank in played["loops"][1]]

    assert unharmed(ranks, "missing") == [True, True]
    assert [steps(rank["missing"]) for rank in ranks] == [list(range(1, FAILS_AT))] * 2
    assert ranks[0]["missing"]["slowest"] >= WAIT_S
    assert len(ranks[0]["missing"]["warned"]) == 1


def test_where_a_rank_was_never_linked_nobody_localises(played):
    """Every rank says so once, waits for nothing, and trains as if unwatched."""
    ranks = [rank["replicated"] for rank in played["loops"][1]]

    assert unharmed(ranks, "unlinked") == [True, True]
    for rank in ranks:
        said = [text for text in rank["unlinked"]["warned"] if "does not localise" in text]
        assert len(said) == 1
        assert "not all linked" in said[0]
        assert rank["unlinked"]["reports"] == []
        assert rank["unlinked"]["errors"] == 0


def test_a_killed_rank_hangs_nobody(played):
    """The others hear of it, go on without localisation, and train as if unwatched."""
    *left, killed = played["dying"][1]

    assert killed is None
    assert unharmed(left, "dying") == [True, True]
    for rank in left:
        assert steps(rank["dying"]) == list(range(1, FAILS_AT))
        assert rank["dying"]["errors"] == 1
        assert sum("localised no more" in text for text in rank["dying"]["warned"]) == 1
        assert math.isfinite(rank["dying"]["reports"][0]["norm"])
