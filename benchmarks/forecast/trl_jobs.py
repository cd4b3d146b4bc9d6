"""Runs of the TRL part of the corpus, in the order they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from forecast.knobs import Pace
from forecast.trl_recipes import RECIPES, Recipe
from forecast.trl_setting import Fault, Setting
from forecast.trl_small import RECIPES as SMALL
from forecast.trl_small import SPARSE

TWINS = 0.3
"""Share of the runs with a fault that are made once more without it."""
STRETCH = (1.7, 2.5)
"""How many times as long runs are, and what grows in them, at the long pace."""


SMALL_STRETCH, SPARSE_STRETCH = (1.0, 1.1), (1.2, 1.5)
"""The same for small-batch runs, and for those of them that log so rarely that 150 steps are a few rows."""


class Deck(StrEnum):
    """Recipes to draw from: those of large batches and one task, or of small batches and many."""

    LARGE = "large"
    SMALL = "small"


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


def jobs(count: int, seed: int, pace: Pace = Pace.DRAWN, batch: int = 1, deck: Deck = Deck.LARGE) -> list[Job]:
    """The first ``count`` runs of ``seed``: rounds of all recipes, each in random order: any prefix is mixed."""
    every = _endless(seed, pace, batch, SMALL if deck is Deck.SMALL else RECIPES)
    return [next(every) for _ in range(count)]


def _endless(seed: int, pace: Pace, batch: int, recipes: Sequence[Recipe]) -> Iterator[Job]:
    rng = np.random.default_rng(seed)
    dealt = [recipe for recipe in recipes for _ in range(recipe.share)]
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
    if setting.data:
        setting = stretched(
            setting, rng.uniform(*(SPARSE_STRETCH if setting.logging_steps >= SPARSE else SMALL_STRETCH))
        )
    elif pace is Pace.LONG:
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

    data, resumed = setting.data, setting.resumed
    if data and data.switch is not None:
        data = replace(data, switch=round(times * data.switch))
    if resumed:
        first = round(times * resumed[0])
        resumed = (first, first - (resumed[0] - resumed[1]))
    faults = tuple(map(later, setting.faults))
    return replace(setting, steps=round(times * setting.steps), faults=faults, data=data, resumed=resumed)


def twin(job: Job) -> Job:
    """The same run without its fault; until the fault begins the two are equal."""
    return Job(
        f"{job.run}-twin",
        f"{job.recipe.split('_')[0]}_control",
        "healthy",
        job.seed,
        replace(job.setting, faults=()),
        pair=job.run,
    )
