"""What rlwatch reads of AReaL is there, and is called in the order of the stand-in; collected by ``make nightly`` only.

Its engines need a GPU, so that the trainer itself is not run.
"""

import dataclasses
import inspect

from areal.api.cli_args import PPOConfig, RecoverConfig, StatsLoggerConfig
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils.stats_logger import StatsLogger
from areal.utils.timeutil import EpochStepTimeFreqCtl

from rlwatch.integrations.areal import NEEDS
from rlwatch.integrations.compat import lacking


def parameters(function):
    return list(inspect.signature(function).parameters)


def fields(kind):
    return {one.name for one in dataclasses.fields(kind)}


def test_the_trainer_and_its_configuration_have_what_is_read():
    """Methods, parameters and fields."""
    assert lacking(PPOTrainer, NEEDS) is None
    assert parameters(StatsLogger.commit) == ["self", "epoch", "step", "global_step", "data"]
    assert parameters(EpochStepTimeFreqCtl.check) == ["self", "epochs", "steps"]
    assert {"total_train_steps", "recover", "stats_logger"} <= fields(PPOConfig)
    assert {"experiment_name", "trial_name"} <= fields(StatsLoggerConfig)
    assert "mode" in fields(RecoverConfig)


def test_rollouts_are_paused_where_commands_are_executed():
    """Between the update of the weights and the log; the loop looks at its last step anew."""
    source = inspect.getsource(PPOTrainer.train)
    order = [
        "config.total_train_steps",
        "self.actor.ppo_update",
        "self.rollout.pause()",
        "self.actor.update_weights",
        "self._save_hf(epoch=epoch, epoch_step=step, global_step=global_step)",
        "self._save_recover_checkpoint(",
        "self._export_and_commit_stats(",
        "self.rollout.resume()",
    ]

    assert sorted(order, key=source.index) == order
    assert "self.freq_ctl.check(" in inspect.getsource(inspect.getmodule(PPOTrainer).Saver.save)
    assert "self.scheduler = self._init_scheduler()" in inspect.getsource(PPOTrainer.__init__)
