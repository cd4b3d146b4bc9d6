"""Loggers of trainers that have no usable package, against stand-ins of the interfaces in their sources."""

import math
from abc import ABC, abstractmethod
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from rlwatch.integrations import loggers
from rlwatch.integrations.loggers import NemoLogger, PrimeMonitor, numbers_of, slime_rollouts
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch


def recorded(where, *names):
    store = open_store(str(where))
    (run,) = store.runs()
    series = store.series(run.run_id, names)
    return run, {name: dict(zip(series[name].steps, series[name].values, strict=True)) for name in names}


class NemoInterface(ABC):
    """What NeMo-RL's LoggerInterface asks of a backend (its ``Logger`` calls each with these arguments)."""

    @abstractmethod
    def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False): ...

    @abstractmethod
    def log_hyperparams(self, params): ...

    @abstractmethod
    def log_histogram(self, histogram, step, name): ...

    @abstractmethod
    def log_plot(self, figure, step, name): ...


def test_nemo_rl_logs_into_a_run_and_an_axis_of_its_own_makes_no_steps(tmp_path):
    """Two calls for one step are one row; values that are no numbers are left out."""

    class Backend(NemoLogger, NemoInterface):
        pass

    backend = Backend(store=str(tmp_path), name="nemo")
    backend.log_hyperparams({"grpo": {"num_prompts": 8}})
    for step in (1, 2):
        backend.log_metrics({"reward": 0.5 * step, "text": "x", "many": torch.ones(3)}, step, prefix="train")
        backend.log_metrics({"total_step_time": torch.tensor(2.0)}, step, prefix="timing/train", step_finished=True)
        backend.log_metrics({"memory": 3.0, "ray/step": 9}, step, prefix="ray", step_metric="ray/step")
        backend.log_histogram([1, 2], step, "h")
        backend.log_plot(None, step, "p")
    backend.finish()
    run, rows = recorded(tmp_path, "reward/mean", "train/reward", "timing/train/total_step_time", "ray/memory")

    assert run.source == "nemo-rl"
    assert {1: 0.5, 2: 1.0} in (rows["reward/mean"], rows["train/reward"])
    assert rows["ray/memory"] == {}
    assert recorded(tmp_path, "train/many", "train/text")[1] == {"train/many": {}, "train/text": {}}


class PrimeInterface(ABC):
    """What prime-rl's Monitor asks: construction without effects, ``init``, ``log``, and what may stay empty."""

    def __init__(self, config):
        self.config = config

    @abstractmethod
    def log(self, metrics, step): ...


def test_prime_rl_begins_the_run_in_init_and_ends_it_in_finalize(tmp_path):
    """Nothing is made before, and a row before it is lost without an error."""

    class Backend(PrimeMonitor, PrimeInterface):
        pass

    backend = Backend(None, store=str(tmp_path), name="prime")
    backend.log({"reward/mean": 9.0}, 0)
    assert backend.run_id is None
    backend.init(output_dir="x")
    backend.log({"reward/mean": 0.25, "bad": object()}, 1)
    backend.log_episodes([object()], 1)
    backend.finalize()
    run, rows = recorded(tmp_path, "reward/mean")

    assert run.run_id == backend.run_id
    assert rows["reward/mean"] == {1: 0.25}


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


def samples(*rewards):
    return [
        SimpleNamespace(
            reward=reward,
            response_length=10 + i,
            group_index=i // 2,
            status=Status.TRUNCATED if i == 3 else Status.COMPLETED,
        )
        for i, reward in enumerate(rewards)
    ]


def test_slime_calls_a_function_that_measures_its_samples_and_lets_slime_log(tmp_path, monkeypatch):
    """Rewards, groups, lengths, truncation; broken samples cost their statistics and nothing else."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path))
    try:
        args = SimpleNamespace(wandb_project="math")
        assert slime_rollouts(1, args, samples(1.0, 0.0, 1.0, 1.0), {"perf/x": 2.0}, 3.5) is False
        assert slime_rollouts(2, args, [object()], None, 1.0) is False
        assert slime_rollouts(3, args, [], None, 1.0) is False
        loggers.SLIME[0][0].finish()
    finally:
        loggers.SLIME.clear()
    run, rows = recorded(tmp_path, "reward/mean", "len/mean", "len/clipped", "reward/zero_std_frac", "timing/rollout")

    assert run.project == "math"
    assert rows["reward/mean"] == {1: 0.75}
    assert rows["len/mean"] == {1: 11.5}
    assert rows["len/clipped"] == {1: 0.25}
    assert rows["reward/zero_std_frac"] == {1: 0.5}
    assert set(rows["timing/rollout"]) == {1, 2, 3}


def test_numbers_of_nested_metrics_are_flattened_and_what_is_no_number_is_left_out():
    """NaN is a number."""
    assert numbers_of({"a": True, "b": {"c": torch.tensor([2.0])}, "d": "e", "f": None, "g": [1]}) == {
        "a": 1.0,
        "b/c": 2.0,
    }
    assert math.isnan(numbers_of({"a": math.nan})["a"])
