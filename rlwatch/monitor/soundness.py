"""Judges whether a run is sound at a row: the one place that says of a snapshot that it is good to return to.

Everything is compared with the run's first rows and the best of its own past, the first row included: a run that was
broken by its first update must not become its own measure (measured: a baseline of rows that were broken already saved
0 of 2 runs, one from the first row 2 of 2). A row is sound if no failure stands by the run's state machine
(:mod:`rlwatch.state`), the median reward is near its best, and entropy and mismatch are usual.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from rlwatch.control.policy import ROWS_AFTER, ROWS_KEPT
from rlwatch.detectors.context import noise_of
from rlwatch.records import ClosedStep, Finding, JudgedRow
from rlwatch.state import SERIOUS, End, Ending, verdict_of
from rlwatch.stats import median
from rlwatch.wording import number

REWARD, ENTROPY, MISMATCH = "reward/mean", "policy/entropy", "mismatch/k3"
REWARD_ROWS, MISMATCH_ROWS = ROWS_AFTER, 3
"""Rows whose median counts."""
NEAR_BEST = 0.9
"""Least median reward, as a fraction of the best; a noisy reward may be a row's noise below it."""
LEAST_ENTROPY, MOST_ENTROPY = 0.25, 1.6
"""Limits of entropy, as fractions of the first row's."""
MOST_MISMATCH = 0.05
"""Limit of the mismatch k3 in nats a token."""


class Soundness:
    """Judges row after row."""

    def __init__(self) -> None:
        self._rewards: deque[float] = deque(maxlen=REWARD_ROWS)
        self._mismatches: deque[float] = deque(maxlen=MISMATCH_ROWS)
        self._best: float | None = None
        self._entropy: float | None = None
        self.rows: deque[JudgedRow] = deque(maxlen=ROWS_KEPT)
        """The newest rows, judged."""

    def update(self, step: ClosedStep, holding: Sequence[Finding]) -> None:
        """Take the next closed step, and what holds at it."""
        why_not = self._why_not(step, holding)
        if why_not or REWARD in step.metrics:  # a row without a reward is no evidence that all is well
            rewards, entropy = list(self._rewards), step.metrics.get(ENTROPY)
            level = median(rewards) if rewards else None
            ratio = entropy / self._entropy if entropy is not None and self._entropy else None
            self.rows.append(JudgedRow(step.step, why_not, level, noise_of(rewards), ratio, step.metrics.get(REWARD)))

    def _why_not(self, step: ClosedStep, holding: Sequence[Finding]) -> str:
        reasons = [self._reward(step), self._exploration(step), self._engine(step)]  # each remembers the row
        verdict = verdict_of(holding, {}, ending=Ending(End.GOES_ON)) if holding else None
        if verdict is not None and verdict.state in SERIOUS:
            return verdict.brief
        return next(filter(None, reasons), "")

    def _reward(self, step: ClosedStep) -> str:
        value = step.metrics.get(REWARD)
        if value is None:
            return ""
        if not math.isfinite(value):
            return "the reward is not finite"
        self._rewards.append(value)
        level = median(list(self._rewards))
        best = self._best = level if self._best is None else max(self._best, level)
        least = best - max((1.0 - NEAR_BEST) * abs(best), noise_of(list(self._rewards)))
        return "" if level >= least else f"the reward is {number(level)}, its best {number(best)}"

    def _exploration(self, step: ClosedStep) -> str:
        value = step.metrics.get(ENTROPY)
        if value is None:
            return ""
        if not math.isfinite(value):
            return "the entropy is not finite"
        first = self._entropy = value if self._entropy is None else self._entropy
        if LEAST_ENTROPY * first <= value <= MOST_ENTROPY * first:
            return ""
        return f"the entropy is {number(value)}, {number(first)} at first"

    def _engine(self, step: ClosedStep) -> str:
        value = step.metrics.get(MISMATCH)
        if value is None:
            return ""
        if not math.isfinite(value):
            return "the mismatch is not finite"
        self._mismatches.append(value)
        level = median(list(self._mismatches))
        return "" if level < MOST_MISMATCH else f"the mismatch k3 is {number(level)} nats a token"
