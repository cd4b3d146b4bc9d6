"""The likelihood of correct responses over a run: its level, its best, and how far it has come down."""

from __future__ import annotations

import math
from itertools import pairwise

from rlwatch.stats import Baseline, Window, mad

MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""


class Likelihood:
    """Mean log-prob (nats/token, <= 0) of tokens of responses with a positive advantage, against its best level."""

    def __init__(self) -> None:
        self._base = Baseline()
        self._now = Window(rows=10, steps=20, least=4)
        self._recent = Window(rows=60, steps=10**9, least=6)
        self._other = Window(rows=10, steps=20, least=4)
        self.best: float | None = None
        self.other_at_best: float | None = None

    def update(self, step: int, logp: float, entropy: float | None) -> None:
        """Take a row; ``entropy`` (nats/token) where it is measured."""
        self._base.update(step, logp)
        self._now.update(step, logp)
        self._recent.update(step, logp)
        if entropy is not None:
            self._other.update(step, entropy)
        now = self._now.get()
        if now is None:
            return
        self.best = now if self.best is None else max(self.best, now)
        # Within three errors of the best, which is a maximum over many rows.
        if self.best - now <= 3.0 * self.error:
            self.other_at_best = self._other.get()

    @property
    def now(self) -> float | None:
        """Median of the last rows."""
        return self._now.get()

    @property
    def start(self) -> float | None:
        """Median of the first rows."""
        return self._base.get()

    @property
    def error(self) -> float:
        """Standard error of the level now, from first differences."""
        jumps = [b - a for a, b in pairwise(self._recent.values)]
        noise = mad(jumps, 0.0) / math.sqrt(2.0) if jumps else 0.0
        return MEDIAN_ERROR * noise / math.sqrt(max(len(self._now), 1))

    @property
    def lost(self) -> float:
        """Nats/token below the best level, >= 0."""
        return 0.0 if self.now is None or self.best is None else self.best - self.now

    @property
    def unexplained(self) -> float | None:
        """Of that, what entropy has not risen by since it was last at its best; None where entropy is not measured.

        A policy that explores more gives all its responses less probability, the correct ones too: no displacement.
        """
        now, then = self._other.get(), self.other_at_best
        return None if now is None or then is None else self.lost - max(now - then, 0.0)

    def displaced(self, share: float, errors: float = 5.0) -> bool | None:
        """Whether it has fallen, mostly in ways that entropy does not explain; None where entropy is not measured."""
        left = self.unexplained
        if left is None:
            return None
        least = max(share * abs(self.best or 0.0), 1.5 * errors * self.error, self.lost / 2.0)
        return self.fallen(share, errors) and left > least

    def fallen(self, share: float, errors: float = 5.0) -> bool:
        """Whether it lost ``share`` of its best level, more than ``errors`` standard errors."""
        best = self.best
        return best is not None and self.lost > max(share * abs(best), errors * self.error, 1e-9)
