"""Records the sample logs anew, by training: ``python sample_logs/record.py [NAME...]`` (all of them: some minutes).

Needs the extra ``trl``. Every file is what the trainer or loop wrote; nothing is edited afterwards. The same
versions on the same kind of machine give the same curves; elsewhere floats differ and onsets may move.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded

import own_loop
import torch
import writers
from second_engine import SecondEngine

from rlwatch.demo import Recipe
from rlwatch.demo.training import build_trainer

HERE = Path(__file__).parent
NEVER = 10**9
RECORDERS: dict[str, Callable[[Path], None]] = {}


def recorder(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers how the file ``name`` is made; the function gets the path to write."""

    def register(record: Callable[[Path], None]) -> Callable[[Path], None]:
        RECORDERS[name] = record
        return record

    return register


def steady(seed: int, steps: int, learning_rate: float, **changes: object) -> Recipe:
    """A constant learning rate after a good warm start."""
    plain = {"learning_rate": learning_rate, "warm_up_steps": 0, "settled_step": 0, "range_test_step": NEVER}
    return Recipe(**{"seed": seed, "steps": steps, "warm_start_steps": 60, "beta": 0.0} | plain | changes)


@recorder("healthy-trl-trainer_state.json")
def healthy_with_reference(path: Path) -> None:
    recipe = steady(seed=11, steps=240, learning_rate=3e-4, beta=0.04)
    writers.trainer_state(_trainer(recipe, logging_steps=2), path)


@recorder("healthy-trl-console.log")
def healthy_small_batch(path: Path) -> None:
    """Four groups a batch: rewards jump from row to row, as in many real logs."""
    recipe = steady(seed=12, steps=150, learning_rate=2e-4, batch=32)
    writers.console(lambda directory: _trainer(recipe, directory), path)


@recorder("healthy-verl-console.log")
def healthy_own_loop(path: Path) -> None:
    writers.verl_console(own_loop.train(own_loop.Settings(seed=13, steps=160, learning_rate=2e-4)), path)


@recorder("entropy-collapse-trl-console.log")
def entropy_collapse(path: Path) -> None:
    """A learning-rate range test that nobody switched off: from step 50 the rate grows by 8 % a step."""
    recipe = steady(seed=14, steps=160, learning_rate=3e-4, range_test_step=50, range_test_growth=1.08)
    writers.console(lambda directory: _trainer(recipe, directory, disable_tqdm=False, logging_steps=2), path)


@recorder("nonfinite-trl-console.log")
def nonfinite(path: Path) -> None:
    """Parameters in float16, where Adam's epsilon is zero. NaN is logged until the sampler is renewed at step 40."""
    recipe = steady(seed=15, steps=120, learning_rate=2e-4)

    def build(directory: Path):
        trainer = _trainer(recipe, directory, logging_nan_inf_filter=False)
        trainer.model.half()
        SecondEngine(trainer, every=40)
        return trainer

    writers.console(build, path)


@recorder("nonfinite-verl.jsonl")
def nonfinite_advantages(path: Path) -> None:
    """Advantages divided by the bare standard deviation: 0/0 as soon as all answers of a group score the same."""
    settings = own_loop.Settings(seed=19, steps=140, learning_rate=5e-4, warm_start_steps=25, deviation_floor=0.0)
    writers.verl_file(own_loop.train(settings), path)


@recorder("entropy-explosion-verl.jsonl")
def entropy_explosion(path: Path) -> None:
    """An entropy bonus too strong for the reward."""
    settings = own_loop.Settings(seed=16, steps=160, learning_rate=5e-4, entropy_coefficient=0.3)
    writers.verl_file(own_loop.train(settings), path)


@recorder("mismatch-growth-trl-trainer_state.json")
def mismatch_growth(path: Path) -> None:
    """The sampling engine drifts from the trainer from step 60 on."""
    trainer = _trainer(steady(seed=17, steps=200, learning_rate=4e-4), logging_steps=2)
    SecondEngine(trainer, noise=1.0, ramp=(60, 180))
    writers.trainer_state(trainer, path)


@recorder("no-signal-long.csv")
def no_signal(path: Path) -> None:
    """A reward for whole answers only, and a policy that has never given one."""
    settings = own_loop.Settings(seed=18, steps=100, learning_rate=2e-4, warm_start_steps=0, score=_exact)
    writers.long_csv(own_loop.train(settings), "never-right", path)


def _exact(completion: str, target: str) -> float:
    return float(completion == target)


def _trainer(recipe: Recipe, directory: Path | None = None, **changes: object):
    return build_trainer(recipe, directory or Path(tempfile.mkdtemp(prefix="rlwatch-sample-")), **changes)


def main(names: list[str]) -> None:
    """Record ``names``, or all."""
    torch.set_num_threads(1)
    unknown = [name for name in names if name not in RECORDERS]
    if unknown:
        sys.exit(f"no such sample log: {', '.join(unknown)}; there are: {', '.join(RECORDERS)}")
    for name in names or list(RECORDERS):
        print(f"recording {name}", flush=True)
        RECORDERS[name](HERE / name)


if __name__ == "__main__":
    main(sys.argv[1:])
