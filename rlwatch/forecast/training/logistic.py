"""The same hazards by logistic regression, which can only weigh and add: half of the model, and its cross-check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.training.examples import Examples, Floats
from rlwatch.forecast.training.grow import Growth, intervals
from rlwatch.forecast.trees import FAR, Line

PENALTY = 0.01
"""Inverse strength of the quadratic penalty (``C`` of scikit-learn)."""
ROUNDS = 300
SLIGHT = 0.003
"""Log-odds a spread below which a feature is left out."""


@dataclass(frozen=True)
class Lines:
    """Weights of the three intervals between the horizons, of features over their ``spread``."""

    spread: Floats
    hazards: tuple[Any, Any, Any]

    def line(self, interval: int, share: float) -> tuple[float, Line]:
        """Offset and weights of one interval, multiplied by ``share``."""
        head = self.hazards[interval]
        places = np.flatnonzero(head.coef_[0])
        weights = share * head.coef_[0][places]
        line = Line(tuple(places.tolist()), tuple(self.spread[places].tolist()), tuple(weights.tolist()))
        return share * float(head.intercept_[0]), line

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Uncalibrated log-odds of each interval, (n, 3)."""
        seen = scaled(x, self.spread)
        return np.stack([head.decision_function(seen) for head in self.hazards], axis=1)


def scaled(x: npt.NDArray[np.float32], spread: Floats) -> Floats:
    """Features in their spreads, at most :data:`FAR`; what was not measured has not moved: 0."""
    return np.clip(np.nan_to_num(x / spread), -FAR, FAR)


def fit(part: Examples, _: Growth | None = None, /) -> Lines:
    """Fit to examples. Columns without values, or always the same, weigh nothing."""
    from sklearn.linear_model import LogisticRegression

    filled = np.nan_to_num(part.x.astype(np.float64))
    root = np.sqrt((filled**2).mean(axis=0))
    spread = np.where(root > 0.0, root, 1.0)
    seen = scaled(part.x, spread)
    first, second, third = (
        LogisticRegression(C=PENALTY, max_iter=ROUNDS).fit(seen[rows], hit) for rows, hit in intervals(part)
    )
    for head in (first, second, third):
        head.coef_ = np.where(np.abs(head.coef_) < SLIGHT, 0.0, head.coef_)
    return Lines(spread, (first, second, third))
