"""What share of the gradient each layer usually has, in this run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlwatch.metrics import LAYER_PREFIX

ALPHA = 0.05
"""Weight of a new step: the mean reaches back about 20 steps."""


class UsualShares:
    """Running mean of each layer's share in the squared norm, of steps whose gradient was finite and not 0."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a delivered step: those of layers among them."""
        squares = {n.removeprefix(LAYER_PREFIX): v * v for n, v in metrics.items() if n.startswith(LAYER_PREFIX)}
        total = sum(squares.values())
        if not (math.isfinite(total) and total > 0):
            return
        for layer, square in squares.items():
            share = square / total
            before = self.shares.get(layer)
            self.shares[layer] = share if before is None else before + ALPHA * (share - before)
