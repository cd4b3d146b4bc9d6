"""The model: trees and a line, the mean of their log-odds.

Trees find what goes together, a line what holds everywhere: on recipes neither has seen, each errs where the other does
not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.training import logistic
from rlwatch.forecast.training.examples import Examples, Floats
from rlwatch.forecast.training.grow import Grown, Growth, grow, head_of
from rlwatch.forecast.training.logistic import Lines
from rlwatch.forecast.trees import Head

SHARE = 0.5
"""Of the line in the log-odds."""


@dataclass(frozen=True)
class Blend:
    """``grown``: the trees, also those of each type of onset; ``lines``: the line."""

    grown: Grown
    lines: Lines

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Uncalibrated log-odds of each interval, (n, 3)."""
        return (1.0 - SHARE) * self.grown.logits(x) + SHARE * self.lines.logits(x)

    def head(self, interval: int, slope: float, offset: float) -> Head:
        """Both as plain numbers, with the calibration."""
        trees = head_of(self.grown.hazards[interval])
        base, line = self.lines.line(interval, SHARE)
        part = 1.0 - SHARE
        return Head(part * trees.base + base, tuple(tree.times(part) for tree in trees.trees), slope, offset, line)


def learn(part: Examples, how: Growth, /, *, kinds: bool = False) -> Blend:
    """Fit both to examples. Raises ``ConfigError`` as :func:`grow` does."""
    return Blend(grow(part, how, kinds=kinds), logistic.fit(part))
