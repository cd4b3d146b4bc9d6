"""The reward of each task or data source: whether the policy became worse, or the mix of data harder."""

from __future__ import annotations

import math

from rlwatch.detectors.reward import RewardWatch
from rlwatch.records import ClosedStep

PREFIX = "reward/by_task/"
TASKS = 16
"""Tasks followed at most; a run with more is not judged by them."""
WORSE = 0.15
"""Share of its best level by which a task's own reward has fallen: less than for the mean."""


class TaskRewards:
    """A :class:`RewardWatch` for each task that is logged."""

    def __init__(self) -> None:
        self._tasks: dict[str, RewardWatch] = {}
        self._many = False

    def update(self, step: ClosedStep) -> None:
        """Take notice of ``reward/by_task/*``."""
        for name, value in step.metrics.items():
            if not name.startswith(PREFIX) or not math.isfinite(value):
                continue
            self._many = self._many or (name not in self._tasks and len(self._tasks) >= TASKS)
            if not self._many:
                self._tasks.setdefault(name, RewardWatch()).take(step.step, value)

    @property
    def mix(self) -> bool:
        """Whether there are several tasks and none has fallen by itself: only their shares of the batch changed.

        A noisy task cannot be told to have fallen, so at least half must stand near their best as well.
        """
        known = [watch for watch in self._tasks.values() if watch.best is not None]
        if self._many or len(known) < 2 or any(watch.fallen(WORSE) for watch in known):
            return False
        return 2 * sum(map(_stands, known)) >= len(known)


def _stands(watch: RewardWatch) -> bool:
    return watch.now is not None and watch.best is not None and watch.best - watch.now <= WORSE * abs(watch.best)
