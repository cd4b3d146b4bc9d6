"""Which step a row of wandb belongs to.

wandb's own step counts rows, not optimizer steps: Hugging Face's Trainer and OpenRLHF let it run and log the global
step beside it. A row's step is, by the first that applies:

1. the metric named by ``tee_wandb(step_metric=...)``, if the row holds it;
2. ``train/global_step`` (Hugging Face, TRL, OpenRLHF), ``trainer/global_step`` (Lightning) or
   ``training/global_step`` (verl);
3. a step axis that ``define_metric`` declared, in order of declaration;
4. the argument ``step=``;
5. ``global_step``;
6. where a row had one of 1 to 3: the value it had then, as wandb's ``step_sync`` fills it in;
7. wandb's own step.

A run keeps to the best axis it has seen: where rows hold ``train/global_step``, an ``epoch`` that other rows hold is
no step. An axis that is not an integer >= 0 is no step either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlwatch.integrations.tee.rows import step_index

KNOWN_AXES = ("train/global_step", "trainer/global_step", "training/global_step")
WEAK_AXIS = "global_step"


class Steps:
    """Follows one wandb run: its own counter, and the axis its rows are at."""

    def __init__(self, step_metric: str | None = None) -> None:
        self.counter = 0
        """wandb's step of the next row."""
        self._axes = [step_metric] if step_metric else list(KNOWN_AXES)
        self._rank = len(self._axes)
        self._last: int | None = None

    def declare(self, axis: str) -> None:
        """``define_metric(..., step_metric=axis)`` was called."""
        if axis not in self._axes:
            self._axes.append(axis)

    def count(self, step: int | None, commit: bool | None, own: int = 0) -> int:
        """The wandb step of a row logged so; the counter goes on as wandb's does. ``own``: where wandb says it is."""
        self.counter = max(self.counter, own)
        index = self.counter if step is None else step
        self.counter = max(self.counter, index)
        if commit or (step is None and commit is None):
            self.counter += 1
        return index

    def said(self, row: Mapping[str, Any], step: int | None) -> int | None:
        """The step that a row itself says, by rules 1 to 5; None if it says none."""
        for rank, axis in enumerate(self._axes):
            index = step_index(row.get(axis))
            if index is not None and (rank <= self._rank or self._last is None):
                self._rank, self._last = rank, index
                return index
        return step_index(row.get(WEAK_AXIS)) if step is None else step_index(step)

    def otherwise(self, index: int) -> int:
        """The step of a row that says none, by rules 6 and 7; ``index`` is its wandb step."""
        return index if self._last is None else self._last
