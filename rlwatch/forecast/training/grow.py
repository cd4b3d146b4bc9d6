"""Growing heads with scikit-learn, and reading them out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlwatch.errors import ConfigError
from rlwatch.forecast.features import FEATURES
from rlwatch.forecast.forecast import HORIZONS
from rlwatch.forecast.training.examples import Examples, Floats
from rlwatch.forecast.trees import LEAF, Head, Tree

BEYOND = 1e300
"""More than any feature, and still a number that JSON has."""
LEAST_EVENTS = 8
"""Runs with an onset of one type from which it gets a head of its own."""


WORSE_WHEN_HIGH = frozenset(
    {
        *("mismatch", "mismatch_gap", "mismatch_tail", "mismatch_prob", "mismatch_weights", "mismatch_sequences"),
        *(
            "mismatch_cut",
            "kl_ref",
            "kl_ref_tail",
            "kl_old",
            "ratio_spread",
            "ratio_max",
            "cut_off",
            "repetition",
            "grad",
        ),
    }
)
"""Signals of which more has never been good."""
RISING = frozenset(
    feature
    for feature in FEATURES
    if (feature.startswith("limit:") and feature.endswith(":share"))
    or (
        feature.split(":")[0] in WORSE_WHEN_HIGH
        and feature.split(":")[-1] in {"low", "high", "z", "slope25", "slope60"}
    )
)
"""Features that a cautious model may only take as a sign of a failure: the way to a limit, and rises of those."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How trees are grown. ``rising``: features whose increase may only raise the chance (monotone constraints)."""

    trees: int = 120
    leaves: int = 10
    rate: float = 0.07
    l2: float = 5.0
    least: int = 40
    share: float = 0.2
    seed: int = 0
    rising: frozenset[str] = frozenset()

    def classifier(self) -> Any:
        """An untrained classifier."""
        from sklearn.ensemble import HistGradientBoostingClassifier

        return HistGradientBoostingClassifier(
            max_iter=self.trees,
            max_leaf_nodes=self.leaves,
            learning_rate=self.rate,
            l2_regularization=self.l2,
            min_samples_leaf=self.least,
            max_features=self.share,
            early_stopping=False,
            random_state=self.seed,
            monotonic_cst=[int(feature in self.rising) for feature in FEATURES] if self.rising else None,
        )


@dataclass(frozen=True)
class Grown:
    """Classifiers of the three intervals between the horizons; ``kinds``: of each type of onset."""

    hazards: tuple[Any, Any, Any]
    kinds: dict[str, Any]

    def logits(self, x: npt.NDArray[np.float32]) -> Floats:
        """Uncalibrated log-odds of each interval, (n, 3)."""
        return np.stack([head.decision_function(x) for head in self.hazards], axis=1)


def intervals(part: Examples) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Of each interval: rows that are at risk in it and were watched to its end, and whether the onset fell into it."""
    found = []
    for low, high in zip((0, *HORIZONS), HORIZONS, strict=False):
        hit = (part.ahead > low) & (part.ahead <= high)
        watched = hit | ((part.ahead > high) & (part.left >= high))
        rows = np.flatnonzero(watched & (part.ahead > low))
        found.append((rows, hit[rows]))
    return found


def grow(part: Examples, how: Growth, *, kinds: bool = False) -> Grown:
    """Train on examples. Raises ``ConfigError`` where an interval has no failure, or nothing else."""
    found = intervals(part)
    for (_, hit), low, high in zip(found, (0, *HORIZONS), HORIZONS, strict=False):
        if not 0 < hit.sum() < len(hit):
            raise ConfigError(
                f"of {len(hit)} rows watched for a failure {low} to {high} steps ahead, {hit.sum()} saw one: there is "
                "nothing to tell apart; add runs that are longer, and both failing and sound ones"
            )
    first, second, third = (_fitted(how, part.x[rows], hit) for rows, hit in found)
    return Grown((first, second, third), _kinds(part, how) if kinds else {})


def _fitted(how: Growth, x: npt.NDArray[np.float32], hit: npt.NDArray[np.bool_]) -> Any:
    """A classifier. Columns without any value are constant to it: scikit-learn cannot bin them."""
    empty = np.isnan(x).all(axis=0)
    return how.classifier().fit(np.where(empty, np.float32(0.0), x), hit)


def _kinds(part: Examples, how: Growth) -> dict[str, Any]:
    """One against the others, on the last 100 steps before an onset."""
    rows = np.flatnonzero((part.ahead > 0) & (part.ahead <= HORIZONS[-1]))
    small = Growth(trees=30, leaves=6, rate=0.15, l2=how.l2, least=20, share=how.share, seed=how.seed)
    found = {}
    for kind in np.unique(part.kind[rows]):
        hit = part.kind[rows] == kind
        if len(np.unique(part.run[rows][hit])) >= LEAST_EVENTS and not hit.all():
            found[str(kind)] = _fitted(small, part.x[rows], hit)
    return found


def head_of(classifier: Any, slope: float = 1.0, offset: float = 0.0) -> Head:
    """The trees of a classifier as plain numbers: the same log-odds, but for rounding to 32 bits."""
    trees = tuple(_tree(stage[0].nodes) for stage in classifier._predictors)  # noqa: SLF001  (no public way out)
    return Head(float(classifier._baseline_prediction.ravel()[0]), trees, slope, offset)  # noqa: SLF001


def _tree(nodes: Any) -> Tree:
    leaf = nodes["is_leaf"].astype(bool)
    asked = np.clip(nodes["num_threshold"], -BEYOND, BEYOND)  # infinite where only missing values go the other way
    return Tree(
        feature=tuple(np.where(leaf, LEAF, nodes["feature_idx"]).tolist()),
        threshold=tuple(np.where(leaf, 0.0, asked).tolist()),
        missing_left=tuple(nodes["missing_go_to_left"].astype(int).tolist()),
        left=tuple(np.where(leaf, 0, nodes["left"]).astype(int).tolist()),
        right=tuple(np.where(leaf, 0, nodes["right"]).astype(int).tolist()),
        value=tuple(nodes["value"].tolist()),
    )


def gains(grown: Grown) -> dict[str, float]:
    """Share of each feature in what the hazards gained by asking for it."""
    total = np.zeros(len(FEATURES))
    for classifier in grown.hazards:
        for stage in classifier._predictors:  # noqa: SLF001
            nodes = stage[0].nodes
            asked = ~nodes["is_leaf"].astype(bool)
            np.add.at(total, nodes["feature_idx"][asked], np.maximum(nodes["gain"][asked], 0.0))
    return dict(zip(FEATURES, (total / max(total.sum(), 1e-12)).tolist(), strict=True))
