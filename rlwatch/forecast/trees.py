"""Sums of decision trees and of weighted features, read without the library that fitted them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAF = -1
"""Feature of a node that asks nothing."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in columns of equal length, the root first and every child behind its parent.

    ``feature``: index of what is asked, or :data:`LEAF`; ``threshold``: a value at or below it goes ``left``;
    ``missing_left``: whether NaN does; ``value``: what is added if the walk ends here (in log-odds), or would have
    been.
    """

    feature: Sequence[int]
    threshold: Sequence[float]
    missing_left: Sequence[int]
    left: Sequence[int]
    right: Sequence[int]
    value: Sequence[float]

    def walk(self, x: Sequence[float]) -> list[int]:
        """Nodes from the root to a leaf."""
        node, path = 0, [0]
        while (feature := self.feature[node]) != LEAF:
            asked = x[feature]
            left = self.missing_left[node] if math.isnan(asked) else asked <= self.threshold[node]
            node = self.left[node] if left else self.right[node]
            path.append(node)
        return path

    def asking(self, place: Mapping[int, int]) -> Tree:
        """The same tree over features that lie elsewhere."""
        feature = tuple(LEAF if asked == LEAF else place[asked] for asked in self.feature)
        return Tree(feature, self.threshold, self.missing_left, self.left, self.right, self.value)

    def times(self, factor: float) -> Tree:
        """The same tree with all its values multiplied."""
        values = tuple(factor * value for value in self.value)
        return Tree(self.feature, self.threshold, self.missing_left, self.left, self.right, values)


FAR = 5.0
"""Spreads at which a feature of a weighted sum is cut off: a line has no other way not to be carried away by one."""


@dataclass(frozen=True, slots=True)
class Line:
    """A weighted sum, in columns of equal length: ``weight`` times ``feature`` (an index) over its ``spread``.

    A feature counts for at most :data:`FAR` spreads; one that was not measured has not moved, and adds nothing.
    """

    feature: Sequence[int] = ()
    spread: Sequence[float] = ()
    weight: Sequence[float] = ()

    def terms(self, x: Sequence[float]) -> list[tuple[int, float]]:
        """Of each feature that was measured, what it adds."""
        found = []
        for feature, spread, weight in zip(self.feature, self.spread, self.weight, strict=True):
            value = x[feature]
            if value and not math.isnan(value):
                found.append((feature, weight * max(-FAR, min(FAR, value / spread))))
        return found


@dataclass(frozen=True, slots=True)
class Head:
    """Log-odds of one question: ``base``, the trees and the line added up, ``slope`` times that plus ``offset``.

    Slope and offset are the calibration.
    """

    base: float
    trees: tuple[Tree, ...]
    slope: float = 1.0
    offset: float = 0.0
    line: Line = Line()

    def logit(self, x: Sequence[float]) -> float:
        """Calibrated log-odds."""
        total = self.base
        for tree in self.trees:
            total += tree.value[tree.walk(x)[-1]]
        for _, added in self.line.terms(x):
            total += added
        return self.slope * total + self.offset

    def shares(self, x: Sequence[float]) -> dict[int, float]:
        """What each feature added to the log-odds: along each path, the change of value goes to what was asked.

        Exact: the values sum to the logit less that of a walk that asks nothing (Saabas, 2014).
        """
        added = {feature: self.slope * term for feature, term in self.line.terms(x)}
        for tree in self.trees:
            path = tree.walk(x)
            for node, after in pairwise(path):
                feature = tree.feature[node]
                change = self.slope * (tree.value[after] - tree.value[node])
                added[feature] = added.get(feature, 0.0) + change
        return added


def probability(logit: float) -> float:
    """Logistic function, for any finite or infinite logit."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(min(logit, 700.0)))
