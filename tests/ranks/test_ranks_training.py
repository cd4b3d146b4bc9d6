"""DDP and FSDP2 on two and four gloo processes: the same numbers as one process, the same training as unwatched."""

import pytest
from several import each_of, recorded
from training import RESET_AT, STEPS, train, whole

import rlwatch
from rlwatch.control import mailbox
from rlwatch.records import CommandStatus

pytestmark = pytest.mark.torch
WRAPS = ["replicated", "sharded"]
OWN = {"time/step", "rlwatch/ranks"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    before, mailbox.POLL_S = mailbox.POLL_S, 0.0
    train(0, 1, folder, whole, watched=True)
    mailbox.POLL_S = before
    return recorded(folder / "store", "whole")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folders = {ranks: tmp_path_factory.mktemp(f"training{ranks}") for ranks in (2, 4)}
    returned = each_of(*(("training:training", ranks, folder) for ranks, folder in folders.items()))
    return {ranks: (ranks, folder, what) for (ranks, folder), what in zip(folders.items(), returned, strict=True)}


@pytest.fixture(params=[2, 4])
def many(request, played):
    """(how many, where, what each rank returned)."""
    return played[request.param]


@pytest.mark.parametrize("wrap", WRAPS)
def test_watching_changes_no_bit_of_training(many, wrap):
    """Parameters, reference and random state of every rank, a reset of the reference included."""
    for rank in many[2]:
        unwatched, watched = rank[wrap]

        assert {name: watched[name] for name in ("parameters", "reference", "random")} == {
            name: unwatched[name] for name in ("parameters", "reference", "random")
        }


@pytest.mark.parametrize("wrap", WRAPS)
def test_every_metric_is_that_of_one_process(many, one_process, wrap):
    """Token statistics, loss and gradients per layer, of shards or of copies.

    To the last bits of single precision in the first step, before rounding of the gradients has gone through Adam.
    """
    ranks, folder, _ = many
    steps = recorded(folder / "store", wrap)

    assert list(steps) == list(one_process) == list(range(1, STEPS + 1))
    for step, expected in one_process.items():
        assert steps[step]["rlwatch/ranks"] == ranks
        assert steps[step].keys() - OWN == expected.keys() - OWN
        for name in expected.keys() - OWN:
            close = pytest.approx(expected[name], rel=2e-6 if step == 1 else 2e-4, abs=1e-6)
            assert steps[step][name] == close, (step, name)


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_norms_of_the_layers_are_those_of_torch(many, wrap):
    """Their squares add up to what clip_grad_norm_ found over all ranks, before it clipped."""
    _, folder, _ = many
    for metrics in recorded(folder / "store", wrap).values():
        layers = {name: value for name, value in metrics.items() if name.startswith("grad_layer/")}

        assert len(layers) == 4
        assert sum(v**2 for v in layers.values()) ** 0.5 == pytest.approx(metrics["norm_of_torch"], rel=1e-5)
        assert metrics["optim/grad_norm"] == pytest.approx(metrics["norm_of_torch"], rel=1e-5)


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_change_of_the_weights_is_that_of_the_gathered_ones(many, wrap):
    """By layer, altogether and of the head, in float64, from shards that no rank gathers to measure them."""
    _, folder, returned = many
    steps = recorded(folder / "store", wrap)

    for step, expected in enumerate(returned[0][wrap][0]["changes"], 1):
        assert {name: steps[step][name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_command_acts_on_all_ranks_at_the_same_step_or_not_at_all(many, wrap):
    """Every rank's reference equals its policy after the same step, and Adam begins anew there."""
    _, folder, returned = many
    store = rlwatch.open_store(folder / "store")
    (command,) = store.commands(wrap)
    (event,) = [event for event in store.events(wrap) if event.kind == "reference_reset"]

    assert [rank[wrap][1]["reset"] for rank in returned] == [[RESET_AT]] * len(returned)
    assert [rank[wrap][1]["lefts"] for rank in returned] == [[0]] * len(returned)
    assert (command.status, command.finished_step) == (CommandStatus.DONE, RESET_AT)
    assert event.step == RESET_AT
    assert event.body["exact"]
