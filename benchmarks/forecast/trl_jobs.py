"""Runs of the TRL part of the corpus, in the order they are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from forecast.knobs import Pace
from forecast.trl_recipes import RECIPES, Recipe
from forecast.trl_setting import Fault, Setting

TWINS = 0.3
"""Share of the runs with a fault that are made once more without it."""
STRETCH = (1.7, 2.5)
"""How many times as long runs are, and what grows in them, at the long pace."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run to be made; ``pair`` as in :class:`tables.RunInfo`."""

    run: str
    recipe: str
    family: str
    seed: int
    setting: Setting
    pair: str = ""

    @property
    def fault_step(self) -> int | None:
        """The first step of the latest fault, the one that decides; None in a run that has none."""
        if not self.setting.faults:
            return None if self.family == "healthy" else 1
        return max(fault.start for fault in self.setting.faults)


def jobs(count: int, seed: int, pace: Pace = Pace.DRAWN, batch: int = 1) -> list[Job]:
    """The first ``count`` runs of ``seed``: rounds of all recipes, each in random order: any prefix is mixed."""
    every = _endless(seed, pace, batch)
    return [next(every) for _ in range(count)]


def _endless(seed: int, pace: Pace, batch: int) -> Iterator[Job]:
    rng = np.random.default_rng(seed)
    dealt = [recipe for recipe in RECIPES for _ in range(recipe.share)]
    number = 0
    while True:
        for index in rng.permutation(len(dealt)):
            job = draw(dealt[index], seed, number, pace, batch)
            yield job
            if job.family != "healthy" and job.setting.faults and rng.random() < TWINS:
                yield twin(job)
            number += 1


def draw(recipe: Recipe, seed: int, number: int, pace: Pace = Pace.DRAWN, batch: int = 1) -> Job:
    """Run ``number`` of ``seed``, of ``recipe``; most faults grow as it is, so there is no pace between the two.

    ``batch``: how many times the responses a step that the recipe draws.
    """
    rng = np.random.default_rng([seed, number])
    setting = recipe.draw(rng)
    if pace is Pace.LONG:
        setting = stretched(setting, rng.uniform(*STRETCH))
    setting = replace(setting, batch=batch * setting.batch)
    return Job(f"{recipe.name}-{seed}-{number:04d}", recipe.name, recipe.family, 100_000 * seed + number, setting)


def stretched(setting: Setting, times: float) -> Setting:
    """The same run, so many times as long; its faults come later and grow longer, what was short stays so."""

    def later(fault: Fault) -> Fault:
        start = fault.start if fault.start == 1 else round(times * fault.start)
        lasts = None if fault.end is None else fault.end - fault.start
        end = None if lasts is None else start + (round(times * lasts) if fault.ramp else lasts)
        return replace(fault, start=start, ramp=round(times * fault.ramp), end=end)

    return replace(setting, steps=round(times * setting.steps), faults=tuple(map(later, setting.faults)))


def twin(job: Job) -> Job:
    """The same run without its fault; until the fault begins the two are equal."""
    return Job(f"{job.run}-twin", "trl_control", "healthy", job.seed, replace(job.setting, faults=()), pair=job.run)
