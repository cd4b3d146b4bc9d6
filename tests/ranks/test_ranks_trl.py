"""TRL's GRPO under DDP on two gloo processes: both ranks' shares, bit-identical training, a reset on both."""

import pytest
from several import recorded, several

import rlwatch
from rlwatch.control.liveness import stack_of, stalls_of
from rlwatch.export import trace_of
from rlwatch.records import STAGES, STALLED, CommandStatus

pytestmark = pytest.mark.torch
STEPS = [1, 2, 3, 4, 5, 6]
BOUNDARY = 4
"""Two updates of two micro-batches reuse each generation, so that steps 2, 4 and 6 end one; step 3 asked."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return folder, several("trl_training:grpo", 2, folder)


def test_watching_both_ranks_changes_no_bit_of_training(trained):
    """Parameters and the state of three random generators, on each rank."""
    for rank in trained[1]:
        assert rank["watched"]["parameters"] == rank["unwatched"]["parameters"]
        assert rank["watched"]["random"] == rank["unwatched"]["random"]
        assert rank["watched"]["counters"] == {}


def test_statistics_are_those_of_all_tokens_of_both_ranks(trained):
    """A mean over tokens, wherever they are; not a mean of the ranks' means."""
    folder, ranks = trained
    steps = recorded(folder / "store", "watched")

    assert list(steps) == STEPS
    for step, metrics in steps.items():
        total, tokens = (sum(rank["watched"][name][str(step)] for rank in ranks) for name in ("entropy", "tokens"))

        assert metrics["rlwatch/ranks"] == 2
        assert metrics["policy/entropy"] == pytest.approx(total / tokens, rel=1e-6)
        assert metrics["optim/grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)


def test_generations_of_both_ranks_are_one_batch(trained):
    """Rewards and lengths of all responses, each counted once."""
    steps = recorded(trained[0] / "store", "watched")
    generations = [metrics for metrics in steps.values() if "completions/mean_length" in metrics]

    assert generations
    for metrics in generations:
        assert metrics["len/mean"] == pytest.approx(metrics["completions/mean_length"], rel=1e-6)
        assert metrics["len/max"] == metrics["completions/max_length"]
        assert metrics["reward/mean"] == pytest.approx(metrics["reward"], rel=1e-5)


def test_the_layers_add_up_to_the_norm_of_the_trainer(trained):
    """Averaged gradients are the same on both ranks, and counted once."""
    for metrics in recorded(trained[0] / "store", "watched").values():
        squares = [value**2 for name, value in metrics.items() if name.startswith("grad_layer/")]

        assert len(squares) > 2
        assert sum(squares) ** 0.5 == pytest.approx(metrics["optim/grad_norm"], rel=1e-4)


def test_the_reference_is_reset_on_both_ranks_at_the_same_generation_boundary(trained):
    """Asked between two updates of one generation, done after the last of them."""
    folder, ranks = trained
    store = rlwatch.open_store(folder / "store")
    (command,) = store.commands("reset")
    (event,) = [event for event in store.events("reset") if event.kind == "reference_reset"]

    assert [rank["reset"]["equal"] for rank in ranks] == [[BOUNDARY], [BOUNDARY]]
    assert (command.status, command.finished_step, event.step) == (CommandStatus.DONE, BOUNDARY, BOUNDARY)
    assert event.body["exact"]
    assert event.body["kl_before"] is not None
    assert recorded(folder / "store", "reset")[BOUNDARY + 1]["policy/kl_ref_k3"] < 1e-6


def test_each_rank_has_a_track_of_its_stages(trained):
    """What rank 1 did comes with its share of the step."""
    store = rlwatch.open_store(trained[0] / "store")
    found = {(batch.rank, batch.step) for batch in store.spikes("watched", reason=STAGES)}
    trace = trace_of(store, store.run("watched"))
    tracks = {(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"}

    assert found == {(rank, step) for rank in (0, 1) for step in STEPS}
    assert {(rank, stage) for rank in (0, 1) for stage in ("sampling", "reward", "logprobs", "update")} <= tracks


def test_the_rank_whose_reward_function_hangs_is_named_before_the_one_that_waits_for_it(tmp_path):
    """With the stacks of both, in the store that rank 0 writes."""
    ranks = several("trl_training:hangs", 2, tmp_path)
    events = rlwatch.open_store(tmp_path / "store").events("hangs")
    first = {event.body["rank"]: event for event in reversed(events) if event.kind == STALLED}
    cause, waits = stalls_of(list(first.values()), 1)

    assert [rank["steps"] for rank in ranks] == [6, 6]
    assert (cause.body["rank"], cause.body["stage"], cause.body["what"]) == (1, "reward", "starved")
    assert any(line.startswith("judge_that_waits (") for line in stack_of(cause))
    assert (waits.body["rank"], waits.body["what"]) == (0, "waiting")
    assert waits.body["says"].startswith("rank 0 is in stage ")
