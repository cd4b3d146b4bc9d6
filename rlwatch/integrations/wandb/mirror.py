"""One run of wandb, mirrored row by row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from rlwatch.integrations.tee.rows import scalars, snapshot, step_index
from rlwatch.integrations.wandb.send_back import SendBack
from rlwatch.integrations.wandb.steps import Steps
from rlwatch.run import Run

HUGGING_FACE = "train/global_step"
"""In a row that holds it, None is what TRL writes where every value was NaN; elsewhere it is not a measurement."""


class WandbMirror:
    """Records the scalars of one wandb run's rows at their steps.

    Parts of a row logged with ``commit=False`` wait for the part that says the step, as wandb's own do. Everything
    else is recorded at once.
    """

    def __init__(self, run: Run, steps: Steps, back: SendBack | None = None) -> None:
        self.run = run
        self.steps = steps
        self.back = back
        self._held: deque[tuple[int, dict[str, Any]]] = deque()  # popped once each, whatever thread logs

    def log(self, data: Mapping[str, Any], step: Any, commit: bool | None, own: int) -> None:
        """``wandb.log(data, step=step, commit=commit)`` was called; ``own`` is wandb's own step then."""
        given = None if step is None else step_index(step)
        index = self.steps.count(given, commit, own)
        row = scalars(data, null=math.nan if HUGGING_FACE in data else None)
        said = self.steps.said(row, given)
        if said is None and step is None and commit is False:
            self._held.append((index, snapshot(row)))
            return
        at = self.steps.otherwise(index) if said is None else said
        self._release(index, at)
        self._record(row, at)

    def flush(self) -> None:
        """Record what waits for a row that will not come."""
        self._release(None, 0)

    def _release(self, index: int | None, at: int) -> None:
        """Record what is held: parts of the row ``index`` at step ``at``, older ones where they belong."""
        while self._held:
            try:
                theirs, row = self._held.popleft()
            except IndexError:  # another thread was quicker
                return
            self._record(row, at if theirs == index else self.steps.otherwise(theirs))

    def _record(self, row: dict[str, Any], step: int) -> None:
        if row:
            self.run.log(row, step=step)
