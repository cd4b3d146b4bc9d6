"""What rlwatch reads of SkyRL is there, and is called in the order of the stand-in; collected by ``make nightly`` only.

Its workers need a GPU, so that the trainer itself is not run.
"""

import inspect
import sys
import typing
from pathlib import Path

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses the other one, which SkyRL uses
import skyrl

sys.path.append(str(Path(skyrl.__file__).parents[1] / "skyrl-gym"))  # where the wheel has it
sys.path.append(str(Path(__file__).parents[1] / "integrations"))

import pytest
from driven_trainers import SkyRLTrainer, Workers
from skyrl.backends.skyrl_train.training_batch import TrainingInput
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase, PPORayActorGroup
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import TrainingCallback, TrainingControl
from skyrl.train.utils.tracking import Tracking

from rlwatch.integrations.compat import lacking, lacking_settings
from rlwatch.integrations.skyrl import COLUMNS, NEEDS, SETTINGS, SkyRLCallback


def methods(kind):
    return {name for name, member in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_trainer_and_its_configuration_have_what_is_read():
    """Also the asynchronous one."""
    assert lacking(RayPPOTrainer, NEEDS) is None
    assert lacking(FullyAsyncRayPPOTrainer, NEEDS) is None
    cfg = [one.removeprefix("cfg.") for one in SETTINGS if one.startswith("cfg.")]
    assert lacking_settings(SkyRLTrainConfig(), cfg) is None
    assert parameters(Tracking.log) == ["self", "data", "step", "commit"]
    assert set(COLUMNS) <= set(TrainingInput.__annotations__)


def test_the_callback_has_every_event():
    """And asks for a checkpoint by a flag that exists."""
    assert methods(TrainingCallback) <= methods(SkyRLCallback)
    assert hasattr(TrainingControl(), "should_save")


@pytest.mark.parametrize("name", sorted(methods(Workers)))
def test_the_workers_take_what_the_stand_in_takes(name):
    """Names of parameters, in order."""
    real = getattr(PPORayActorGroup if name == "async_run_ray_method" else WorkerDispatch, name)
    known, given = parameters(real), [one for one in parameters(getattr(Workers, name)) if not one.startswith("_")]
    assert [one for one in known if one in given] == given or name == "async_run_ray_method"
    assert {"get_lr", "set_lr"} <= set(dir(PolicyWorkerBase))


def calls(function, names):
    source = inspect.getsource(function)
    return sorted(names, key=source.index)


def test_the_order_of_a_step_is_that_of_the_stand_in():
    """Advantages, update, commands, checkpoint, log; and the weights are sent after the end of the step."""
    ends = '_fire("on_step_end"'
    names = ["self.compute_advantages_and_returns(", ends, "save_checkpoints()", "self.tracker.log(log_"]
    source = inspect.getsource(RayPPOTrainer.train)

    assert calls(RayPPOTrainer.train, names) == names
    assert source.find("save_weights_for_sampler", source.index(ends)) > 0
    assert source.count("self.global_step > self.cfg.trainer.max_training_steps") == 1
    assert set(methods(SkyRLTrainer)) - {"run"} <= methods(RayPPOTrainer)
