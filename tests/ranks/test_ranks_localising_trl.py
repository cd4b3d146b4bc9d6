"""TRL's GRPO under DDP on two gloo processes, localised at every step: the culprit of either rank, the same training."""

import math

import pytest
from several import recorded, several
from trl_localising import PLANTED_AT

import rlwatch
from rlwatch.records import CULPRITS, LOCALISED

pytestmark = pytest.mark.torch
STEPS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return folder, several("trl_localising:grpo", 2, folder)


@pytest.fixture(scope="module")
def store(trained):
    return rlwatch.open_store(trained[0] / "store")


def events(store, run_id):
    return [event for event in store.events(run_id) if event.kind == LOCALISED]


def test_training_is_bit_identical_with_and_without(trained):
    """Parameters, moments, and the state of three random generators, on each rank."""
    for rank in trained[1]:
        assert rank["every"]["left"] == rank["never"]["left"]
        assert rank["every"]["counters"] == {}


def test_every_step_is_attributed_completely(trained, store):
    """To the norm that the trainer itself reports, within 1e-3; once for both ranks, and never where nobody asked."""
    norms = recorded(trained[0] / "store", "every")
    found = events(store, "every")

    assert events(store, "never") == []
    assert [event.step for event in found] == STEPS
    for event in found:
        assert event.body["complete"], event.body
        assert abs(event.body["gap"]) <= 1e-3
        assert event.body["norm"] == pytest.approx(norms[event.step]["optim/grad_norm"], rel=1e-5)
        assert event.body["tokens"] > 0


def test_a_token_planted_on_the_other_rank_is_named(trained, store):
    """By its rank, its micro-batch there, its place and its id."""
    (place,), (token,) = trained[1][1]["every"]["planted"]
    found = [batch for batch in store.spikes("every") if batch.reason == CULPRITS and batch.step == PLANTED_AT]
    (theirs,) = [batch for batch in found if batch.rank == 1]
    worst = next(event for event in events(store, "every") if event.step == PLANTED_AT).body["culprits"][0]

    assert (worst["rank"], worst["microbatch"], worst["row"], worst["position"]) == (1, 1, *place)
    assert theirs.columns["token_id"][0] == token
    assert math.log(theirs.columns["ratio"][0]) == pytest.approx(5.0, abs=0.5)
    assert theirs.columns["cause"][0] == "token ratio"
    assert theirs.columns["verified"][0] == 1
    assert theirs.columns["own_norm"][0] >= abs(theirs.columns["contribution"][0]) * 0.999
