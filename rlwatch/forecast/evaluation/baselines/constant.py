"""Tools that do not look at the run: what luck, a clock, noise and silence are worth."""

from __future__ import annotations

import random
from collections.abc import Mapping


class Never:
    """Silence."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """Nothing."""
        return None


class Always:
    """An alarm at every row."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """An alarm."""
        return 1.0


class Random:
    """A score drawn anew for every row, evenly from [0, 1)."""

    def __init__(self, seed: int) -> None:
        self._drawn = random.Random(seed)

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """The draw."""
        return self._drawn.random()


class StepIndex:
    """A clock: the later, the worse."""

    def update(self, step: int, metrics: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """The step."""
        return float(step)
