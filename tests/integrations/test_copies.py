"""Copies of what is watched, as Ray Tune, a search and ``copy.deepcopy`` make them: they work, and record nothing."""

import copy
import logging
import pickle

import cloudpickle
import pytest
import torch
from accelerate.state import GradientState
from tiny_trainer import make_trainer
from torch import nn
from transformers import TrainerCallback

import rlwatch
from rlwatch import error_boundary
from rlwatch.integrations.learning_rate import SCALE, StepScale
from rlwatch.integrations.transformers import RLWatchCallback, watch
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "cloudpickle": lambda thing: pickle.loads(cloudpickle.dumps(thing)),
}
ALL = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@pytest.fixture(autouse=True)
def as_before_any_training():
    GradientState._reset_state()  # after a training accelerate's own state, which is shared, cannot be pickled


def steps(store, run):
    return [record.step for record in open_store(store).records(run.info.run_id)]


@ALL
def test_a_copy_of_a_run_knows_its_name_and_records_nothing(tmp_path, caplog, copied):
    """Said once, however many copies there are."""
    store = str(tmp_path / "runs")
    with caplog.at_level(logging.WARNING, "rlwatch"), rlwatch.init(store=store, name="mine", system=False) as run:
        run.log({"kl": 1.0}, step=1)
        for twin in (copied(run), copied(run)):
            twin.log({"kl": 2.0}, step=2)
            twin.event("note", 2)
            assert (twin.info, twin.active, twin.commands(), twin.flush(), twin.finish()) == (
                run.info,
                False,
                [],
                True,
                True,
            )
        run.log({"kl": 3.0}, step=3)

    assert steps(store, run) == [1, 3]
    assert len([r for r in caplog.records if "a copy of a run" in r.getMessage()]) <= 1


def test_that_copies_record_nothing_is_said_once_of_each_kind(caplog):
    """With what to do."""
    with caplog.at_level(logging.WARNING, "rlwatch"):
        for _ in range(3):
            error_boundary.copied("thing of this test", "make another")

    assert [r.getMessage() for r in caplog.records] == [
        "a copy of a thing of this test records nothing, here and in other processes; make another"
    ]


@ALL
def test_a_copy_of_a_watcher_computes_and_does_nothing_else(tmp_path, copied):
    """The loop that holds it goes on as it is."""
    store, model = str(tmp_path / "runs"), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rlwatch.Watcher(model, optimizer, store=store, localise=True, system=False) as watcher:
        watcher.observe(logp=torch.tensor([[-0.7, -1.2]]), mask=torch.tensor([[1, 0]]))
        twin = copied(watcher)
        assert isinstance(twin, rlwatch.Watcher)
        with twin:
            twin.obey()
            assert twin.forward(lambda x: x + 1, 2) == 3
            twin.observe(logp=torch.tensor([[-0.7, -1.2]]), mask=torch.tensor([[1, 0]]))
            twin.gradients()
            twin.step(1, loss=5.0)
            twin.saved(tmp_path)
            assert (twin.should_stop, twin.unavailable, twin.state_dict()["run_id"]) == (
                False,
                {},
                watcher.run.info.run_id,
            )
        watcher.step(1, loss=0.3)
        watcher.step(2, loss=0.2)

    assert steps(store, watcher.run) == [1, 2]
    assert twin.run.counters.snapshot() == {}


@ALL
def test_a_copy_of_a_watched_trainer_trains_itself_and_as_one_that_nobody_watches(tmp_path, copied):
    """Not the trainer it was copied from; and it can be watched."""
    store = str(tmp_path / "runs")
    trainer, plain = make_trainer(tmp_path), make_trainer(tmp_path / "plain")
    run = watch(trainer, store=store, system=False)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    twin, again = copied(trainer), copied(trainer)
    torch.manual_seed(9)
    twin.train()
    torch.manual_seed(9)
    plain.train()

    assert all(map(torch.equal, twin.model.parameters(), plain.model.parameters()))
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert run.active
    assert steps(store, run) == []
    own = watch(again, store=store, run_id="own", system=False)
    again.train()
    trainer.train()
    assert set(steps(store, own)) == set(steps(store, run)) == {1, 2, 3, 4}


def test_each_copy_of_a_callback_that_has_not_begun_records_a_run_of_its_own(tmp_path):
    """The trials of a search."""
    store = str(tmp_path / "runs")
    trainer = make_trainer(
        tmp_path, callbacks=[RLWatchCallback(store=store, project="search", resume="never", system=False)]
    )
    trials = [COPIES["cloudpickle"](trainer) for _ in range(2)]
    for trial in trials:
        trial.train()

    runs = open_store(store).runs()
    assert [run.project for run in runs] == ["search", "search"]
    assert all(run.last_step == 4 for run in runs)


@ALL
def test_a_hook_of_ours_on_a_copied_model_or_optimizer_looks_at_nothing(copied):
    """What hooks saw would go into a run that is another's."""
    seen = []
    model = nn.Linear(1, 1)
    model.register_forward_hook(error_boundary.ErrorBoundary().hook("outputs", lambda *_: seen.append(1)))
    twin = copied(model)
    twin(torch.ones(1, 1))
    assert seen == []
    model(torch.ones(1, 1))
    assert seen == [1]


def test_a_copied_optimizer_whose_rates_are_scaled_steps():
    """By its own rates."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rates = StepScale(optimizer, error_boundary.ErrorBoundary(), scheduled=False)
    optimizer.param_groups[0][SCALE] = 0.5
    twin = copy.deepcopy(optimizer)
    (own,) = twin.param_groups[0]["params"]
    own.grad = torch.ones(1)
    twin.step()
    weight.grad = torch.ones(1)
    optimizer.step()

    assert weight.item() == 0.5
    assert own.item() in (0.0, 0.5)
    rates.remove()


def test_callbacks_that_are_copied_from_a_watched_trainer_do_nothing(tmp_path):
    """So that the copy can be watched."""
    trainer = make_trainer(tmp_path)
    watch(trainer, store=str(tmp_path / "runs"), system=False).finish()
    ours = [each for each in trainer.callback_handler.callbacks if type(each).__module__.startswith("rlwatch")]

    assert len(ours) == 2
    assert {type(copy.deepcopy(each)) for each in ours} == {TrainerCallback}
