"""Which step a row of wandb belongs to: wandb's own step counts rows, not optimizer steps.

The same rules as ``tee_wandb`` follows in a live run (docs/trackers.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlwatch.importers.bounds import shown
from rlwatch.importers.reading import Row, Skips
from rlwatch.importers.values import step_of, value_of

TRAINERS = ("train/global_step", "trainer/global_step", "training/global_step")
"""Hugging Face, TRL and OpenRLHF; Lightning; verl."""
HUGGING_FACE = TRAINERS[0]
PLAIN = "global_step"
OWN = "_step"
MOST_AXES = 50


class WandbSteps:
    """Turns the rows of one wandb run into rows with steps.

    A row's step is the trainer's own, or that of an axis that ``define_metric`` declared, or ``global_step``, or
    what the last row with one of the first two had, or wandb's.
    """

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._axes = list(TRAINERS)
        self._last: int | None = None

    def define(self, axis: str) -> None:
        """Learn of an axis that the user declared."""
        if axis not in (*self._axes, OWN, PLAIN, "") and len(self._axes) < MOST_AXES:
            self._axes.append(axis)

    def row(self, items: Mapping[str, object], number: int) -> Row | None:
        """The row, or None if it holds no number; ``number`` counts rows."""
        step = self._step(items, number)
        metrics = {
            name: value
            for name, raw in items.items()
            if not name.startswith("_") and (value := self._value(name, raw, items, number)) is not None
        }
        if step is None or not metrics:
            return None
        return Row(step, metrics, number, ts=_time(items.get("_timestamp")))

    def _value(self, name: str, raw: object, items: Mapping[str, object], number: int) -> float | None:
        """None (no measurement) is NaN only where Hugging Face's trainers write it for NaN."""
        if raw is None and HUGGING_FACE not in items:
            return None
        value = value_of(raw)
        if value is None:
            self._skips.add(f"{shown(name)} is not a number", number)
        return value

    def _step(self, items: Mapping[str, object], number: int) -> int | None:
        for axis in self._axes:
            step = _whole(items.get(axis))
            if step is not None:
                self._last = step
                return step
        for candidate in (_whole(items.get(PLAIN)), self._last, _whole(items.get(OWN))):
            if candidate is not None:
                return candidate
        self._skips.add("a row without a step", number)
        return None


def _whole(value: object) -> int | None:
    if value is None:
        return None
    try:
        return step_of(value)
    except ValueError:
        return None


def _time(value: object) -> float:
    time = value_of(value)
    return time if time is not None and math.isfinite(time) and value is not None else 0.0
