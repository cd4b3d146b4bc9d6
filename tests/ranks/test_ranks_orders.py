"""Commands to TRL's GRPO under DDP on two gloo processes: every rank does the same at the same step."""

import pytest
from several import recorded, several

import rlwatch
from rlwatch.records import CommandStatus

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    return folder, several("trl_orders:orders", 2, folder)


def test_every_command_is_done_once_at_the_step_it_was_asked_for(ordered):
    """In the order they were asked."""
    store = rlwatch.open_store(ordered[0] / "store")
    answers = [(c.kind, c.status, c.finished_step) for c in store.commands("told")]

    assert answers == [
        ("reset-reference", CommandStatus.DONE, 2),
        ("lower-lr", CommandStatus.DONE, 3),
        ("set-kl-coef", CommandStatus.DONE, 3),
        ("save-checkpoint", CommandStatus.DONE, 3),
        ("pause", CommandStatus.DONE, 4),
        ("resume", CommandStatus.DONE, 4),
        ("stop", CommandStatus.DONE, 6),
    ]


def test_both_ranks_used_the_same_rate_coefficient_and_last_step(ordered):
    """The rate is back after step 4, when its limit is over."""
    for rank in ordered[1]:
        told = rank["told"]
        assert told["rates"] == pytest.approx([1e-3, 1e-3, 1e-3, 1e-4, 1e-3, 1e-3])
        assert told["coefficients"] == [0.1, 0.1, 0.1, 0.5, 0.5, 0.5]
        assert told["steps"] == 6


def test_both_ranks_waited_while_the_run_was_paused(ordered):
    """Until rank 0 was told to go on."""
    assert all(rank["told"]["rounds"] >= 1 for rank in ordered[1])
    assert ordered[1][0]["told"]["rounds"] == 2


def test_a_resume_takes_up_the_reference_on_both_ranks(ordered):
    """And the rate and the coefficient with it: nothing is lost, nothing repeated."""
    folder, ranks = ordered
    store = rlwatch.open_store(folder / "store")
    (restored,) = [event for event in store.events("resumed") if event.kind == "reference_restored"]
    references = {rank[run]["reference"] for rank in ranks for run in ("told", "resumed")}

    assert len(references) == 1
    assert (restored.step, restored.body["reset_step"]) == (3, 2)
    for rank in ranks:
        assert rank["resumed"]["rates"] == pytest.approx([1e-4, 1e-3, 1e-3, 1e-3, 1e-3])
        assert rank["resumed"]["coefficients"] == [0.5] * 5
    told, resumed = (recorded(folder / "store", run) for run in ("told", "resumed"))
    assert resumed[5]["policy/kl_ref_k3"] == pytest.approx(told[5]["policy/kl_ref_k3"], rel=1e-5)
