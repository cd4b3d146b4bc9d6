"""A plain Trainer under DDP on two gloo processes: one loss, one norm, bit-identical training, one end."""

import math

import pytest
import trainer_training
from several import recorded, several

import rlwatch

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    return folder, several("trainer_training:ddp", 2, folder)


def test_watching_both_ranks_changes_no_bit_of_training(trained):
    """Parameters and random state, on each rank."""
    for rank in trained[1]:
        assert rank["watched"]["parameters"] == rank["unwatched"]["parameters"]
        assert rank["watched"]["random"] == rank["unwatched"]["random"]
        assert rank["watched"]["counters"] == {}


def test_the_raw_loss_is_that_of_both_ranks_as_the_trainer_logs_it(trained):
    """Summed over micro-batches, averaged over ranks."""
    steps = recorded(trained[0] / "store", "watched")

    assert list(steps) == list(range(1, 9))
    for metrics in steps.values():
        assert metrics["loss/raw"] == pytest.approx(metrics["loss"], rel=1e-4)


def test_gradients_are_counted_once(trained):
    """After DDP has averaged them they are the same on both ranks."""
    for metrics in recorded(trained[0] / "store", "watched").values():
        layers = [value for name, value in metrics.items() if name.startswith("grad_layer/")]

        assert math.hypot(*layers) == pytest.approx(metrics["grad_norm"], rel=1e-4)
        assert metrics["optim/grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_both_ranks_stop_at_the_same_step(trained):
    """Rank 0 was asked; no rank waits for one that has left."""
    folder, ranks = trained
    (command,) = rlwatch.open_store(folder / "store").commands("stopped")

    # asked at 4; where a rank has passed that boundary already, all stop at the next one
    (steps,) = {rank["stopped"]["steps"] for rank in ranks}
    assert 4 <= steps < trainer_training.STEPS
    assert (command.status, command.finished_step) == ("done", steps)
