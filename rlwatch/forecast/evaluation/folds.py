"""Which runs are judged together: what a fold's tool was fitted to is never in it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from enum import StrEnum

import numpy as np

from rlwatch.forecast.evaluation.run_table import HEALTHY, Ints, RunTable


class Split(StrEnum):
    """How runs are dealt into folds: ``RUN`` by run (recipes are known), ``RECIPE`` and ``FAMILY`` whole, ``NONE``."""

    RUN = "run"
    RECIPE = "recipe"
    FAMILY = "family"
    NONE = "none"


def folds_of(table: RunTable, split: Split | str = Split.RUN, count: int = 5) -> Ints:
    """Of each run, its fold (0 to ``count`` - 1); all 0 without a split.

    A run and its faultless twin share a fold. Depends on nothing but names, so a tool that is trained elsewhere gets
    the same folds. Healthy runs are dealt one by one also where recipes are held out. Each recipe (or, where recipes
    are held out, each size of group) is spread evenly.
    """
    split = Split(split)
    if split is Split.NONE or count < 2:
        return np.zeros(len(table.runs), dtype=np.int64)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in range(len(table.runs)):
        groups[_group(table, table.place.get(table.pairs[i], i), split)].append(i)
    sizes = np.zeros(count)
    kinds: dict[tuple[str, int], int] = defaultdict(int)
    folds = np.zeros(len(table.runs), dtype=np.int64)
    for (kind, name), runs in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0][0], _draw(item[0][1]))):
        del name
        dealt = np.array([kinds[kind, fold] for fold in range(count)])
        fold = int(np.lexsort((np.arange(count), sizes, dealt))[0])
        folds[runs] = fold
        sizes[fold] += len(runs)
        kinds[kind, fold] += 1
    return folds


def _group(table: RunTable, i: int, split: Split) -> tuple[str, str]:
    """(what is spread evenly over the folds, what stays whole) for the run at place ``i``."""
    held = {Split.RECIPE: table.recipes, Split.FAMILY: table.families}.get(split)
    if held is None or table.families[i] == HEALTHY or not held[i]:
        return table.recipes[i], table.runs[i]
    return "", held[i]


def _draw(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
