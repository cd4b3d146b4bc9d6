"""Recipes of small-batch runs of TRL, as people make them at home: what TRL's other recipes do, on real-life data.

Each recipe of :mod:`trl_recipes` is drawn as it is there and then given what such runs have: 1 to 8 prompts of 4 to
16 answers a step, one of seven tasks whose difficulty sways and drifts, a start from hopeless to nearly solved, any of
TRL's losses, warm-ups and schedules, adapters, and a log with a row every 1 to 20 steps, averaged by the trainer.
Failing and healthy runs are given them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from forecast.trl_recipes import AT_ONCE as LARGE_AT_ONCE
from forecast.trl_recipes import RECIPES as LARGE
from forecast.trl_recipes import Draw, Recipe, base
from forecast.trl_setting import Fault, Setting
from forecast.trl_tasks import HARD, LONGEST, NARROW, STARTS, TASKS, Data

LOSSES = ("grpo", "grpo", "dr_grpo", "bnpo", "dapo", "dapo", "cispo", "sapo")
CADENCES = (1, 1, 1, 1, 1, 1, 2, 5, 5, 10, 10, 20)
SPARSE = 10
"""Steps a row from which a run is longer: it has rows enough to be judged by."""
ADAPTED = 5.0
"""How many times the rate that all weights are trained at suits adapters."""
Changed = Callable[[np.random.Generator, Setting], Setting]


def small(rng: np.random.Generator, setting: Setting) -> Setting:
    """The run that ``setting`` is, made small and given data, a start, a loss and a log as people have them."""
    generations = int(rng.choice([4, 8, 8, 16]))
    batch = generations * max(int(rng.choice([1, 2, 4, 8])), setting.accumulation)
    data = _data(rng)
    lora = int(rng.choice([0, 0, 4, 8])) if not setting.engine else 0
    given = replace(
        setting,
        start=0,
        data=data,
        batch=batch,
        generations=generations,
        lora=lora,
        lr=setting.lr * (ADAPTED if lora else 1.0),
        longest=LONGEST[data.task] + int(rng.choice([1, 3, 6])) + (setting.longest > 9),
        warmup=int(rng.choice([0, 0, 5, 10, 20])),
        decay=str(rng.choice(["constant", "constant", "linear", "cosine"])),
        logging_steps=int(rng.choice(CADENCES)),
    )
    return given if setting.trainer == "rloo" else _lossy(rng, given)


def _lossy(rng: np.random.Generator, setting: Setting) -> Setting:
    """With one of the losses of GRPO, and sometimes with several updates of a batch of responses."""
    loss = str(rng.choice(LOSSES))
    return replace(
        setting,
        loss_type=loss,
        scale_rewards="none" if loss == "dr_grpo" else str(rng.choice(["group", "group", "batch"])),
        importance="sequence" if loss == "grpo" and rng.random() < 0.3 else "token",
        steps_per_generation=int(rng.choice([1, 1, 1, 2, 4])),
    )


def _data(rng: np.random.Generator) -> Data:
    """A task and its problems: half of the runs on data that stay as hard as they are, half on data that drift."""
    first = float(rng.uniform(1.5, 3.0))
    drifts = bool(rng.integers(2))
    return Data(
        task=str(rng.choice(list(TASKS))),
        first=first,
        last=float(rng.uniform(1.5, 3.5)) if drifts else first,
        sway=float(rng.choice([0.0, 0.4, 0.8])),
        block=int(rng.choice([1, 4, 12])),
        size=int(rng.choice([64, 256, 1024])),
        returns=bool(rng.integers(2)),
        enough=float(rng.choice(STARTS, p=[0.15, 0.3, 0.3, 0.25])),
    )


def _made_small(draw: Draw, changed: Changed = lambda _, setting: setting) -> Draw:
    return lambda rng: changed(rng, small(rng, draw(rng)))


def _with_data(**fixed: float | int) -> Changed:
    def changed(_: np.random.Generator, setting: Setting) -> Setting:
        assert setting.data is not None
        return replace(setting, data=replace(setting.data, **fixed))

    return changed


def _curriculum(rng: np.random.Generator, setting: Setting) -> Setting:
    assert setting.data is not None
    switch = int(rng.uniform(0.35, 0.65) * setting.steps)
    return replace(setting, data=replace(setting.data, first=1.2, last=float(rng.uniform(2.5, 3.5)), switch=switch))


def _resumed(rng: np.random.Generator, setting: Setting) -> Setting:
    """Stopped in the middle and resumed from a checkpoint some steps before, as it was."""
    stop = int(rng.uniform(0.4, 0.65) * setting.steps)
    return replace(setting, resumed=(stop, stop - int(rng.integers(3, 15))))


def _resumed_faster(rng: np.random.Generator, setting: Setting) -> Setting:
    """Resumed with a learning rate ten times as high and more."""
    setting = _resumed(rng, setting)
    assert setting.resumed is not None
    rate = Fault("learning rate", setting.resumed[1] + 1, float(np.exp(rng.uniform(np.log(12), np.log(50)))), ramp=20)
    return replace(setting, faults=(rate,))


def _faster(kind: str) -> Changed:
    """A fault of the data, and the rate raised with it so that it matters within the run."""

    def changed(rng: np.random.Generator, setting: Setting) -> Setting:
        start = int(rng.integers(50, 90))
        rate = Fault("learning rate", start, float(rng.uniform(4, 10)), ramp=40)
        return replace(setting, beta=0.0, faults=(Fault(kind, start), rate))

    return changed


def _format(rng: np.random.Generator, setting: Setting) -> Setting:
    """A verifier that comes to pay for the form, and nothing that keeps the policy near its reference."""
    start, ramp = int(rng.integers(45, 80)), int(rng.integers(45, 90))
    rate = Fault("learning rate", start, float(rng.uniform(2, 6)), ramp)
    return replace(setting, beta=0.0, faults=(Fault("format reward", start, 1.0, ramp), rate))


RECIPES: tuple[Recipe, ...] = (
    *(Recipe(f"small_{each.name[4:]}", each.family, _made_small(each.draw), each.share) for each in LARGE),
    Recipe("small_solved", "healthy", _made_small(base, _with_data(enough=STARTS[-1]))),
    Recipe("small_hopeless", "healthy", _made_small(base, _with_data(enough=STARTS[0]))),
    Recipe("small_swinging", "healthy", _made_small(base, _with_data(sway=1.2, block=12))),
    Recipe("small_curriculum", "healthy", _made_small(base, _curriculum), share=2),
    Recipe("small_resumed", "healthy", _made_small(base, _resumed), share=2),
    Recipe("small_resumed_rate", "learning_rate", _made_small(base, _resumed_faster)),
    Recipe("small_narrow_data", "data", _made_small(base, _faster(NARROW))),
    Recipe("small_wrong_key", "data", _made_small(base, _faster(HARD))),
    Recipe("small_hack_format", "reward_hacking", _made_small(base, _format)),
)
AT_ONCE = tuple(f"small_{name[4:]}" for name in LARGE_AT_ONCE)
"""Recipes whose faults do not come gradually."""
